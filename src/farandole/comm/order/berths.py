"""Buffers in which requests that travel together again and again lie side by side from the start.

The first time, requests that were agreed on together are copied into one buffer. From then on each
of them is copied to its place in such a buffer when it is submitted, instead of into a buffer of
its own. When the same ones are agreed on together, there is nothing left to copy; when it comes
differently, what lies in one buffer travels like any other. So no two ranks need to do the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farandole.comm.collectives.request import Space
from farandole.comm.modes import modes


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where requests lie in a buffer, by their keys; in the order in which they travel."""

    places: dict[str, tuple[int, int]]
    """First element, and number of elements."""
    total: int
    dtype: torch.dtype


@dataclass(eq=False)
class Hold:
    """One buffer on its way to be filled."""

    layout: _Layout
    whole: Tensor
    taken: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Berth:
    """A request's place in a buffer."""

    hold: Hold
    buffer: Tensor
    """The part of the buffer that is the request's."""


class Berths:
    """The buffers of one group, in the CPU's memory. Any thread may call anything.

    Example::

        berth = berths.take("allreduce.loss", Space(torch.float32, 1))   # None: not known yet
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: dict[str, Hold] = {}
        """By the requests' keys: the buffer that is being filled."""

    def take(self, key: str, space: Space) -> Berth | None:
        """A place for the request, if it has one of that size."""
        with self._lock:
            hold = self._holds.get(key)
            if hold is None:
                return None
            layout = hold.layout
            begin, length = layout.places[key]
            if length != space.length or layout.dtype != space.dtype:
                return None
            if key in hold.taken:
                full, hold = hold, Hold(layout, _empty(layout))
                for each in layout.places:
                    if self._holds.get(each) is full:
                        self._holds[each] = hold
            hold.taken.add(key)
        return Berth(hold, hold.whole.narrow(0, begin, length))

    def remember(self, keys: Sequence[str], lengths: Sequence[int], whole: Tensor) -> None:
        """These requests have travelled together, copied one after the other into ``whole``."""
        places, begin = {}, 0
        for key, length in zip(keys, lengths, strict=True):
            places[key] = (begin, length)
            begin += length
        layout = _Layout(places, begin, whole.dtype)
        with self._lock:
            # It stands for a buffer that is full: the first that comes back finds a new one.
            hold = Hold(layout, whole.new_empty(0), set(places))
            self._holds.update(dict.fromkeys(keys, hold))

    def forget(self) -> None:
        """Whoever comes back is copied anew."""
        with self._lock:
            self._holds.clear()


def _empty(layout: _Layout) -> Tensor:
    with modes(inference=False, stream=None):  # Others, in other modes, write to it as well.
        # Named, since the user's default device may be another one.
        return torch.empty(layout.total, dtype=layout.dtype, device="cpu")


def leave(keys: Sequence[str], berths: Sequence[Berth | None]) -> Tensor | None:
    """The buffer that these requests fill, in their order, if they do. It is theirs from now on."""
    first = berths[0]
    if first is None or list(first.hold.layout.places) != keys:
        return None
    hold = first.hold
    if any(each is None or each.hold is not hold for each in berths):
        return None
    whole, hold.whole = hold.whole, hold.whole.new_empty(0)
    return whole
