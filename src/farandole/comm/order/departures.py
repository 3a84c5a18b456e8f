"""What has been agreed on and not begun: it is begun in order, by whoever learns of it first.

A change of thread costs more than beginning a small reduction, and beside a main thread that
computes in Python many times as much. So the thread that brings a verdict begins what it can begin
without blocking; the rest, such as opening an engine, it leaves to a thread that may block.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable

from farandole.comm.order.together import Company

Due = Company | threading.Event
"""Requests to begin; or what is set when everything before it has begun."""


class Departures:
    """The queue. Any thread may call anything.

    ``begin`` begins a company and raises nothing but what ends the thread. ``call_patient`` asks
    for a call of :meth:`go_on` with ``patient`` from a thread that may block.
    """

    def __init__(self, begin: Callable[[Company], None], call_patient: Callable[[], None]) -> None:
        self._begin = begin
        self._call_patient = call_patient
        self._due: collections.deque[Due] = collections.deque()
        self._beginning = threading.Lock()

    def append(self, due: Iterable[Due]) -> None:
        """Begin ``due`` after all that came before. Calls must come in the order agreed on."""
        self._due.extend(due)
        self.go_on(patient=False)

    def go_on(self, *, patient: bool) -> None:
        """Begin what is due, if no other thread does; all of it only if ``patient``."""
        while self._due:
            if not self._beginning.acquire(blocking=patient):
                return  # Whoever holds it finds what we brought.
            try:
                while self._due and (patient or not _may_block(self._due[0])):
                    self._take(self._due.popleft())
                left = bool(self._due)
            finally:
                self._beginning.release()
            if left:
                self._call_patient()
                return

    def _take(self, due: Due) -> None:
        if isinstance(due, threading.Event):
            due.set()
        else:
            self._begin(due)


def _may_block(due: Due) -> bool:
    return isinstance(due, Company) and due.may_block
