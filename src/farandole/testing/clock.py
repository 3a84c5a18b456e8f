"""Time that passes only when a test says so."""

from __future__ import annotations

import threading

from farandole.core.errors import UsageError


class VirtualClock:
    """A ``core.clock.Clock`` that starts at 0 and moves by :meth:`advance` and :meth:`sleep` only.

    Any thread may read and move it. It wakes nobody: it is for code that asks what time it is.

    Example::

        clock = VirtualClock()
        deadline = Deadline.after(5.0, clock)
        clock.advance(5.0)
        assert deadline.expired()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass at once, as for a process that has nothing else to do."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass; ``UsageError`` if they are negative."""
        if seconds < 0:
            raise UsageError(f"Time cannot go back: advance({seconds}).")
        with self._lock:
            self._now += seconds
