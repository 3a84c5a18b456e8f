"""What a rank holds of the named path: requests go in, in any order, and are carried out in one.

A submission is put down and the negotiator's thread woken; what was put down by then leaves in one
message. Whoever waits for a request sends it off without waiting for that thread. The verdicts of
rank 0's coordinator come in one order for all ranks, and the thread hands the requests to the
engines in that order, without waiting for the data. There is one negotiator for a root group and
all groups made of it, so two groups with ranks in common never begin in different order.

Guarantees
    *Any order.* Requests meet by their names: ranks may submit them in any order, from any thread.
    Unnamed ones are numbered, in each group by itself.

    *Idle means idle.* The thread sleeps until there is something to do.

    *Nothing is left waiting.* A request ends with its result, the same error on all ranks, or the
    error that broke or closed its group.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from farandole.comm.collectives.request import Request
from farandole.comm.control.channel import Control
from farandole.comm.control.message import Message
from farandole.comm.control.position import Position
from farandole.comm.handle import NOT_YET, PATH, Agreement, Handle, Line
from farandole.comm.header import Header
from farandole.comm.order import brisk, together, wire, zeros
from farandole.comm.order.memory import Memory
from farandole.comm.order.together import Company, Ready
from farandole.comm.order.wire import Agreed, Flush, Joined, Known, Part, Refused, Verdict
from farandole.core import events
from farandole.core.errors import CollectiveError, FarandoleError, MismatchError, UsageError

ResultT = TypeVar("ResultT")

_FLUSH = object()
"""Tells the thread that there is something to send."""

_log = logging.getLogger(__name__)


@dataclass
class Seat:
    """This rank's place in one group's named path."""

    line: Line
    memory: Memory
    unnamed: int = 0
    """Requests without a name so far."""
    sequence: int = 0
    """Requests that were agreed on so far."""
    waiting: dict[str, Handle[Any]] = field(default_factory=dict)
    """Requests that have not begun, by their keys."""
    closed_with: FarandoleError | None = None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return len(self.line.members) == 1


JOIN_POSITION = Position(PATH, wire.JOIN_TOPIC, NOT_YET, "join")
"""Where a rank is that has joined, and waits for the others."""


class _Join:
    """This rank has joined, and waits for the others."""

    def __init__(self, everyone: tuple[int, ...], device: torch.device | None) -> None:
        self.agreement = Agreement((wire.JOIN_TOPIC, everyone))
        self.device = device
        self.last = NOT_YET
        self.error: FarandoleError | None = None

    def end(self, *, last: int = NOT_YET, error: FarandoleError | None = None) -> None:
        if not self.agreement.done():
            self.last, self.error = last, error
            self.agreement.begun.set()


class Negotiator:
    """The named path of a root group and of all groups made of it. Any thread may call anything."""

    def __init__(self, control: Control, *, average_participants: bool) -> None:
        self._control = control
        self._average_participants = average_participants
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Held while messages leave, so that they do so in the order of what they say."""
        self._seats: dict[str, Seat] = {}
        self._outbox: list[tuple[Seat, Handle[Any]]] = []
        self._closes: list[Seat] = []
        self._joins = False
        self._join: _Join | None = None
        self._woken = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._process = os.getpid()
        self._stop_listening = control.on_failure(self._queue.put)
        control.order_listener = self

    # Groups.

    def take_seat(self, line: Line) -> Seat:
        """Take part in the group of ``line``."""
        seat = Seat(line, Memory(line.members.index(self._control.rank)))
        with self._lock:
            self._seats[line.key] = seat
        return seat

    def leave(self, seat: Seat, error: FarandoleError) -> None:
        """Take no more requests of the group; those that have not begun fail with ``error``."""
        with self._lock:
            if seat.closed_with is not None:
                return
            seat.closed_with = error
            self._seats.pop(seat.line.key, None)
            handles = self._take_waiting(seat)
            self._closes.append(seat)
        for handle in handles:
            handle.fail(error)

    def close(self, error: FarandoleError) -> None:
        """End: whatever has not begun fails with ``error``. Idempotent."""
        self._stop_listening()
        self._control.order_listener = None
        with self._lock:
            seats = list(self._seats.values())
            join = self._join
        for seat in seats:
            self.leave(seat, error)
        if join is not None:
            join.end(error=error)
        self._queue.put(None)

    def wait_for_end(self, timeout: float) -> None:
        """Give the thread ``timeout`` seconds to end, after :meth:`close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # Submissions.

    def submit(self, seat: Seat, request: Request[ResultT]) -> Handle[ResultT]:
        """Begin ``request`` when all members of the group have submitted it.

        Raises the group's failure when it is broken, what :meth:`leave` was given after that, and
        ``UsageError`` when a request of that name has not begun yet, or in a process that was
        forked from the one that formed the group.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"{request.operation} was called in a process forked from a rank (a data-loader "
                "worker?). Only the process that called init() can use collectives."
            )
        self._require_usable(seat)
        header = request.header()
        with torch.no_grad():
            request.load()
        with self._lock:
            self._require_usable(seat)
            key = wire.key_of(header, seat.unnamed)
            if key in seat.waiting:
                raise UsageError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    f"as another tensor that is currently being processed: {header.label}. Wait "
                    "for the first one, or give each its own name."
                )
            if header.name is None:
                seat.unnamed += 1
            handle = Handle(request, header, key, seat.line)
            seat.waiting[key] = handle
            handle.stage(events.Stage.NEGOTIATING)
            brisk.begin()
            if seat.alone:
                self._queue.put((seat, handle))
            else:
                self._outbox.append((seat, handle))
                self._wake()
            self._start()
        return handle

    def join(self, device: torch.device | None, begin: Callable[[], None]) -> int:
        """Take part in what the others submit with zeros until they have joined too; who was last.

        ``device`` is where the zeros of requests on CUDA devices are made. ``begin`` is called
        when this rank is about to join, unless it has joined already.
        """
        self._control.require_usable()
        if self._control.size == 1:
            return 0
        with self._lock:
            if self._join is not None:
                raise UsageError("join() was called while this rank had joined already.")
            self._join = join = _Join(tuple(range(self._control.size)), device)
            self._start()
        try:
            begin()
            self._joins = True
            self.flush()
            self._control.wait_for(join.agreement.begun.wait, JOIN_POSITION, join.agreement)
        finally:
            with self._lock:
                self._join = None
        if join.error is not None:
            raise copy.copy(join.error)
        return join.last

    def drain(self, seat: Seat, position: Position) -> None:
        """Wait until everything that has a verdict by now is complete."""
        with self._lock:
            started = self._thread is not None
        if not started:
            return
        reached = threading.Event()
        self._queue.put(reached)
        self._control.wait_for(reached.wait, position)
        for handle in tuple(seat.line.unsettled):
            handle.complete()

    def flush(self) -> None:
        """Send off what was submitted, and return when all of it is on its way.

        Raises the error that broke the group.
        """
        with self._sending:
            with self._lock:
                if not (self._outbox or self._joins):
                    return
                outbox, self._outbox = self._outbox, []
                closes, self._closes = self._closes, []
                joins, self._joins = self._joins, False
                self._woken = False
                parts = self._parts(outbox, closes)
                what = outbox[0][1].position if outbox else JOIN_POSITION
            if events.wanted(events.CycleStarted):
                self._tell_cycles(parts)
            payloads, fields = wire.pack_parts(parts, joins=joins)
            self._control.submit(payloads, fields, what)

    def _parts(self, outbox: Sequence[tuple[Seat, Handle[Any]]], closes: list[Seat]) -> list[Part]:
        parts: dict[str, Part] = {}
        for seat, handle in outbox:
            if seat.closed_with is not None:
                continue
            line = seat.line
            part = parts.get(line.key)
            if part is None:
                part = parts[line.key] = Part(line.key, line.members, seat.memory.generation)
            seat.memory.describe(part, handle.key, handle.header)
        closing = [Part(each.line.key, each.line.members, closes=True) for each in closes]
        return [*parts.values(), *closing]

    def _tell_cycles(self, parts: Sequence[Part]) -> None:
        now = time.perf_counter()
        for part in parts:
            events.emit(events.CycleStarted(self._control.rank, part.group, now))

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._queue.put(_FLUSH)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="farandole-order", daemon=True)
            self._thread.start()

    def _require_usable(self, seat: Seat) -> None:
        if seat.closed_with is not None:
            raise copy.copy(seat.closed_with)
        if self._control.failure is not None:
            raise copy.copy(self._control.failure)

    # What ``Control`` calls.

    def on_ordered(self, verdicts: Message) -> None:
        """See ``comm.control.channel.OrderListener``."""
        self._queue.put(verdicts)

    def in_need(self) -> Position | None:
        """See ``comm.control.channel.OrderListener``."""
        with self._lock:
            for seat in self._seats.values():
                if not seat.alone:
                    for handle in seat.waiting.values():
                        return handle.position
            return None if self._join is None else JOIN_POSITION

    # The thread.

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._act(item)
            except FarandoleError as error:
                # Sending failed: the group is broken or closed, and whoever waits hears of that.
                _log.debug("Requests were not sent: %s", error)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._fail_all(self._break("named requests", error))
            del item
            for seat in tuple(self._seats.values()):
                _let_go(seat.line)

    def _act(self, item: Any) -> None:
        if item is _FLUSH:
            self.flush()
        elif isinstance(item, Message):
            ready: list[Ready] = []
            for verdict in wire.read_verdicts(item):
                self._carry_out(verdict, ready)
            self._begin(ready)
        elif isinstance(item, FarandoleError):
            self._fail_all(item)
        elif isinstance(item, threading.Event):
            item.set()
        else:
            seat, handle = item
            ready = []
            self._admit(seat, handle.key, (handle.header,), 0, ready)
            self._begin(ready)

    def _fail_all(self, error: FarandoleError) -> None:
        with self._lock:
            handles = [each for seat in self._seats.values() for each in self._take_waiting(seat)]
            join = self._join
        for handle in handles:
            handle.fail(error)
        if join is not None:
            join.end(error=error)

    def _take_waiting(self, seat: Seat) -> list[Handle[Any]]:
        handles = list(seat.waiting.values())
        seat.waiting.clear()
        brisk.end(len(handles))
        return handles

    def _carry_out(self, verdict: Verdict, ready: list[Ready]) -> None:
        if isinstance(verdict, Joined):
            self._all_have_joined(verdict.last)
            return
        seat = self._seats.get(verdict.group)
        if seat is None:
            return
        if isinstance(verdict, Known):
            for number in wire.numbers_in(verdict.bits):
                entry = seat.memory.recall(number)
                self._admit(seat, entry.key, entry.headers, 0, ready)
        elif isinstance(verdict, Agreed):
            with self._lock:
                headers = seat.memory.learn(verdict)
            self._admit(seat, verdict.key, headers, verdict.which.count(-1), ready)
        elif isinstance(verdict, Refused):
            handle = self._take(seat, verdict.key)
            if handle is not None:
                handle.fail(MismatchError(verdict.text, ranks=seat.line.members))
        elif isinstance(verdict, Flush):
            with self._lock:
                seat.memory.begin_anew()

    def _all_have_joined(self, last: int) -> None:
        with self._lock:
            join = self._join
            for seat in self._seats.values():
                seat.unnamed = 0
        if join is not None:
            join.end(last=last)

    def _take(self, seat: Seat, key: str) -> Handle[Any] | None:
        with self._lock:
            handle = seat.waiting.pop(key, None)
        if handle is not None:
            brisk.end()
        return handle

    def _admit(
        self,
        seat: Seat,
        key: str,
        headers: Sequence[Header],
        absent: int,
        ready: list[Ready],
    ) -> None:
        handle = self._take(seat, key)
        seat.sequence += 1
        if handle is None:
            join = self._join
            if join is None or seat.closed_with is not None:
                return
            handle = zeros.handle_for(headers[0], key, seat.line, join.device)
        handle.agree(seat.sequence, absent if self._average_participants else 0)
        ready.append(Ready(seat.line, handle, headers))

    def _begin(self, ready: list[Ready]) -> None:
        for handle in {each.line.key: each.handle for each in ready}.values():
            self._control.note_begun(handle.position)  # the last one of each group
        for company in together.arrange(ready):
            self._begin_together(company)

    def _begin_together(self, company: Company) -> None:
        those = company.ready
        try:
            together.begin(company, self._stream(those[0].handle.device))
        except FarandoleError as error:
            self._fail(those, error)
        except Exception as error:  # noqa: BLE001 - told to whoever waits, on every rank
            self._fail(those, self._break(those[0].handle.what, error))

    def _fail(self, those: Sequence[Ready], error: FarandoleError) -> None:
        seat = self._seats.get(those[0].line.key)
        for each in those:
            each.handle.fail(error if seat is None else seat.closed_with or error)

    def _stream(self, device: torch.device | None) -> torch.cuda.Stream | None:
        if device is None or device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _break(self, what: str, cause: Exception) -> FarandoleError:
        """The other ranks may have begun what this one could not: nobody can go on."""
        rank = self._control.rank
        error = CollectiveError(
            f"Rank {rank} could not begin {what}: {type(cause).__name__}: {cause}. The other ranks "
            "had agreed to it, so the group cannot go on; see that rank's output.",
            ranks=[rank],
        )
        error.__cause__ = cause
        self._control.fail(error)
        return error


def _let_go(line: Line) -> None:
    for each in tuple(line.moving):
        if not each.moving():
            line.moving.discard(each)
