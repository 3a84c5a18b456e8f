"""The handle of a collective under way: where its result, or what went wrong, is waited for.

Whoever waits makes the result, on the own thread and stream: a result that nobody waits for costs
nothing, and handles may be waited for in any order and from any thread.

On CUDA, buffers are made on the submitting thread's current stream. The issuing thread has a
stream of its own, which waits for them. The result is made on the current stream of whoever
waits, after that stream has been made to wait for the data.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from farandole.comm.collectives.request import Flight, Request
from farandole.comm.control.channel import Control
from farandole.comm.control.position import Position
from farandole.comm.control.watch import GatherKey
from farandole.comm.engines.base import Engine
from farandole.comm.header import Header
from farandole.comm.modes import modes
from farandole.comm.order import wire
from farandole.comm.order.berths import Berth, Berths
from farandole.core import events
from farandole.core.clock import Deadline
from farandole.core.errors import CollectiveError, FarandoleError
from farandole.core.events import Stage
from farandole.core.latch import Latch

ResultT = TypeVar("ResultT")

PATH = "named"
"""The path of a group that named requests travel on."""

NOT_YET = -1
"""The sequence number of a request that is not agreed on."""


@dataclass(eq=False)
class Line:
    """What a group lends to the negotiator and the handles."""

    key: str
    """The group's identity, the same text on all its members."""
    members: tuple[int, ...]
    """Global ranks."""
    control: Control
    engine: Callable[[torch.device], Engine]
    """Opens or finds this path's engine."""
    explain: Callable[[FarandoleError], FarandoleError]
    """The group's best account of a failure that a transport reported."""
    flush: Callable[[], None]
    """Sends off what was submitted; whoever waits need not wait for the negotiator's thread."""
    berths: Berths = field(default_factory=Berths)
    """Where small reductions are put down that travel together."""
    waited: bool = False
    """Whether somebody has waited for a request since the last one was submitted."""
    opened: set[str] = field(default_factory=set)
    """Types of devices whose engine has begun something: it does not block to begin more."""
    moving: set[Handle[Any]] = field(default_factory=set)
    """Collectives whose buffers an engine may still use; kept here if nobody else keeps them."""
    unsettled: weakref.WeakSet[Handle[Any]] = field(default_factory=weakref.WeakSet)
    """Collectives that have begun, and whose results are not made yet."""


class Agreement:
    """What the watch knows a request by until all ranks have submitted it."""

    __slots__ = ("begun", "key")

    def __init__(self, key: GatherKey) -> None:
        self.key = key
        self.begun = Latch()
        """Set when the data has begun to move, or the request has failed."""

    def done(self) -> bool:
        """See ``comm.control.waits.Meeting``."""
        return self.begun.is_set()


class Handle(Generic[ResultT]):
    """A collective under way.

    Example::

        handle = group.allreduce_async(gradient)
        ...                                     # compute
        average = handle.wait()
    """

    def __init__(
        self,
        request: Request[ResultT],
        header: Header,
        key: str,
        line: Line,
        berth: Berth | None = None,
    ) -> None:
        self.device = request.device
        """Where the data is; ``None`` when there is none."""
        self.key = key
        """What the request is known by within its group."""
        self.header = header
        self.shared = request.share()
        """How it can travel with others, if it can."""
        self.berth = berth
        """Where it lies beside others already."""
        self._request: Request[ResultT] | None = request
        self._line = line
        self._sequence = NOT_YET
        self._agreement = Agreement((wire.topic_of(line.key, key), line.members))
        self._inference = torch.is_inference_mode_enabled()
        self._stream = _current_stream(request.device)
        self._ready = None if self._stream is None else self._stream.record_event()
        self._started = 0.0
        self._flight: Flight[ResultT] | None = None
        self._begun = self._agreement.begun
        self._settling = threading.Lock()
        self._settled = False
        self._result: ResultT | None = None
        self._error: Exception | None = None

    @property
    def what(self) -> str:
        """What the user would call it: ``allreduce "loss"``."""
        return self.header.label

    @property
    def position(self) -> Position:
        """Where whoever waits for it is."""
        line = self._line
        return Position(PATH, line.key, self._sequence, self.what, members=line.members)

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without blocking."""
        if self._settled:
            return True
        if not self._begun.is_set():
            return False
        flight = self._flight  # another thread may settle it at any time
        if self._error is None and flight is not None:
            if not all(work.done() for work in flight.works):
                return False
            self._settle()
        return True

    def wait(self) -> ResultT:
        """The collective's result, once it is there.

        On CUDA the result is ready for the current stream; the host does not wait for the data.
        May be called by several threads and several times. Raises ``MismatchError`` when the
        ranks asked for different things (the group stays usable), ``PeerLost``, ``StallError``
        or ``ShutDownError`` when the group broke.
        """
        self._line.waited = True
        if not self._settled:
            begin = time.perf_counter()
            try:
                self._await()
            except CollectiveError as error:
                raise self._line.explain(error) from None
            finally:
                events.emit(events.WaitFinished(PATH, time.perf_counter() - begin))
            self._settle()
        if self._error is not None:
            raise copy.copy(self._error) if isinstance(self._error, FarandoleError) else self._error
        return cast(ResultT, self._result)

    def agree(self, sequence: int, absent: int) -> None:
        """It is the group's ``sequence``-th request; ``absent`` members have joined instead."""
        self._sequence = sequence
        if absent and self._request is not None:
            self._request.leave_out(absent)
        self.stage(Stage.QUEUED)

    def begin(self, headers: Sequence[Header], stream: torch.cuda.Stream | None) -> None:
        """Hand the data to the engine. For the negotiator's thread."""
        request = cast(Request[ResultT], self._request)
        with modes(inference=self._inference, stream=stream):
            self.get_ready(stream)
            flight = request.begin(self._line.engine, headers)
        self.take_off(flight, stream)

    def get_ready(self, stream: torch.cuda.Stream | None) -> None:
        """Let ``stream`` wait for the buffers."""
        self._started = time.perf_counter()
        if stream is not None and self._ready is not None:
            stream.wait_event(self._ready)

    def take_off(self, flight: Flight[ResultT], stream: torch.cuda.Stream | None) -> None:
        """The data has begun to move."""
        if stream is not None:
            for buffer in flight.buffers:
                buffer.record_stream(stream)
        self._flight = flight
        self._line.moving.add(self)
        self._line.unsettled.add(self)
        self.stage(Stage.MOVING, transport=self._transport(flight.engine))
        self._begun.set()

    def fail(self, error: FarandoleError) -> None:
        """Let whoever waits raise ``error``, unless the data has begun to move already."""
        if not self._begun.is_set():
            self._error = error
            self.stage(Stage.FAILED, detail=str(error).partition("\n")[0])
            self._begun.set()

    def stage(self, stage: Stage, *, transport: str = "", detail: str = "") -> None:
        """Tell whoever listens that the request has come to ``stage``."""
        if events.wanted(events.RequestStaged):
            events.emit(
                events.RequestStaged(
                    rank=self._line.control.rank,
                    group=self._line.key,
                    operation=self.header.operation,
                    name=self.header.name or self.key,
                    stage=stage,
                    at=time.perf_counter(),
                    transport=transport,
                    detail=detail,
                )
            )

    def _transport(self, engine: str) -> str:
        if engine != "torch" or self.device is None:
            return engine
        return "nccl" if self.device.type == "cuda" else "gloo"

    def complete(self) -> None:
        """Wait until the result is made, or what went wrong is known: no engine is needed then."""
        if not self._poll(0.0):
            self._line.control.wait_for(self._poll, self.position)
        self._settle()

    def _await(self) -> None:
        control = self._line.control
        if not self._begun.is_set():
            self._line.flush()
            if not self._begun.is_set():
                control.wait_for(self._begun.wait, self.position, self._agreement)
        if self.moving():
            control.wait_for(self._poll, self.position)

    def in_flight(self) -> bool:
        """Whether it has neither failed, nor has all its data moved."""
        return not self._settled and (not self._begun.is_set() or self.moving())

    def moving(self) -> bool:
        """Whether an engine may still read or write this collective's buffers."""
        flight = self._flight
        return (
            not self._settled
            and flight is not None
            and not all(work.done() for work in flight.works)
        )

    def _poll(self, timeout: float) -> bool:
        if self._begun.is_set() and not self.moving():
            return True
        deadline = Deadline.after(timeout)
        if not self._begun.wait(timeout):
            return False
        flight = self._flight  # another thread may settle it at any time
        works = () if flight is None else flight.works
        return all(work.wait(deadline.remaining()) for work in works)

    def _settle(self) -> None:
        with self._settling:
            if self._settled:
                return
            if self._error is None and self._flight is not None:
                try:
                    self._finish(self._flight)
                except FarandoleError as error:
                    self._error = self._line.explain(error)
                except Exception as error:  # noqa: BLE001  # raised by every wait()
                    self._error = error
                if self._error is None:
                    self.stage(Stage.DONE)
                else:
                    self.stage(Stage.FAILED, detail=str(self._error).partition("\n")[0])
            self._line.moving.discard(self)
            self._line.unsettled.discard(self)
            self._flight = self._request = self.shared = self.berth = None
            self._settled = True

    def _finish(self, flight: Flight[ResultT]) -> None:
        for work in flight.works:
            work.wait()
        self.stage(Stage.UNPACKING)
        with modes(inference=self._inference, stream=None):
            self._result = flight.finish()
        self._record_streams(flight)
        if events.wanted(events.CollectiveFinished) and self.device is not None:
            request = cast(Request[ResultT], self._request)
            events.emit(
                events.CollectiveFinished(
                    operation=request.operation,
                    name=request.name or "",
                    path=PATH,
                    engine=flight.engine,
                    bytes=flight.bytes,
                    seconds=time.perf_counter() - self._started,
                    ranks=len(self._line.members),
                )
            )

    def _record_streams(self, flight: Flight[ResultT]) -> None:
        current = _current_stream(self.device)
        if current is None:
            return
        elsewhere = list(flight.outputs)
        if current != self._stream:
            elsewhere.extend(flight.buffers)
        for tensor in elsewhere:
            tensor.record_stream(current)


def _current_stream(device: torch.device | None) -> torch.cuda.Stream | None:
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.current_stream(device)
