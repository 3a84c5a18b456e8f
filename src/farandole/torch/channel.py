"""Which channel an optimizer's gradients travel on: the same number on all ranks.

Optimizers are numbered as they are created, so that the ranks may use them in another order
without mixing their bytes. Copies (``copy.deepcopy``, unpickling) are numbered when they are first
used, since often only one rank makes one, to save it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field

from farandole.comm import group as groups
from farandole.comm.group import Group
from farandole.torch.process_sets import ProcessSet

_COPIES = 1_000_000
"""Copies are closed after all others at the end of a backward pass."""


_SET = 1_000_000_000
"""Optimizers on a process set are closed after those on the sets before."""


@dataclass
class _Counters:
    """How many there have been, by process set."""

    created: Counter[tuple[int, int]] = field(default_factory=Counter)
    copied: Counter[tuple[int, int]] = field(default_factory=Counter)


_counters: weakref.WeakKeyDictionary[groups.GroupRef, _Counters] = weakref.WeakKeyDictionary()


class Channel:
    """The ranks that share an optimizer's gradients and, among those, its number."""

    def __init__(
        self, ref: groups.GroupRef | None, number: int | None, process_set: ProcessSet
    ) -> None:
        self._ref = ref
        self._number = number
        self._process_set = process_set

    @property
    def _root(self) -> groups.GroupRef:
        if self._ref is None:
            self._ref = groups.root()
        return self._ref

    @property
    def group(self) -> Group | None:
        """The ranks that share the gradients; ``None`` on a rank that is none of them.

        ``NotInitializedError`` before ``init()``.
        """
        return self._process_set.group_in(self._root.current)

    def is_of(self, ref: groups.GroupRef) -> bool:
        """Whether it was used or claimed, and is shared with other ranks of ``ref`` now."""
        if self._ref is not ref or self._number is None:
            return False
        if self._process_set.process_set_id is None:
            return False  # not registered any more
        group = self.group
        return group is not None and group.size > 1

    @property
    def set_number(self) -> int:
        """The number of the process set, alike on all ranks."""
        return self._process_set.process_set_id or 0

    @property
    def number(self) -> int:
        """Unique within the group and alike on all ranks; 0 for a copy that was not used yet."""
        return self._number or 0

    def open(self) -> None:
        """The channel is used now: a copy gets its number."""
        if self._number is None:
            counters = _counters.setdefault(self._root, _Counters())
            self._number = _COPIES + _next(counters.copied, self._process_set.scope())

    @property
    def order(self) -> int:
        """Where it stands among all channels; alike on all ranks that share it."""
        return self._process_set.scope()[1] * _SET + self.number

    @property
    def name(self) -> str:
        """For keys and positions."""
        if self.number >= _COPIES:
            return f"copy{self.number - _COPIES}"
        return str(self.number)


def claim(process_set: ProcessSet) -> Channel:
    """The next optimizer's channel. ``NotInitializedError`` before ``init()``."""
    ref = groups.root()
    counters = _counters.setdefault(ref, _Counters())
    return Channel(ref, _next(counters.created, process_set.scope()), process_set)


def mark() -> dict[tuple[int, int], int]:
    """How many optimizers this process has made so far, for :func:`rewind`."""
    return dict(_counters.setdefault(groups.root(), _Counters()).created)


def rewind(to: dict[tuple[int, int], int]) -> None:
    """Number the next optimizers as after :func:`mark`.

    For what is run again: optimizers that it makes take the place of those that it made before,
    under the numbers that they have in a process that runs it for the first time.
    """
    _counters.setdefault(groups.root(), _Counters()).created = Counter(to)


def _next(counter: Counter[tuple[int, int]], scope: tuple[int, int]) -> int:
    counter[scope] += 1
    return counter[scope] - 1


def claim_later(process_set: ProcessSet) -> Channel:
    """The channel of a copy, numbered at its first use."""
    return Channel(None, None, process_set)
