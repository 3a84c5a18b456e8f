"""What a rank holds of the named path: requests go in, in any order, and are carried out in one.

A submission is put down, and what was put down by then leaves in one message. Who sends it off:

* whoever waits for a request;
* whoever submits the last of those that travelled together before: a program that asks for the
  same ten tensors in every step sends one message for them, at once;
* else the negotiator's thread, when something has lain there for a while (``outbox``).

The verdicts of rank 0's coordinator come in one order for all ranks. The thread that brings them
hands the requests to the engines in that order, without waiting for the data; what may block it
leaves to the negotiator's thread. There is one negotiator for a root group and all groups made of
it, so two groups with ranks in common never begin in different order.

Guarantees
    *Any order.* Requests meet by their names: ranks may submit them in any order, from any thread.
    Unnamed ones are numbered, in each group by itself.

    *Idle means idle.* The thread sleeps until there is something to do.

    *Nothing is left waiting.* A request ends with its result, the same error on all ranks, or the
    error that broke or closed its group.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from farandole.comm.collectives.request import Request
from farandole.comm.control.channel import Control
from farandole.comm.control.message import Message
from farandole.comm.control.position import Position
from farandole.comm.handle import NOT_YET, PATH, Agreement, Handle, Line
from farandole.comm.header import Header
from farandole.comm.order import brisk, together, wire, zeros
from farandole.comm.order.berths import Berth
from farandole.comm.order.departures import Departures
from farandole.comm.order.memory import Memory
from farandole.comm.order.outbox import Outbox, Seat
from farandole.comm.order.together import Company, Ready
from farandole.comm.order.wire import Agreed, Flush, Joined, Known, Refused, Verdict
from farandole.core import events
from farandole.core.errors import CollectiveError, FarandoleError, MismatchError, UsageError

ResultT = TypeVar("ResultT")

CALM = 0.01
"""Seconds without requests after which threads need not be brisk any more."""

CALM_LOOKS = 0.5
"""Seconds between two looks for it, at most, while requests wait for other ranks."""

_log = logging.getLogger(__name__)

JOIN_POSITION = Position(PATH, wire.JOIN_TOPIC, NOT_YET, "join")
"""Where a rank is that has joined, and waits for the others."""


class _Join:
    """This rank has joined, and waits for the others."""

    def __init__(
        self,
        everyone: tuple[int, ...],
        device: torch.device | None,
        missed: Callable[[str], None],
    ) -> None:
        self.agreement = Agreement((wire.JOIN_TOPIC, everyone))
        self.device = device
        self.missed = missed
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
        self._outbox = Outbox()
        self._departures = Departures(self._begin_together, self._call_thread)
        self._join: _Join | None = None
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """To the thread: whether to go on."""
        self._thread: threading.Thread | None = None
        self._alarm = math.inf
        """When the thread wakes by itself."""
        self._brisk = False
        self._look = math.inf
        """When to look whether it is calm."""
        self._pause = CALM
        self._submitted = 0
        self._seen = 0
        self._ended = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._process = os.getpid()
        self._stop_listening = control.on_failure(self._fail_all)
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
            self._outbox.close(seat)
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
        with self._lock:
            self._ended = True
            self._calls.put(False)

    def wait_for_end(self, timeout: float) -> None:
        """Give the thread ``timeout`` seconds to end, after :meth:`close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # Submissions.

    def submit(self, seat: Seat, request: Request[ResultT]) -> Handle[ResultT]:
        """Begin ``request`` when all members of the group have submitted it.

        Raises the group's failure when it is broken, what :meth:`leave` was given after that, and
        ``UsageError`` when the data of a request of that name has not moved yet, or in a process
        that was forked from the one that formed the group.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"{request.operation} was called in a process forked from a rank (a data-loader "
                "worker?). Only the process that called init() can use collectives."
            )
        self._require_usable(seat)
        header = request.header()
        berth = _find_berth(seat, request, header)
        if berth is not None:
            request.take_berth(berth.buffer)
        request.load()
        with self._lock:
            self._require_usable(seat)
            key = wire.key_of(header, seat.unnamed)
            previous = seat.latest.get(key)
            if previous is not None and previous.in_flight():
                raise UsageError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    f"as another tensor that is currently being processed: {header.label}. Wait "
                    "for the first one, or give each its own name."
                )
            if header.name is None:
                seat.unnamed += 1
            handle = Handle(request, header, key, seat.line, berth)
            seat.waiting[key] = seat.latest[key] = handle
            handle.stage(events.Stage.NEGOTIATING)
            complete = not seat.alone and self._put(seat, handle)
        if seat.alone:
            self._agree_alone(seat, handle)
        elif complete:
            self.flush()
        return handle

    def _put(self, seat: Seat, handle: Handle[Any]) -> bool:
        now = time.monotonic()
        complete = self._outbox.put(seat, handle, now)
        self._submitted += 1
        if not self._brisk:
            self._brisk = True
            brisk.begin()
            self._look = now + CALM
        if self._alarm > (self._look if complete else min(self._look, self._outbox.due)):
            self._call()
        return complete

    def _agree_alone(self, seat: Seat, handle: Handle[Any]) -> None:
        self._tell_cycles([seat.line.key])
        ready: list[Ready] = []
        self._admit(seat, handle.key, (handle.header,), 0, ready)
        self._depart(ready)

    def join(
        self,
        device: torch.device | None,
        begin: Callable[[], None],
        missed: Callable[[str], None],
    ) -> int:
        """Take part in what the others submit with zeros until they have joined too; who was last.

        ``device`` is where the zeros of requests on CUDA devices are made. ``begin`` is called
        when this rank is about to join, unless it has joined already. ``missed`` is called with
        the topic of each gather that the others wait in for this rank; it must not block.
        """
        self._control.require_usable()
        if self._control.size == 1:
            return 0
        with self._lock:
            if self._join is not None:
                raise UsageError("join() was called while this rank had joined already.")
            self._join = join = _Join(tuple(range(self._control.size)), device, missed)
        try:
            begin()
            with self._lock:
                self._outbox.join()
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
        reached = threading.Event()
        self._departures.append([reached])
        self._control.wait_for(reached.wait, position)
        for handle in tuple(seat.line.unsettled):
            handle.complete()

    def flush(self) -> None:
        """Send off what was submitted, and return when all of it is on its way.

        Raises the error that broke the group.
        """
        with self._sending:
            with self._lock:
                mail = self._outbox.take(time.monotonic())
            if mail is None:
                return
            self._tell_cycles([part.group for part in mail.parts])
            payloads, fields = wire.pack_parts(mail.parts, joins=mail.joins)
            what = JOIN_POSITION if mail.what is None else mail.what.position
            self._control.submit(payloads, fields, what)

    def _tell_cycles(self, groups: Sequence[str]) -> None:
        if events.wanted(events.CycleStarted):
            now = time.perf_counter()
            for group in groups:
                events.emit(events.CycleStarted(self._control.rank, group, now))

    def _require_usable(self, seat: Seat) -> None:
        if seat.closed_with is not None:
            raise copy.copy(seat.closed_with)
        if self._control.failure is not None:
            raise copy.copy(self._control.failure)

    # What ``Control`` calls.

    def on_ordered(self, verdicts: Message) -> None:
        """See ``comm.control.channel.OrderListener``."""
        try:
            ready: list[Ready] = []
            for verdict in wire.read_verdicts(verdicts):
                self._carry_out(verdict, ready)
            self._depart(ready)
        except BaseException as error:
            # Whoever waits must hear of it; in the user's thread it may be an interrupt.
            self._fail_all(self._break("named requests", error))
            if not isinstance(error, Exception):
                raise

    def on_missed(self, topic: str) -> None:
        """See ``comm.control.channel.OrderListener``."""
        join = self._join
        if join is not None:
            join.missed(topic)

    def in_need(self) -> Position | None:
        """See ``comm.control.channel.OrderListener``."""
        with self._lock:
            for seat in self._seats.values():
                if not seat.alone:
                    for handle in seat.waiting.values():
                        return handle.position
            return None if self._join is None else JOIN_POSITION

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
            with self._lock:
                handle = seat.waiting.pop(verdict.key, None)
            if handle is not None:
                handle.fail(MismatchError(verdict.text, ranks=seat.line.members))
        elif isinstance(verdict, Flush):
            with self._lock:
                seat.begin_anew()
            seat.line.berths.forget()

    def _all_have_joined(self, last: int) -> None:
        with self._lock:
            join = self._join
            for seat in self._seats.values():
                seat.unnamed = 0
        if join is not None:
            join.end(last=last)

    def _admit(
        self,
        seat: Seat,
        key: str,
        headers: Sequence[Header],
        absent: int,
        ready: list[Ready],
    ) -> None:
        with self._lock:
            handle = seat.waiting.pop(key, None)
            seat.sequence += 1
            sequence = seat.sequence
        if handle is None:
            join = self._join
            if join is None or seat.closed_with is not None:
                return
            handle = zeros.handle_for(headers[0], key, seat.line, join.device)
        handle.agree(sequence, absent if self._average_participants else 0)
        ready.append(Ready(seat.line, handle, headers))

    # Beginning. In any thread.

    def _depart(self, ready: Sequence[Ready]) -> None:
        for handle in {each.line.key: each.handle for each in ready}.values():
            self._control.note_begun(handle.position)  # the last one of each group
        self._departures.append(together.arrange(ready))

    def _begin_together(self, company: Company) -> None:
        those = company.ready
        _let_go(those[0].line)
        try:
            together.begin(company, self._stream(those[0].handle.device))
        except FarandoleError as error:
            self._fail(those, error)
        except BaseException as error:
            # Told to whoever waits, on every rank; in the user's thread it may be an interrupt.
            self._fail(those, self._break(those[0].handle.what, error))
            if not isinstance(error, Exception):
                raise

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

    def _break(self, what: str, cause: BaseException) -> FarandoleError:
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

    # The thread.

    def _call(self) -> None:
        """Wake the thread. The lock is held."""
        self._alarm = -math.inf
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="farandole-order", daemon=True)
            self._thread.start()
        self._calls.put(True)

    def _call_thread(self) -> None:
        with self._lock:
            if not self._ended:
                self._call()
                return
        # The engines are closed by now: nothing blocks.
        self._departures.go_on(patient=True)

    def _run(self) -> None:
        go_on = True
        while go_on:
            with contextlib.suppress(queue.Empty):
                go_on = self._calls.get(timeout=self._seconds_to_sleep())
            self._send_what_is_due()
            self._departures.go_on(patient=True)
            self._look_for_calm()
        if self._brisk:
            brisk.end()

    def _seconds_to_sleep(self) -> float | None:
        with self._lock:
            self._alarm = min(self._outbox.due, self._look)
            return None if self._alarm == math.inf else max(0.0, self._alarm - time.monotonic())

    def _send_what_is_due(self) -> None:
        try:
            if time.monotonic() >= self._outbox.due:
                self.flush()
        except FarandoleError as error:
            # The group is broken or closed, and whoever waits hears of that.
            _log.debug("Requests were not sent: %s", error)

    def _look_for_calm(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._look:
                return
            moving, self._seen = self._submitted != self._seen, self._submitted
            if moving or any(seat.waiting for seat in self._seats.values()):
                self._pause = CALM if moving else min(2 * self._pause, CALM_LOOKS)
                self._look = now + self._pause
            else:
                self._brisk, self._look = False, math.inf
                brisk.end()


def _find_berth(seat: Seat, request: Request[Any], header: Header) -> Berth | None:
    if header.name is None or request.device is None or request.device.type != "cpu":
        return None
    space = request.space()
    return None if space is None else seat.line.berths.take(wire.key_of(header, 0), space)


def _let_go(line: Line) -> None:
    for each in tuple(line.moving):
        if not each.moving():
            line.moving.discard(each)
