"""A file of JSON that grows and is whole at any moment, for any reader, whatever dies.

Chrome's format is an array. Neither adding to it in place nor overwriting its last bracket keeps
it valid: a reader that is under way sees old and new bytes mixed, and a writer that is killed
leaves half. So what a path names never changes: each time the file is published, a new one that
holds everything takes its place in one step. How often follows from what it costs, so that the
cost stays a small share of the time however long the file is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable

from farandole.core.errors import UsageError

_TAIL = b"\n]\n"

SHARE = 20
"""A file that took one second to publish is published again after this many seconds."""


class TraceFile:
    """The file at ``path``, a JSON array of the lines that :meth:`add` was given.

    It exists, valid, when the constructor returns. Used by one thread at a time. ``UsageError``
    when it cannot be written.

    Example::

        file = TraceFile("/tmp/timeline.json")
        file.add(['{"name": "STEP", "ph": "i", "ts": 0, "pid": 0, "tid": 1}'])
        file.publish()
    """

    def __init__(self, path: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self.path = os.path.realpath(path)
        folder, name = os.path.split(self.path)
        self._next = os.path.join(folder, f".{name}.{os.getpid()}.next")
        self._now = now
        self._lines: list[str] = []
        self._empty = True
        self._known: tuple[int, int] | None = None
        self._ready = 0.0
        try:
            if os.path.lexists(self.path) and not stat.S_ISREG(os.stat(self.path).st_mode):
                raise UsageError(f"The timeline {path} cannot be written: it is not a plain file.")
            with open(self._next, "wb") as file:
                file.write(b"[" + _TAIL)
            self._replace()
        except OSError as error:
            raise UsageError(f"The timeline {path} cannot be written: {error.strerror}.") from None

    @property
    def pause(self) -> float:
        """Seconds until it is time to publish again."""
        return max(0.0, self._ready - self._now())

    @property
    def complete(self) -> bool:
        """Whether everything that was added is published."""
        return not self._lines

    def add(self, lines: Iterable[str]) -> None:
        """Take JSON texts without newlines; they are in the file after :meth:`publish`."""
        self._lines.extend(lines)

    def publish(self) -> None:
        """Put what was added into the file. ``OSError`` when that is not possible.

        ``FileNotFoundError`` when somebody removed or replaced the file: it is theirs then.
        """
        if not self._lines:
            return
        begin = self._now()
        if _identity(self.path) != self._known:
            raise FileNotFoundError(f"another file is now at {self.path}")
        try:
            shutil.copyfile(self.path, self._next)
            with open(self._next, "r+b") as file:
                file.seek(-len(_TAIL), os.SEEK_END)
                text = ",\n".join(self._lines)
                file.write((b"\n" if self._empty else b",\n") + text.encode() + _TAIL)
            self._replace()
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._next)
        self._lines.clear()
        self._empty = False
        end = self._now()
        self._ready = end + SHARE * (end - begin)

    def _replace(self) -> None:
        identity = _identity(self._next)
        os.replace(self._next, self.path)
        self._known = identity


def _identity(path: str) -> tuple[int, int]:
    """Changes when another file is put there or somebody writes to it."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns
