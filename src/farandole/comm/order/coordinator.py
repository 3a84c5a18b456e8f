"""What all ranks are ready for: requests in, verdicts out. Pure; it lives in rank 0's hub.

A request is *ready* when each member of its group has submitted it, or has joined. Its headers are
compared then, and all members learn the verdict, in the same order as all other verdicts: that
order is what they carry the requests out in.

A named request that was agreed on gets a number in its group's cache. When a rank submits it again
with the same header it sends the number alone; if all do, the bits of their numbers are compared,
and neither headers nor names travel. A rank that sends another header for it changes it for all:
the numbers that others sent stand for the headers that they sent before.

When the cache of a group is full it begins anew, with the next *generation*. Numbers of an earlier
one are understood until every member has sent a message in a later one: a member's messages come
in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from farandole.comm.control.watch import GatherKey
from farandole.comm.header import Header, find_mismatch
from farandole.comm.order import wire
from farandole.comm.order.wire import Agreed, Flush, Joined, Known, Part, Refused, Verdict

JOINABLE = "allreduce"
"""The operation that a rank which has joined takes part in, with zeros."""

Addressed = tuple[tuple[int, ...], Verdict]
"""The ranks that a verdict is for, and the verdict."""


@dataclass
class _Entry:
    """A request in the cache: its key, and the header of each member."""

    key: str
    headers: tuple[bytes, ...]


@dataclass
class _Asked:
    """A request that not all members have submitted yet."""

    cacheable: bool
    headers: dict[int, bytes] = field(default_factory=dict)
    """By rank."""


class _Group:
    """The requests of one group. Ranks are global ones."""

    def __init__(self, key: str, members: tuple[int, ...], capacity: int) -> None:
        self.key = key
        self.members = members
        self.closed: set[int] = set()
        self._place = {rank: place for place, rank in enumerate(members)}
        self._capacity = capacity
        self._generation = 0
        self._cache: list[_Entry] = []
        self._earlier: dict[int, list[_Entry]] = {}
        """The caches of earlier generations that a message on its way may refer to."""
        self._seen = dict.fromkeys(members, 0)
        """The generation of each member's last message."""
        self._numbers: dict[str, int] = {}
        self._bits: dict[int, int] = {}
        """By rank: numbers that it has submitted."""
        self._changed = 0
        """Numbers of requests that somebody submitted with another header."""
        self._asked: dict[str, _Asked] = {}

    def submit(self, rank: int, part: Part, joined: set[int]) -> list[Verdict]:
        """Take in what ``rank`` submits; what is ready now."""
        touched = self._take_bits(rank, part)
        for key, cacheable, header in part.new:
            self._ask(rank, key, cacheable, header)
            touched.append(key)
        return self._ready(touched, joined)

    def review(self, joined: set[int]) -> list[Verdict]:
        """What is ready now that ranks have joined."""
        return self._ready(list(self._asked), joined)

    def _take_bits(self, rank: int, part: Part) -> list[str]:
        bits = part.bits
        old = part.generation != self._generation
        cache = self._earlier.get(part.generation) if old else self._cache
        if cache is None or bits < 0 or bits.bit_length() > len(cache):
            raise ValueError(f"numbers of generation {part.generation} in group {self.key}")
        self._note_generation(rank, part.generation)
        as_headers = bits if old else bits & self._changed
        touched: list[str] = []
        for number in wire.numbers_in(as_headers):
            entry = cache[number]
            self._ask(rank, entry.key, True, entry.headers[self._place[rank]])
            touched.append(entry.key)
        bits &= ~as_headers
        mine = self._bits.get(rank, 0)
        if mine & bits:
            raise ValueError(f"rank {rank} submitted a request twice in group {self.key}")
        if bits:
            self._bits[rank] = mine | bits
        return touched

    def _note_generation(self, rank: int, generation: int) -> None:
        if generation == self._seen[rank]:
            return
        self._seen[rank] = generation
        oldest = min(self._seen.values())
        for each in [each for each in self._earlier if each < oldest]:
            del self._earlier[each]

    def _ask(self, rank: int, key: str, cacheable: bool, header: bytes) -> None:
        number = self._numbers.get(key)
        if number is not None and not self._changed >> number & 1:
            self._change(number)
        asked = self._asked.setdefault(key, _Asked(cacheable))
        if rank in asked.headers:
            raise ValueError(f"rank {rank} submitted {key!r} twice in group {self.key}")
        asked.headers[rank] = header

    def _change(self, number: int) -> None:
        """Somebody sent another header: let the numbers that the others sent become headers."""
        bit = 1 << number
        self._changed |= bit
        entry = self._cache[number]
        for rank in [rank for rank, bits in self._bits.items() if bits & bit]:
            self._withdraw(rank, bit)
            asked = self._asked.setdefault(entry.key, _Asked(True))
            asked.headers[rank] = entry.headers[self._place[rank]]

    def _withdraw(self, rank: int, bits: int) -> None:
        left = self._bits[rank] & ~bits
        if left:
            self._bits[rank] = left
        else:
            del self._bits[rank]

    def _ready(self, keys: Iterable[str], joined: set[int]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        absent = joined.intersection(self.members)
        if absent:
            keys = [*keys, *self._unpack_bits(absent)]
        elif len(self._bits) == len(self.members):
            common = reduce(and_, self._bits.values())
            if common:
                for rank in self.members:
                    self._withdraw(rank, common)
                verdicts.append(Known(self.key, common))
        for key in dict.fromkeys(keys):
            asked = self._asked.get(key)
            if asked is not None and all(
                rank in asked.headers or rank in absent for rank in self.members
            ):
                del self._asked[key]
                verdicts.extend(self._judge(key, asked))
        return verdicts

    def _unpack_bits(self, absent: set[int]) -> list[str]:
        """Requests by number that are ready because the ranks in ``absent`` have joined."""
        there = [self._bits.get(rank, 0) for rank in self.members if rank not in absent]
        some = reduce(or_, self._bits.values(), 0)
        ready = reduce(and_, there) if there else some
        numbers = wire.numbers_in(ready & some)
        for number in numbers:
            self._change(number)
        return [self._cache[number].key for number in numbers]

    def _judge(self, key: str, asked: _Asked) -> list[Verdict]:
        number = self._numbers.get(key)
        if number is not None:
            self._changed &= ~(1 << number)
        ranks = [rank for rank in self.members if rank in asked.headers]
        distinct: dict[bytes, int] = {}
        places = {rank: distinct.setdefault(asked.headers[rank], len(distinct)) for rank in ranks}
        text = _objection(tuple(distinct), places, whole=len(ranks) == len(self.members))
        if text is not None:
            return [Refused(self.key, key, text)]
        which = tuple(places.get(rank, -1) for rank in self.members)
        verdicts: list[Verdict] = []
        if asked.cacheable and len(ranks) == len(self.members):
            if number is None and len(self._cache) >= self._capacity:
                self._flush()
                verdicts.append(Flush(self.key))
            number = self._keep(key, tuple(asked.headers[rank] for rank in self.members))
        else:
            number = None
        verdicts.append(Agreed(self.key, key, number, which, tuple(distinct)))
        return verdicts

    def _keep(self, key: str, headers: tuple[bytes, ...]) -> int:
        number = self._numbers.setdefault(key, len(self._cache))
        entry = _Entry(key, headers)
        if number == len(self._cache):
            self._cache.append(entry)
        else:
            self._cache[number] = entry
        return number

    def _flush(self) -> None:
        for number in wire.numbers_in(reduce(or_, self._bits.values(), 0)):
            self._change(number)
        self._earlier[self._generation] = self._cache
        self._generation += 1
        self._cache = []
        self._numbers = {}
        self._changed = 0

    def asked(self) -> dict[str, dict[int, bytes]]:
        """Who has submitted each request that is not ready, and with which header."""
        found = {key: dict(asked.headers) for key, asked in self._asked.items()}
        for rank, bits in self._bits.items():
            for number in wire.numbers_in(bits):
                entry = self._cache[number]
                found.setdefault(entry.key, {})[rank] = entry.headers[self._place[rank]]
        return found


def _objection(headers: Sequence[bytes], places: Mapping[int, int], *, whole: bool) -> str | None:
    """Why a request cannot be, or ``None``; ``places`` are the ranks that submitted it."""
    if whole and len(headers) == 1:
        return None
    decoded = [Header.decode(header) for header in headers]
    text = find_mismatch([decoded[place] for place in places.values()], list(places))
    if text is not None or whole or decoded[0].operation == JOINABLE:
        return text
    return (
        f"{decoded[0].operation.capitalize()} is not supported with Join at this time. Ranks that "
        f"have called join() take no part in it: let all ranks do their last {decoded[0].label} "
        "before any of them joins."
    )


class Coordinator:
    """Requests of all groups of a job, and who has joined.

    Raises ``ValueError`` for what a rank that keeps the rules would never send.

    Example::

        coordinator = Coordinator(2)
        part = Part("0", (0, 1), new=[("barrier.end", True, b"…")])
        coordinator.submit(0, [part], joins=False)   # []: rank 1 has not
        coordinator.submit(1, [part], joins=False)   # [((0, 1), Agreed(…))]
    """

    def __init__(self, size: int, capacity: int = wire.CAPACITY) -> None:
        self._everyone = tuple(range(size))
        self._capacity = capacity
        self._groups: dict[str, _Group] = {}
        self._joined: set[int] = set()

    @property
    def joined(self) -> frozenset[int]:
        """Who has joined, as long as not all have."""
        return frozenset(self._joined)

    def submit(self, rank: int, parts: Sequence[Part], *, joins: bool) -> list[Addressed]:
        """Take in what ``rank`` submits, and that it joins after that; what is ready now."""
        verdicts: list[Addressed] = []
        for part in parts:
            group = self._find(rank, part)
            if part.closes:
                self._close(rank, group)
                continue
            verdicts.extend(
                (group.members, verdict) for verdict in group.submit(rank, part, self._joined)
            )
        if joins:
            verdicts.extend(self._join(rank))
        return verdicts

    def _find(self, rank: int, part: Part) -> _Group:
        group = self._groups.get(part.group)
        if group is None:
            if len(set(part.members)) < len(part.members) or not set(part.members) <= set(
                self._everyone
            ):
                raise ValueError(f"members {part.members} of a job of {len(self._everyone)}")
            group = self._groups[part.group] = _Group(part.group, part.members, self._capacity)
        if group.members != part.members or rank not in group.members:
            raise ValueError(f"rank {rank} and {part.members} in group {part.group}")
        return group

    def _close(self, rank: int, group: _Group) -> None:
        group.closed.add(rank)
        if len(group.closed) == len(group.members):
            del self._groups[group.key]

    def _join(self, rank: int) -> list[Addressed]:
        if rank in self._joined:
            raise ValueError(f"rank {rank} joined twice")
        self._joined.add(rank)
        verdicts: list[Addressed] = [
            (group.members, verdict)
            for group in self._groups.values()
            if rank in group.members
            for verdict in group.review(self._joined)
        ]
        if len(self._joined) == len(self._everyone):
            self._joined.clear()
            verdicts.append((self._everyone, Joined(rank)))
        return verdicts

    def arrived(self) -> dict[GatherKey, frozenset[int]]:
        """Who has come, or joined, to each request that is not ready, and to the join."""
        found: dict[GatherKey, frozenset[int]] = {}
        for group in self._groups.values():
            for key, headers in group.asked().items():
                topic = wire.topic_of(group.key, key)
                found[topic, group.members] = frozenset(headers) | self._joined
        if self._joined:
            found[wire.JOIN_TOPIC, self._everyone] = frozenset(self._joined)
        return found

    def without(self, gone: int) -> dict[int, str]:
        """Who waits for the rank ``gone``, and what they call it."""
        waiting: dict[int, str] = {}
        if gone not in self._joined:
            waiting |= dict.fromkeys(self._joined, "join")
        for group in self._groups.values():
            if gone not in group.members:
                continue
            for headers in group.asked().values():
                if gone not in headers and gone not in self._joined:
                    waiting |= {rank: Header.decode(h).label for rank, h in headers.items()}
        return waiting
