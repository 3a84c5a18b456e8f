"""Which channel an optimizer's gradients travel on: the same number on all ranks.

Optimizers are numbered as they are created, so that the ranks may use them in another order
without mixing their bytes. Copies (``copy.deepcopy``, unpickling) are numbered when they are first
used, since often only one rank makes one, to save it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

from farandole.comm import group as groups

_COPIES = 1_000_000
"""Copies are closed after all others at the end of a backward pass."""


@dataclass
class _Counters:
    created: itertools.count[int] = field(default_factory=itertools.count)
    copied: itertools.count[int] = field(default_factory=itertools.count)


_counters: weakref.WeakKeyDictionary[groups.GroupRef, _Counters] = weakref.WeakKeyDictionary()


class Channel:
    """The group's ref and, within it, the number of one optimizer."""

    def __init__(self, ref: groups.GroupRef | None, number: int | None) -> None:
        self._ref = ref
        self._number = number

    @property
    def ref(self) -> groups.GroupRef:
        """The ranks that share the gradients. ``NotInitializedError`` before ``init()``."""
        if self._ref is None:
            self._ref = groups.root()
        return self._ref

    @property
    def number(self) -> int:
        """Unique within the group and alike on all ranks; 0 for a copy that was not used yet."""
        return self._number or 0

    def open(self) -> None:
        """The channel is used now: a copy gets its number."""
        if self._number is None:
            self._number = _COPIES + next(_counters.setdefault(self.ref, _Counters()).copied)

    @property
    def name(self) -> str:
        """For keys and positions."""
        if self.number >= _COPIES:
            return f"copy{self.number - _COPIES}"
        return str(self.number)


def claim() -> Channel:
    """The next optimizer's channel. ``NotInitializedError`` before ``init()``."""
    ref = groups.root()
    return Channel(ref, next(_counters.setdefault(ref, _Counters()).created))


def claim_later() -> Channel:
    """The channel of a copy, numbered at its first use."""
    return Channel(None, None)
