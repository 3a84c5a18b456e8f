"""The hub's table of gathers that are under way. Pure: contributions in, answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farandole.comm.control.watch import GatherKey

MAX_ANSWER = 48 * 1024 * 1024
"""Bytes of all distinct payloads of one gather. Larger things travel by a collective."""


@dataclass(frozen=True)
class Answer:
    """What to send to one contributor."""

    rank: int
    request: int
    payloads: tuple[bytes, ...] = ()
    """The distinct payloads."""
    which: tuple[int, ...] = ()
    """For each member, in their order: the index of its payload."""
    refusal: str = ""
    """Why there is no result."""


@dataclass
class _Gather:
    requests: dict[int, int] = field(default_factory=dict)
    what: dict[int, str] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    """Ranks that have joined, and were told that this gather misses them."""


class Gathers:
    """Gathers by topic and members.

    Example::

        gathers = Gathers()
        gathers.contribute(0, 1, ("epoch/3", (0, 1)), b"x", "epoch 3")   # []: rank 1 is missing
        gathers.contribute(1, 1, ("epoch/3", (0, 1)), b"x", "epoch 3")   # two answers
    """

    def __init__(self) -> None:
        self._open: dict[GatherKey, _Gather] = {}

    def contribute(
        self, rank: int, request: int, key: GatherKey, payload: bytes, what: str
    ) -> list[Answer]:
        """Take in one rank's part, which people call ``what``; the answers to be given now."""
        topic, members = key
        if rank not in members:
            return [Answer(rank, request, refusal=f"Rank {rank} is no member of {topic!r}.")]
        gather = self._open.setdefault(key, _Gather())
        if rank in gather.requests:
            text = f"Rank {rank} contributed twice to {topic!r}: each topic may be used once."
            return [Answer(rank, request, refusal=text)]
        gather.requests[rank] = request
        gather.payloads[rank] = payload
        gather.what[rank] = what
        if len(gather.requests) < len(members):
            return []
        del self._open[key]
        return _answers(topic, members, gather)

    def arrived(self) -> Mapping[GatherKey, frozenset[int]]:
        """Who has contributed to each gather that is not complete."""
        return {key: frozenset(gather.requests) for key, gather in self._open.items()}

    def tell(self, joined: frozenset[int]) -> list[tuple[int, str]]:
        """Of the ranks that have ``joined``, who is missed in which topic; each is named once."""
        missed: list[tuple[int, str]] = []
        for (topic, members), gather in self._open.items() if joined else ():
            ranks = joined.intersection(members).difference(gather.requests, gather.told)
            gather.told |= ranks
            missed += [(rank, topic) for rank in sorted(ranks)]
        return missed

    def without(self, gone: int) -> dict[int, str]:
        """Who waits in a gather that needs the rank ``gone``, and what they call it."""
        waiting: dict[int, str] = {}
        for (_, members), gather in self._open.items():
            if gone in members and gone not in gather.requests:
                waiting |= gather.what
        return waiting


def _answers(topic: str, members: Sequence[int], gather: _Gather) -> list[Answer]:
    distinct: dict[bytes, int] = {}
    which = tuple(distinct.setdefault(gather.payloads[rank], len(distinct)) for rank in members)
    size = sum(map(len, distinct))
    refusal = ""
    if size > MAX_ANSWER:
        refusal = (
            f"The ranks' parts of {topic!r} are {size} bytes together; the control channel "
            f"carries up to {MAX_ANSWER}. Use a collective for larger data."
        )
    payloads = () if refusal else tuple(distinct)
    return [Answer(r, gather.requests[r], payloads, which, refusal) for r in members]
