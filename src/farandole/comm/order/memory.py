"""The requests of one group that a rank knows by number: its copy of the coordinator's cache. Pure.

All copies change by the same verdicts in the same order, so a number means the same to all.
"""

from __future__ import annotations

from dataclasses import dataclass

from farandole.comm.header import Header
from farandole.comm.order.wire import Agreed, Part


@dataclass(frozen=True)
class Entry:
    """A request that was agreed on."""

    key: str
    own: Header
    """This rank's header."""
    headers: tuple[Header, ...]
    """Those of all members, in their order."""


class Memory:
    """What the rank at ``place`` among the members remembers."""

    def __init__(self, place: int) -> None:
        self.generation = 0
        self._place = place
        self._entries: list[Entry] = []
        self._numbers: dict[str, int] = {}

    def describe(self, part: Part, key: str, header: Header) -> int | None:
        """Put a request into ``part``: as a bit, if it is known and has not changed; its number."""
        number = self._numbers.get(key)
        if number is not None and self._entries[number].own == header:
            part.bits |= 1 << number
            return number
        part.new.append((key, header.name is not None, header.encode()))
        return None

    def recall(self, number: int) -> Entry:
        """The request that is known by ``number``."""
        return self._entries[number]

    def learn(self, verdict: Agreed) -> tuple[Header, ...]:
        """Remember what was agreed on, if it has a number; the members' headers.

        For members that have joined that is another one's.
        """
        distinct = [Header.decode(each) for each in verdict.headers]
        headers = tuple(distinct[max(place, 0)] for place in verdict.which)
        if verdict.number is not None:
            entry = Entry(verdict.key, headers[self._place], headers)
            if verdict.number == len(self._entries):
                self._entries.append(entry)
            else:
                self._entries[verdict.number] = entry
            self._numbers[verdict.key] = verdict.number
        return headers

    def begin_anew(self) -> None:
        """The numbers mean nothing any more."""
        self.generation += 1
        self._entries, self._numbers = [], {}
