"""Process sets: groups of some of the ranks, by a number that all ranks know them by."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.core.errors import MismatchError, UsageError
from farandole.core.worlds import World

if TYPE_CHECKING:
    from farandole.comm.group import Group

TOPIC = "sets"


@dataclass(frozen=True)
class Legacy:
    """What a root group hands on to its successor."""

    lineage: int
    """The generation in which the succession began."""
    sets: Mapping[int, tuple[int, ...]]
    """The members of each process set, by its number."""
    count: int
    """The highest number of a set that was ever used."""

    def in_numbers(self, world: World | None) -> Legacy:
        """With the workers' own numbers in place of their ranks, which are about to change."""
        assert world is not None  # its ranks have formed the group
        sets = {n: tuple(world.members[rank] for rank in ranks) for n, ranks in self.sets.items()}
        return dataclasses.replace(self, sets=sets)

    def with_heirs(self, world: World) -> Legacy:
        """In numbers: with those of ``world`` who have taken the places of lost ones."""
        heirs = dict(world.heirs)
        sets = {n: tuple(heirs.get(each, each) for each in own) for n, own in self.sets.items()}
        return dataclasses.replace(self, sets=sets)

    def in_ranks(self, world: World) -> Legacy:
        """The inverse of :meth:`in_numbers` in another world, without those who are not in it."""
        now = {number: rank for rank, number in enumerate(world.members)}
        sets = {
            number: tuple(now[each] for each in members if each in now)
            for number, members in self.sets.items()
        }
        return dataclasses.replace(self, sets=sets)

    def to_bytes(self) -> bytes:
        """As JSON."""
        sets = {str(number): members for number, members in self.sets.items()}
        return json.dumps({"lineage": self.lineage, "sets": sets, "count": self.count}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Legacy:
        """The inverse of :meth:`to_bytes`."""
        said = json.loads(data)
        sets = {int(number): tuple(members) for number, members in said["sets"].items()}
        return cls(said["lineage"], sets, said["count"])


class ProcessSets:
    """The process sets of a root group, the same on all its ranks.

    Number 0 is the root itself; the others count up from 1, and none is used twice.
    """

    def __init__(self, root: Group) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._count = 0
        self._members: dict[int, tuple[int, ...]] = {0: root.members}
        self._groups: dict[int, Group | None] = {0: root}

    def inherit(self, members: Mapping[int, tuple[int, ...]], count: int) -> None:
        """Take over the sets of the generation before: ``members`` by number, as ranks of now.

        The same on all ranks. ``count`` is the highest number that was ever used. A set of which
        nobody is left keeps its number.
        """
        self._count = count
        for number, ranks in members.items():
            if number == 0:
                continue
            chosen = tuple(sorted(ranks))
            part = self._root.part(f"{self._root.key}/set{number}", chosen, number)
            self._members[number] = chosen
            self._groups[number] = part

    @property
    def count(self) -> int:
        """The highest number that was ever used."""
        return self._count

    def find(self, ranks: Sequence[int]) -> int | None:
        """The number of the set of exactly these ranks."""
        chosen = tuple(sorted(ranks))
        return next((n for n, members in self.members().items() if members == chosen), None)

    def add(self, ranks: Sequence[int]) -> int:
        """A new set of ``ranks``; collective over the root. See :meth:`Group.add_set`."""
        chosen = tuple(sorted(ranks))
        size = self._root.size
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(size)) or not chosen:
            raise UsageError(
                f"A process set takes different ranks, of 0 to {size - 1}, and at least one; got "
                f"{list(ranks)}."
            )
        self._agree(["add", *chosen], f"process set of ranks {list(chosen)}")
        for number, members in self.members().items():
            if members == chosen:
                raise UsageError(
                    f"A process set with ranks {list(chosen)} exists already: number {number}."
                )
        with self._lock:
            self._count += 1
            number = self._count
        part = self._root.part(f"{self._root.key}/set{number}", chosen, number)
        with self._lock:
            self._members[number] = chosen
            self._groups[number] = part
        return number

    def remove(self, number: int) -> bool:
        """Give up a set; collective over the root. See :meth:`Group.remove_set`."""
        what = f"removal of process set {number}"
        self._root.flush()  # what was submitted before this call counts as submitted
        self._agree(["remove", number], what)
        if number == 0 or number not in self._members:
            return False
        group = self._groups[number]
        if group is not None:
            group.drain(what)
        # Only when all have the last results may the first close its end.
        self._agree(["removed", number], what)
        with self._lock:
            del self._members[number]
            del self._groups[number]
        if group is not None:
            group.close()
        return True

    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each set, ascending."""
        with self._lock:
            return dict(self._members)

    def group(self, number: int) -> Group | None:
        """The group of a set; ``None`` when this rank is not in it."""
        with self._lock:
            if number not in self._groups:
                known = ", ".join(map(str, self._groups))
                raise UsageError(f"There is no process set {number}. There are: {known}.")
            if not self._members[number]:
                raise UsageError(
                    f"Process set {number} has no ranks any more: all of them were lost."
                )
            return self._groups[number]

    def _agree(self, said: list[str | int], what: str) -> None:
        answers = self._root.agree(TOPIC, json.dumps(said).encode(), what)
        if len(set(answers)) > 1:
            given = "; ".join(
                f"rank {rank}: {_read(answer)}" for rank, answer in enumerate(answers)
            )
            raise MismatchError(
                f"The ranks asked for different process sets: {given}. Add and remove the same "
                "sets in the same order on every rank, also on those that are not in them.",
                ranks=self._root.members,
            )


def _read(answer: bytes) -> str:
    verb, *numbers = json.loads(answer)
    return f"{verb} {numbers}"
