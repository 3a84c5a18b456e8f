"""Which processes are frozen: stopped, or stuck in the kernel, and using no time. Reads /proc.

The first of two clocks that tell a dead rank from a slow one. A process that computes, holds the
GIL in C for a minute, or waits for others is in state R or S, and is left alone here however long
that takes; that the others wait for it is for the watch of the control channel to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PULSE = 1.0
"""Seconds between two looks."""

FROZEN = 15.0
"""Seconds without CPU time in a frozen state after which a process counts as lost."""

SUSPENDED = 5.0
"""Seconds between two looks after which it was the looker who was frozen, as when a scheduler
suspends all of a job. What was seen before says nothing then."""

_FROZEN_STATES = frozenset("TD")
"""Stopped by a signal; waiting in the kernel for a device. A traced process (t) is debugged."""

Look = tuple[str, int]
"""State letter, and clock ticks of CPU time."""


def read(pid: int) -> Look | None:
    """State and CPU time of a process; ``None`` when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[11]) + int(fields[12])


class Pulse:
    """Remembers since when each process shows no sign of life."""

    def __init__(self, reader: Callable[[int], Look | None] = read) -> None:
        self._read = reader
        self._since: dict[int, tuple[float, Look]] = {}
        self._looked = 0.0

    def look(self, pids: Mapping[int, int], now: float) -> Iterator[tuple[int, str, float]]:
        """``(rank, state, seconds)`` of those that have been frozen for :data:`FROZEN`, once each.

        ``pids`` are the processes that run now, by rank.
        """
        if now - self._looked > SUSPENDED:
            self._since.clear()
        self._looked = now
        for rank, pid in pids.items():
            seen = self._read(pid)
            if seen is None or seen[0] not in _FROZEN_STATES:
                self._since.pop(rank, None)
                continue
            since, before = self._since.setdefault(rank, (now, seen))
            if seen[1] != before[1]:
                self._since[rank] = now, seen
            elif now - since >= FROZEN:
                self._since[rank] = float("inf"), seen
                yield rank, seen[0], now - since
