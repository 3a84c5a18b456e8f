"""Hears the events of one rank and hands them on as trace events, in batches.

Handlers only append to a queue. One thread sleeps until something is there, lets more come for a
moment, and hands it on; so nothing in the hot path formats, locks or writes.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from farandole.core import events, forks
from farandole.core.assigned import assigned
from farandole.core.errors import ConnectionLost, FarandoleError

PAUSE = 0.025
"""Seconds for which events are gathered before they are handed on."""

LONGEST_QUEUE = 200_000
"""Events that are kept while nobody takes them; the oldest go first."""

RETRY = 0.25
"""Seconds until a batch that was not taken is offered again."""

STOP_LIMIT = 60.0
"""Seconds that the thread gets to end what it is doing: to write a long file a last time."""

_KINDS = (
    events.RequestStaged,
    events.BucketLeft,
    events.StepFinished,
    events.BatchLoaded,
    events.WaitFinished,
    events.CollectiveFinished,
)

_log = logging.getLogger(__name__)

Batch = list[tuple[float, object]]
"""Events, each with the time at which it was heard of."""


class Recorder:
    """Listens from :meth:`start` until :meth:`stop`.

    ``hand_on(batch, last)`` is called by one thread at a time; ``last`` for the last time. When it
    says ``False`` it could not take the batch yet: it gets it again, with what came meanwhile.
    When it raises, the recording ends with a warning: a script never fails because it is watched.
    """

    def __init__(self, rank: int, *, cycles: bool, hand_on: Callable[[Batch, bool], bool]) -> None:
        self._rank = rank
        self._kinds = (*_KINDS, events.CycleStarted) if cycles else _KINDS
        self._hand_on = hand_on
        self._queue: collections.deque[tuple[float, object]] = collections.deque(
            maxlen=LONGEST_QUEUE
        )
        self._stops: list[Callable[[], None]] = []
        self._something = threading.Event()
        self._ending = threading.Event()
        self._stopped = False
        self._in_child = False
        self._thread = threading.Thread(target=self._run, name="farandole-timeline", daemon=True)

    def start(self) -> None:
        """Begin to listen; ``hand_on`` is called soon, also when no event comes."""
        forks.abandon_in_children(self)
        self._stops = [events.subscribe(kind, self._hear) for kind in self._kinds]
        self._something.set()
        self._thread.start()

    def wake(self) -> None:
        """Have ``hand_on`` called soon, also when no event has come."""
        self._something.set()

    def stop(self) -> None:
        """Listen no more and hand on what is left. Idempotent."""
        self._deafen()
        self._stopped = True
        self._ending.set()
        self._something.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_LIMIT)

    def abandon(self) -> None:
        """In a forked child: it is no rank, and has no thread to hand anything on."""
        self._in_child = True

    def _hear(self, event: object) -> None:
        seen = time.perf_counter()
        place = assigned.get()
        rank = getattr(event, "rank", self._rank if place is None else place.placement.rank)
        if rank != self._rank or self._in_child:
            return
        self._queue.append((seen, event))
        if not self._something.is_set():
            self._something.set()

    def _run(self) -> None:
        batch: Batch = []
        while not self._ending.is_set():
            self._something.wait()
            self._ending.wait(PAUSE)
            self._something.clear()
            batch = self._pass_on(batch, last=False)
            if batch:
                self._ending.wait(RETRY)
                self._something.set()
        if self._stopped:
            self._pass_on(batch, last=True)

    def _pass_on(self, batch: Batch, *, last: bool) -> Batch:
        """Hand on ``batch`` and what has come; returns what was not taken."""
        while self._queue:
            batch.append(self._queue.popleft())
        try:
            taken = self._hand_on(batch, last)
        except (OSError, FarandoleError) as error:
            self._deafen()
            self._ending.set()
            # That the launcher or rank 0 has ended is told by whoever needs it.
            level = logging.INFO if isinstance(error, ConnectionLost) else logging.WARNING
            _log.log(level, "The timeline of rank %d ends early: %s", self._rank, error)
            return []
        return [] if taken else batch[-LONGEST_QUEUE:]

    def _deafen(self) -> None:
        for stop in self._stops:
            stop()
        self._stops = []
