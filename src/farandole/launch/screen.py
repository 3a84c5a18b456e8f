"""From what workers write to what the launcher writes: prefixes, colours, the live line of rank 0.

Pure, like :mod:`farandole.launch.output`. On a terminal, what rank 0 has not yet ended with a
newline (a progress bar, a question) stands live in the last row, and lines scroll above it. When
rank 0 moves the cursor about (several bars at once, full-screen displays), its bytes pass untouched
from then on. A job of one rank passes all bytes untouched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from farandole.core.errors import describe_ranks
from farandole.launch.output import WINDOW, Folder, Line, Splitter

_COLOURS = (36, 33, 32, 35, 34, 31)
"""Of prefixes, by rank: cyan, yellow, green, magenta, blue, red."""

_CURSOR_MOVES = re.compile(rb"\x1b(?:\[[0-9;?]*[A-HJSTfhlsu]|[78DEM])")
_CURSOR_SEEN = re.compile(rb"\x1b\[\?25([hl])")
_SHOW_CURSOR = b"\x1b[?25h"
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE = b"\r\x1b[K"

STREAMS = ("stdout", "stderr")


class Surface(NamedTuple):
    """What the launcher writes to."""

    terminal: dict[str, bool]
    """Whether its ``stdout`` and ``stderr`` are terminals."""
    colour: bool
    columns: int
    """Width of the terminal."""


class Screen:
    """Takes what each rank wrote, gives what is to be written, as (stream, bytes) pairs.

    Example::

        screen = Screen(2, Surface({"stdout": False, "stderr": False}, colour=False, columns=80))
        screen.feed(0, "stdout", b"hello\\n", now=0.0)
        screen.feed(1, "stdout", b"hello\\n", now=0.0)
        screen.due(0.0)          # [("stdout", b"[0-1] hello\\n")]
    """

    def __init__(self, size: int, surface: Surface, window: float = WINDOW) -> None:
        self._size = size
        self._surface = surface
        self._window = window
        self._folder = Folder(size, window)
        self._splitters = {(r, s): Splitter() for r in range(size) for s in STREAMS}
        self._open = {rank: set(STREAMS) for rank in range(size)}
        self._live: tuple[str, bytes] | None = None
        self._shown: str | None = None
        """The stream on whose terminal the live line stands now."""
        self._live_since: float | None = None
        self._untouched = size == 1
        """Whether rank 0's bytes pass as they are."""
        self._at_line_start = True
        self._without_cursor: str | None = None
        """The stream on whose terminal rank 0 has hidden the cursor."""

    def expect(self, rank: int) -> None:
        """One more rank will write; its number is the next."""
        self._size = rank + 1
        self._folder.expect(rank)
        self._splitters.update({(rank, s): Splitter() for s in STREAMS})
        self._open[rank] = set(STREAMS)

    def feed(self, rank: int, stream: str, chunk: bytes, now: float) -> list[tuple[str, bytes]]:
        """A rank wrote ``chunk``; an empty one ends that stream."""
        if rank == 0 and (seen := _CURSOR_SEEN.findall(chunk)):
            self._without_cursor = stream if seen[-1] == b"l" else None
        if rank == 0 and self._untouched:
            if chunk:
                self._at_line_start = chunk.endswith(b"\n")
            return [(stream, chunk)] if chunk else []
        if rank == 0 and self._surface.terminal[stream] and _CURSOR_MOVES.search(chunk):
            return self._stand_aside(stream, chunk)
        splitter = self._splitters[rank, stream]
        if chunk:
            self._folder.feed(rank, stream, splitter.feed(chunk), now)
        else:
            self._end(rank, stream, now)
        if rank == 0 and self._surface.terminal[stream]:
            self._watch_live(stream, splitter.unfinished, now)
        return []

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """What is to be written by now."""
        lines = self._folder.due(now)
        return self._compose(lines, now)

    def next_due(self) -> float | None:
        """When :meth:`due` has something to say if nothing else comes; ``None``: never."""
        times = [self._folder.next_due(), self._live_since]
        return min((time for time in times if time is not None), default=None)

    def resize(self, columns: int) -> None:
        """The terminal has another width now."""
        self._surface = self._surface._replace(columns=columns)

    def finish(self, now: float) -> list[tuple[str, bytes]]:
        """All that is left: no rank will say more."""
        for rank in range(self._size):
            for stream in sorted(self._open[rank]):
                self._end(rank, stream, now)
        self._live = self._live_since = None
        written = self._compose(self._folder.flush(), now)
        if self._without_cursor is not None and self._surface.terminal[self._without_cursor]:
            written.append((self._without_cursor, _SHOW_CURSOR))
        return written

    def prefix(self, ranks: Sequence[int]) -> bytes:
        """``[0-3] ``, in the colour of the first rank."""
        name = describe_ranks(ranks).partition(" ")[2].replace(" ", "")
        if not self._surface.colour:
            return b"[%s] " % name.encode("ascii")
        colour = _COLOURS[min(ranks) % len(_COLOURS)]
        return b"\x1b[%dm[%s]\x1b[0m " % (colour, name.encode("ascii"))

    def _end(self, rank: int, stream: str, now: float) -> None:
        if stream not in self._open[rank]:
            return
        self._folder.feed(rank, stream, self._splitters[rank, stream].end(), now)
        self._open[rank].discard(stream)
        if not self._open[rank]:
            self._folder.fall_silent(rank)

    def _stand_aside(self, stream: str, chunk: bytes) -> list[tuple[str, bytes]]:
        """Rank 0 draws: show what waits, then let its bytes pass."""
        before = self._folder.flush()
        unfinished = self._splitters[0, stream].unfinished
        self._live = self._live_since = None
        written = self._compose(before, 0.0)
        self._untouched = True
        self._folder.fall_silent(0)
        self._at_line_start = chunk.endswith(b"\n")
        return [*written, (stream, unfinished + chunk)]

    def _watch_live(self, stream: str, unfinished: bytes, now: float) -> None:
        if unfinished:
            self._live = (stream, unfinished)
            if self._live_since is None:
                # A line that is printed in parts need not flicker.
                self._live_since = now + (0.0 if self._shown else self._window)
        elif self._live is not None and self._live[0] == stream:
            self._live = self._live_since = None

    def _compose(self, lines: list[Line], now: float) -> list[tuple[str, bytes]]:
        written: list[tuple[str, bytes]] = []
        redraw = self._live_since is not None and now >= self._live_since
        if self._shown is not None and (lines or redraw or self._live is None):
            written.append((self._shown, _ERASE))
            self._shown = None
            redraw = self._live is not None
        for line in lines:
            if self._untouched and not self._at_line_start and self._size > 1:
                written.append((line.stream, b"\r\n"))
                self._at_line_start = True
            written.append((line.stream, self.prefix(line.ranks) + line.text + b"\n"))
        if redraw and self._live is not None:
            stream, text = self._live
            written.append((stream, self._live_row(text)))
            self._shown, self._live_since = stream, None
        return written

    def _live_row(self, text: bytes) -> bytes:
        prefix = self.prefix([0])
        room = self._surface.columns - len(_ESCAPES.sub(b"", prefix)) - 1
        plain = _ESCAPES.sub(b"", text).decode("utf-8", "replace")
        if len(plain) > room:
            text = plain[: max(0, room)].encode("utf-8")
        return prefix + text
