"""The handle of a collective under way: where its result, or what went wrong, is waited for.

Whoever waits makes the result, on the own thread and stream: a result that nobody waits for costs
nothing, and handles may be waited for in any order and from any thread.

On CUDA, buffers are made on the submitting thread's current stream. The issuing thread has a
stream of its own, which waits for them. The result is made on the current stream of whoever
waits, after that stream has been made to wait for the data.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from farandole.comm.collectives.request import Flight, Request
from farandole.comm.control.channel import Control
from farandole.comm.control.pending import PendingGather
from farandole.comm.control.position import Position
from farandole.comm.engines.base import Engine
from farandole.comm.header import Header
from farandole.core import events
from farandole.core.clock import Deadline
from farandole.core.errors import CollectiveError, FarandoleError

ResultT = TypeVar("ResultT")

PATH = "named"
"""The path of a group that this order belongs to."""


@dataclass(frozen=True)
class Line:
    """What a group lends to its issuer and the handles."""

    key: str
    """The group's identity, the same text on all its members."""
    members: tuple[int, ...]
    """Global ranks."""
    control: Control
    engine: Callable[[torch.device], Engine]
    """Opens or finds this path's engine."""
    explain: Callable[[FarandoleError], FarandoleError]
    """The group's best account of a failure that a transport reported."""
    moving: set[Handle[Any]] = field(default_factory=set)
    """Collectives whose buffers an engine may still use; kept here if nobody else keeps them."""


class Handle(Generic[ResultT]):
    """A collective under way.

    Example::

        handle = group.allreduce_async(gradient)
        ...                                     # compute
        average = handle.wait()
    """

    def __init__(
        self, request: Request[ResultT], position: Position, line: Line, pending: PendingGather
    ) -> None:
        self.device = request.device
        """Where the data is; ``None`` when there is none."""
        self._request: Request[ResultT] | None = request
        self._position = position
        self._line = line
        self.pending = pending
        self._inference = torch.is_inference_mode_enabled()
        self._stream = _current_stream(request.device)
        self._ready = None if self._stream is None else self._stream.record_event()
        self._started = 0.0
        self._flight: Flight[ResultT] | None = None
        self._begun = threading.Event()
        self._settling = threading.Lock()
        self._settled = False
        self._result: ResultT | None = None
        self._error: Exception | None = None

    @property
    def what(self) -> str:
        """What the user would call it: ``allreduce "loss"``."""
        return self._position.what

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without blocking."""
        if self._settled:
            return True
        if not self._begun.is_set():
            return False
        if self._error is None and self._flight is not None:
            if not all(work.done() for work in self._flight.works):
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
        if not self._settled:
            begin = time.perf_counter()
            try:
                if not self._poll(0.0):
                    self._line.control.wait_for(self._poll, self._position)
            except CollectiveError as error:
                raise self._line.explain(error) from None
            finally:
                events.emit(events.WaitFinished(PATH, time.perf_counter() - begin))
            self._settle()
        if self._error is not None:
            raise copy.copy(self._error) if isinstance(self._error, FarandoleError) else self._error
        return cast(ResultT, self._result)

    def begin(self, headers: Sequence[Header], stream: torch.cuda.Stream | None) -> None:
        """Hand the data to the engine. For the issuing thread."""
        request = cast(Request[ResultT], self._request)
        with self._modes(stream):
            self._started = time.perf_counter()
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            flight = request.begin(self._line.engine, headers)
            if stream is not None:
                for buffer in flight.buffers:
                    buffer.record_stream(stream)
        self._flight = flight
        self._line.moving.add(self)
        self._begun.set()

    def fail(self, error: FarandoleError) -> None:
        """Let whoever waits raise ``error``, unless the data has begun to move already."""
        if not self._begun.is_set():
            self._error = error
            self._begun.set()

    def moving(self) -> bool:
        """Whether an engine may still read or write this collective's buffers."""
        flight = self._flight
        return (
            not self._settled
            and flight is not None
            and not all(work.done() for work in flight.works)
        )

    def _poll(self, timeout: float) -> bool:
        deadline = Deadline.after(timeout)
        if not self._begun.wait(timeout):
            return False
        works = () if self._flight is None else self._flight.works
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
            self._line.moving.discard(self)
            self._flight = self._request = None
            self._settled = True

    def _finish(self, flight: Flight[ResultT]) -> None:
        for work in flight.works:
            work.wait()
        with self._modes(None):
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

    @contextlib.contextmanager
    def _modes(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """The submitter's inference mode, no gradients, and ``stream`` as the current one."""
        with torch.inference_mode(self._inference), torch.no_grad(), torch.cuda.stream(stream):
            yield


def _current_stream(device: torch.device | None) -> torch.cuda.Stream | None:
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.current_stream(device)
