"""One file with what every rank did and when, which Chrome and Perfetto show.

Each rank that was told to records itself. Rank 0 writes the file; the others send it their trace
events through the job's store, and a rank on another machine first measures how far its clock is
from rank 0's. The k-th recording of a rank goes into rank 0's k-th (or a later one, when rank 0
recorded more often), so ranks may start and stop at their own pace.

In the store that they share, ``open`` is the number of rank 0's recording while it lasts, and
``recorder/<rank>`` that of another rank's. Within a recording (``<number>/``) ``bell`` wakes rank
0, ``batch/<rank>/<n>`` are trace events, and ``clock/<rank>`` asks for an exchange of times.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost, DeadlineError
from farandole.core.store import PrefixStore, Store
from farandole.monitor import clock_shift
from farandole.monitor.recorder import Batch, Recorder
from farandole.monitor.trace import Translator, began_at
from farandole.monitor.trace_file import TraceFile

LAST_CALL = 1.0
"""Seconds that rank 0, when it stops, waits for what the others have recorded."""

CLOCK_LIMIT = 10.0
"""Seconds within which two ranks must have exchanged their times."""

LINES = 20_000
"""Trace events in one batch."""

STORE_GONE = (ConnectionLost, DeadlineError)
"""What a store raises whose process has ended or hangs: then so does the job."""

_CLOSED = b"closed"
_RUNG = b"rung"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who records."""

    rank: int
    hosts: Sequence[str]
    """An identity of the machine of each rank of the job: equal means same machine."""
    store: Store
    """Shared by the ranks of this generation."""


class Timeline(Protocol):
    """A recording under way."""

    path: str
    """The file that was asked for."""

    def stop(self, patience: float = LAST_CALL) -> None:
        """End it; what was heard of up to now is in the file when rank 0's call returns.

        Rank 0 waits ``patience`` seconds at most for the other ranks that record to do the same.
        """
        ...


def start(path: str, number: int, place: Place, *, mark_cycles: bool) -> Timeline:
    """Begin to record this rank: its ``number``-th recording, from 1.

    On rank 0 the file exists when this returns; ``UsageError`` when it cannot be written. The
    other ranks' ``path`` is not looked at. ``mark_cycles``: show when each cycle of the
    negotiation began.
    """
    if place.rank == 0:
        return Writer(path, number, place, mark_cycles=mark_cycles)
    return Sender(path, number, place, mark_cycles=mark_cycles)


class Writer:
    """Rank 0's part: records itself, collects the others' trace events, writes all of them."""

    def __init__(self, path: str, number: int, place: Place, *, mark_cycles: bool) -> None:
        self.path = path
        self._size = len(place.hosts)
        self._number = number
        self._place = place
        self._store = PrefixStore(place.store, f"{number}/")
        self._file = TraceFile(path)
        self._lock = threading.Lock()
        self._translator = Translator(0, host=socket.gethostname())
        self._file.add([began_at(time.time(), time.perf_counter()), *self._translator.head()])
        self._recorder = Recorder(0, cycles=mark_cycles, hand_on=self._write)
        self._ended = threading.Event()
        self._finished: set[int] = set()
        self._news = threading.Condition()
        self._collector = threading.Thread(
            target=self._collect, name="farandole-timeline-collect", daemon=True
        )
        place.store.set("open", b"%d" % number)
        self._recorder.start()
        if self._size > 1:
            self._collector.start()

    def stop(self, patience: float = LAST_CALL) -> None:
        """See :class:`Timeline`."""
        if self._size > 1 and not self._ended.is_set():
            with contextlib.suppress(*STORE_GONE):  # then what others sent last is lost
                self._await_others(Deadline.after(patience))
        self._close()
        self._recorder.stop()

    def _await_others(self, deadline: Deadline) -> None:
        recording = {
            int(key.rpartition("/")[2])
            for key in self._place.store.keys("recorder/")
            if int(self._place.store.peek(key) or b"0") <= self._number
        }
        with self._news:
            self._news.wait_for(lambda: recording <= self._finished, deadline.remaining())

    def _close(self) -> None:
        """Take no more from the others."""
        self._ended.set()
        with contextlib.suppress(*STORE_GONE):
            self._place.store.delete("open")
            if self._size > 1:
                self._store.set("bell", _RUNG)
                self._collector.join(LAST_CALL)
                self._store.set("bell", _CLOSED)

    def _write(self, batch: Batch, last: bool) -> bool:
        lines = [line for seen, event in batch for line in self._translator.translate(event, seen)]
        with self._lock:
            self._file.add(lines)
        # What the file lacks meanwhile is a small share of the recording.
        self._ended.wait(self._file.pause)
        try:
            with self._lock:
                self._file.publish()
        except OSError:
            self._close()
            raise
        return True

    def _collect(self) -> None:
        with contextlib.suppress(*STORE_GONE):
            while not self._ended.is_set():
                self._store.get("bell", Deadline.after(None))
                self._store.delete("bell")
                self._look()
            self._look()

    def _look(self) -> None:
        for key in self._store.keys(""):
            kind, _, rest = key.partition("/")
            if kind == "batch":
                self._take(key, int(rest.partition("/")[0]))
            elif kind == "clock" and "/" not in rest:
                self._tell_time(key, int(rest))

    def _take(self, key: str, rank: int) -> None:
        text = (self._store.peek(key) or b"").decode()
        self._store.delete(key)
        state, _, lines = text.partition("\n")
        with self._lock:
            self._file.add(lines.split("\n") if lines else ())
        self._recorder.wake()
        if state == "last":
            with self._news:
                self._finished.add(rank)
                self._news.notify_all()

    def _tell_time(self, key: str, rank: int) -> None:
        self._store.delete(key)
        deadline = Deadline.after(CLOCK_LIMIT)
        try:
            clock_shift.answer(clock_shift.place(self._store, rank), time.perf_counter, deadline)
        except DeadlineError as error:
            _log.info("Rank %d asked for the time and did not wait for it: %s", rank, error)


class Sender:
    """Another rank's part: records itself and sends its trace events to rank 0."""

    def __init__(self, path: str, number: int, place: Place, *, mark_cycles: bool) -> None:
        self.path = path
        self._number = number
        self._place = place
        self._store: Store | None = None
        self._translator = Translator(place.rank)
        self._sent = 0
        place.store.set(f"recorder/{place.rank}", b"%d" % number)
        self._recorder = Recorder(place.rank, cycles=mark_cycles, hand_on=self._send)
        self._recorder.start()

    def stop(self, patience: float = LAST_CALL) -> None:
        """See :class:`Timeline`."""
        self._recorder.stop()
        with contextlib.suppress(*STORE_GONE):
            self._place.store.delete(f"recorder/{self._place.rank}")

    def _send(self, batch: Batch, last: bool) -> bool:
        lines: list[str] = []
        if self._store is None:
            self._store = self._find_recording()
            if self._store is None:
                return False
            shift = self._measure_shift(self._store)
            self._translator = Translator(
                self._place.rank, host=socket.gethostname(), shift=round(shift * 1e9)
            )
            lines = self._translator.head()
        for seen, event in batch:
            lines.extend(self._translator.translate(event, seen))
        for begin in range(0, max(1, len(lines)), LINES):
            more = not last or begin + LINES < len(lines)
            self._put(self._store, lines[begin : begin + LINES], "more" if more else "last")
        return True

    def _find_recording(self) -> Store | None:
        number = int(self._place.store.peek("open") or b"0")
        if number < self._number:
            return None
        return PrefixStore(self._place.store, f"{number}/")

    def _put(self, store: Store, lines: list[str], state: str) -> None:
        key = f"batch/{self._place.rank}/{self._sent:09d}"
        if store.peek("bell") == _CLOSED:
            return
        store.set(key, "\n".join([state, *lines]).encode())
        self._sent += 1
        if store.compare_and_set("bell", None, _RUNG) == _CLOSED:
            store.delete(key)

    def _measure_shift(self, store: Store) -> float:
        rank, hosts = self._place.rank, self._place.hosts
        if hosts[rank] == hosts[0]:
            return 0.0
        deadline = Deadline.after(CLOCK_LIMIT)
        store.set(f"clock/{rank}", b"")
        store.compare_and_set("bell", None, _RUNG)
        try:
            return clock_shift.measure(clock_shift.place(store, rank), time.perf_counter, deadline)
        except DeadlineError as error:
            _log.warning("The timeline of rank %d is not aligned with rank 0's: %s", rank, error)
            return 0.0
