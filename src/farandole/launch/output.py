"""What workers print, made readable: whole lines, who said them, said once.

Pure: bytes and the time go in, lines come out. Three promises, whatever the bytes are:

* No line is lost, not even the last one without a newline. (Of text that a program overwrites with
  carriage returns, as progress bars do, the state that would stand on the screen counts.)
* Lines of one rank keep their order.
* A line waits at most ``window`` seconds for the same line from other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

LONGEST_LINE = 256 * 1024
"""Bytes; a longer line is shown in pieces of this size."""

WINDOW = 0.1
"""Seconds that a line waits for the same line from other ranks."""

_LONGEST_QUEUE = 10_000
"""Lines of one rank that may wait for company."""

_LOOK_AHEAD = 32
"""Lines of a rank that are searched for one that another rank would show now."""


class Line(NamedTuple):
    """A line and the ranks that said it."""

    ranks: tuple[int, ...]
    stream: str
    """``stdout`` or ``stderr``."""
    text: bytes
    """Without the newline."""


class Splitter:
    """Cuts one stream into lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._overwritten = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that ``chunk`` completes."""
        *complete, rest = (self._rest + chunk).split(b"\n")
        lines = [_visible(line) for line in complete]
        if complete:
            self._overwritten = False
        shown = rest.rstrip(b"\r")
        cut = shown.rfind(b"\r")
        if cut >= 0:
            self._overwritten = True
        # Returns at the end overwrite nothing yet; one of them is enough to remember that.
        rest = shown[cut + 1 :] + (b"\r" if len(shown) < len(rest) else b"")
        while len(rest) > LONGEST_LINE:
            lines.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        self._rest = rest
        return lines

    @property
    def unfinished(self) -> bytes:
        """What has come since the last newline, as it would stand on a screen."""
        return _visible(self._rest)

    def end(self) -> list[bytes]:
        """The last line, if it had no newline."""
        rest, self._rest = self.unfinished, b""
        blank = not rest or (self._overwritten and not rest.strip())
        return [] if blank else [rest]


class Folder:
    """Brings the same line from several ranks together.

    Only what each rank would show next is compared, so that no line overtakes another one of its
    rank.
    """

    def __init__(self, size: int, window: float = WINDOW) -> None:
        self._queues: list[deque[tuple[str, bytes, float]]] = [deque() for _ in range(size)]
        self._speaking = set(range(size))
        self._window = window

    def expect(self, rank: int) -> None:
        """One more rank will speak; its number is the next."""
        assert rank == len(self._queues)
        self._queues.append(deque())
        self._speaking.add(rank)

    def feed(self, rank: int, stream: str, texts: Iterable[bytes], now: float) -> None:
        """Add lines of a rank."""
        self._queues[rank].extend((stream, text, now) for text in texts)

    def fall_silent(self, rank: int) -> None:
        """Wait for this rank no longer: it will say nothing more."""
        self._speaking.discard(rank)

    def due(self, now: float) -> list[Line]:
        """The lines that need wait no longer."""
        lines: list[Line] = []
        while (chosen := self._choose(now)) is not None:
            lines.append(self._take(chosen))
        return lines

    def _choose(self, now: float) -> list[int] | None:
        """The ranks of the next line to show: the oldest that keeps no others from meeting."""
        waiting = [rank for rank, queue in enumerate(self._queues) if queue]
        waiting.sort(key=lambda rank: self._queues[rank][0][2])
        overdue: list[list[int]] = []
        for rank in waiting:
            stream, text, since = self._queues[rank][0]
            group = self._who_says(stream, text)
            if self._speaking.issubset(group):
                return group
            crowded = len(self._queues[rank]) > _LONGEST_QUEUE
            if crowded or now >= since + self._window:
                overdue.append(group)
        for group in overdue:
            if not any(self._says_later(rank, group[0]) for rank in waiting if rank not in group):
                return group
        return overdue[0] if overdue else None

    def _says_later(self, rank: int, speaker: int) -> bool:
        """Whether ``rank`` has the line that ``speaker`` would show next behind another one."""
        stream, text, _ = self._queues[speaker][0]
        soon = islice(self._queues[rank], 1, _LOOK_AHEAD)
        return any(said == stream and line == text for said, line, _ in soon)

    def next_due(self) -> float | None:
        """When :meth:`due` has something to say if nothing else comes; ``None``: never."""
        times = [queue[0][2] + self._window for queue in self._queues if queue]
        return min(times, default=None)

    def flush(self) -> list[Line]:
        """All that is left, without waiting."""
        return self.due(float("inf"))

    def _who_says(self, stream: str, text: bytes) -> list[int]:
        return [
            rank
            for rank, queue in enumerate(self._queues)
            if queue and queue[0][0] == stream and queue[0][1] == text
        ]

    def _take(self, group: list[int]) -> Line:
        heads = [self._queues[rank].popleft() for rank in group]
        stream, text, _ = heads[0]
        return Line(tuple(group), stream, text)


def _visible(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
