"""One thread that sleeps until a socket is ready, a timer is due, or somebody calls.

Prior art: ``asyncio``. Its transports bring their own buffers, limits and error handling, and its
event loop a second way of doing everything; a selector and a heap are all that a server needs, and
other threads may call in directly.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
from collections.abc import Callable

from farandole.core import forks
from farandole.core.clock import SYSTEM_CLOCK
from farandole.core.errors import FarandoleBug
from farandole.core.promptness import be_prompt

JOIN_LIMIT = 10.0
"""Seconds that the thread may take to end; longer means that a callback blocks it."""

logger = logging.getLogger(__name__)

Callback = Callable[[], None]
OnReady = Callable[[int], None]
"""Called with the ready events, ``selectors.EVENT_READ`` and ``EVENT_WRITE``."""


class Timer:
    """A call that is to come. Made by :meth:`Loop.call_later`."""

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        """Do not call. Any thread; harmless when it is too late."""
        self._callback = None

    def fire(self) -> None:
        """Call, unless cancelled or called before."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Loop:
    """The thread. Callbacks run in it one after the other, and must not block.

    ``at_end`` is the last of them. An exception from a call or a timer is logged; one from the
    callback of a socket, which has to know what it means for the socket, ends the thread.

    Example::

        loop = Loop("farandole-server", at_end=close_everything)
        loop.start()
        loop.call_soon(lambda: loop.watch(sock, selectors.EVENT_READ, on_ready))
        ...
        loop.stop()
    """

    def __init__(self, name: str, at_end: Callback) -> None:
        self._at_end = at_end
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakes)
        self._soon: collections.deque[Callback] = collections.deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._timer_lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        forks.abandon_in_children(self)

    def start(self) -> None:
        """Begin. Before that, sockets may be watched from the thread that made the loop."""
        self._thread.start()

    def call_soon(self, callback: Callback) -> None:
        """Call in the loop's thread, in the order of these calls. Any thread."""
        self._soon.append(callback)
        self._wake()

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        """Call in the loop's thread after ``seconds``. Any thread."""
        timer = Timer(callback)
        with self._timer_lock:
            due = SYSTEM_CLOCK.now() + seconds
            heapq.heappush(self._timers, (due, next(self._numbers), timer))
        self._wake()
        return timer

    def watch(self, sock: socket.socket, events: int, on_ready: OnReady) -> None:
        """Call ``on_ready`` when ``events`` are ready, instead of what was asked for before.

        No events: not any more. The loop's thread only, as for all that touches its sockets.
        """
        watched = sock in self._selector.get_map()
        if not events:
            if watched:
                self._selector.unregister(sock)
        elif watched:
            self._selector.modify(sock, events, on_ready)
        else:
            self._selector.register(sock, events, on_ready)

    def stop(self) -> None:
        """End the thread, after ``at_end``, and wait for that. Any thread; idempotent.

        In the loop's own thread it returns first. Raises ``FarandoleBug`` when a callback holds
        the thread up.
        """
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_LIMIT)
            if self._thread.is_alive():
                raise FarandoleBug(f"A callback blocks the thread {self._thread.name!r}.")

    def abandon(self) -> None:
        """Give up a forked child's copies of the descriptors. See ``core.forks``."""
        self._stopping = True
        self._close_descriptors()

    def _run(self) -> None:
        be_prompt()
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._sleep_limit()):
                    key.data(events)
                for _ in range(len(self._soon)):
                    self._guard(self._soon.popleft())
                self._fire_timers()
        finally:
            self._at_end()
            self._close_descriptors()

    def _sleep_limit(self) -> float | None:
        if self._soon or self._stopping:
            return 0.0
        with self._timer_lock:
            return max(0.0, self._timers[0][0] - SYSTEM_CLOCK.now()) if self._timers else None

    def _fire_timers(self) -> None:
        while self._timers:
            with self._timer_lock:
                if self._timers[0][0] > SYSTEM_CLOCK.now():
                    return
                timer = heapq.heappop(self._timers)[2]
            self._guard(timer.fire)

    def _guard(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:
            logger.exception("A callback in the thread %r failed.", self._thread.name)

    def _wake(self) -> None:
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # Full: it wakes anyway. Closed: it has ended.
                self._wake_out.send(b"\0")

    def _drain_wakes(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _close_descriptors(self) -> None:
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
