"""Writing to the launcher's own output without ever being held up by it.

A pager that is paused, or a terminal stopped with Ctrl-S, must not keep the job loop from noticing
a failure or a Ctrl-C. Making the descriptor non-blocking would change it for the shell too, so each
write is preceded by a question whether it would block, and is small enough for the answer to hold.
"""

from __future__ import annotations

import os
import select

_SURE_TO_FIT = 4096
"""Bytes that a pipe which is ready takes without blocking (PIPE_BUF)."""


class Sink:
    """What is to be written to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.broken: OSError | None = None
        """Why nothing can be written any more, as when the reader is gone; it is dropped then."""

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._descriptor

    @property
    def pending(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Queue bytes and write what can be written now."""
        if not self.broken:
            self._pending += data
            self.flush()

    def flush(self, timeout: float = 0.0) -> None:
        """Write what can be written, waiting up to ``timeout`` seconds for each piece."""
        while self._pending and not self.broken and self._poll.poll(timeout * 1000):
            try:
                written = os.write(self._descriptor, self._pending[:_SURE_TO_FIT])
            except BlockingIOError:
                return  # who shares it has made it non-blocking, and was faster
            except OSError as error:
                self.broken = error
                self._pending.clear()
                return
            del self._pending[:written]
