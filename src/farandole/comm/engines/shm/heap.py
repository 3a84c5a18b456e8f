"""Which parts of a range of memory are in use. Pure: offsets in, offsets out."""

from __future__ import annotations

import bisect


class Heap:
    """Hands out parts of the range from ``start`` to ``stop``, in whole units of ``unit`` bytes.

    First fit; neighbouring free parts are joined.
    """

    def __init__(self, start: int, stop: int, unit: int) -> None:
        self._unit = unit
        self._free: list[tuple[int, int]] = [(start, stop)] if start < stop else []

    def allocate(self, length: int) -> tuple[int, int] | None:
        """Start and stop of a part of at least ``length`` bytes, ``None`` if there is none."""
        need = max(1, -(-length // self._unit)) * self._unit
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= need:
                rest = (start + need, stop)
                self._free[index : index + 1] = [rest] if rest[0] < stop else []
                return start, start + need
        return None

    def free(self, start: int, stop: int) -> None:
        """Take back a part that :meth:`allocate` gave."""
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
