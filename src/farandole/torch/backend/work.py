"""Collectives in flight, as torch.distributed sees them.

A process group's collectives on one kind of device stand in a :class:`Line`. They end in the order
in which they began: whoever waits for one waits for those before it, since some engines go on
inside of their waits and need the same order of them on all ranks.

DistributedDataParallel waits for futures in C++, where nobody calls a wait of ours. For those who
ask for a future one thread a process group, the :class:`Finisher`, waits on their behalf; it is
started by the first.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.control.position import Position
from farandole.comm.engines.base import Work
from farandole.comm.group import Group
from farandole.core import events
from farandole.core.errors import CollectiveError, FarandoleError, StallError

UNLIMITED = datetime.timedelta(0)
"""What torch passes for no limit but the process group's."""


_Work: Any = dist.Work


class Line:
    """The collectives of one process group on one kind of device, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[CollectiveWork] = deque()

    def append(self, work: CollectiveWork) -> None:
        """``work`` has begun, after all that are here."""
        self._pending.append(work)

    def advance(self, until: CollectiveWork, timeout: float) -> bool:
        """Complete works in order; whether ``until`` is over after ``timeout`` seconds at most."""
        end = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            return until.over
        try:
            while not until.over:
                if not self._pending[0].poll(max(0.0, end - time.monotonic())):
                    return False
                self._pending.popleft()
            return True
        finally:
            self._lock.release()


class CollectiveWork(_Work):  # type: ignore[misc]
    """A collective of a process group.

    ``works`` are the engine's; ``finish`` makes the result of what they leave, in ``outputs``.
    """

    def __init__(
        self,
        *,
        group: Group,
        line: Line,
        finisher: Finisher,
        position: Position,
        works: Sequence[Work],
        finish: Callable[[], None],
        outputs: Sequence[Tensor],
        limit: float,
    ) -> None:
        super().__init__()
        self.over = False
        self._group = group
        self._line = line
        self._finisher = finisher
        self._position = position
        self._works = works
        self._finish = finish
        self._outputs = list(outputs)
        self._limit = limit
        self._error: Exception | None = None
        self._future: Any = None
        self._ready: torch.cuda.Event | None = None

    def wait(self, timeout: datetime.timedelta = UNLIMITED) -> bool:
        """Wait until it has ended; on CUDA the current stream does, not the host.

        Raises what it failed with, and ``StallError`` after ``timeout`` (by default the process
        group's), which breaks the group.
        """
        self.complete(timeout.total_seconds() if timeout > UNLIMITED else self._limit)
        if self._error is not None:
            raise copy.copy(self._error)
        self._follow()
        return True

    def complete(self, limit: float | None = None) -> None:
        """Wait until it has ended, well or not."""
        if self._line.advance(self, 0.0):
            return
        begin = time.monotonic()
        limit = self._limit if limit is None else limit

        def poll(timeout: float) -> bool:
            if time.monotonic() - begin > limit:
                raise self._stalled(limit)
            return self._line.advance(self, timeout)

        try:
            self._group.control.wait_for(poll, self._position)
        except FarandoleError as error:
            self.fail(self._explain(error))
        finally:
            events.emit(events.WaitFinished("planned", time.monotonic() - begin))

    def poll(self, timeout: float) -> bool:
        """Whether it is over after ``timeout`` seconds at most. For its line."""
        if self.over:
            return True
        end = time.monotonic() + timeout
        try:
            if not all(work.wait(max(0.0, end - time.monotonic())) for work in self._works):
                return False
            with torch.inference_mode():  # the tensors may have been made in it
                self._finish()
            if self._outputs and self._outputs[0].is_cuda:
                self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
                self._ready.record()
        except FarandoleError as error:
            self._error = self._explain(error)
        except RuntimeError as error:
            self._error = error
        self._works, self._finish = (), _nothing
        self.over = True
        return True

    def fail(self, error: Exception) -> None:
        """End it with ``error``, unless it is over."""
        if not self.over:
            self._error = error
            self.over = True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without blocking."""
        return self._line.advance(self, 0.0)

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.over and self._error is None

    def exception(self) -> Exception | None:
        """What it failed with."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold its result."""
        return self._outputs

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def source_rank(self) -> int:
        """A collective has no source."""
        raise RuntimeError("source_rank() is for receiving from any rank; this is a collective.")

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the result; it fails with the error's text."""
        if self._future is None:
            devices = {output.device for output in self._outputs if output.is_cuda}
            first: Any = torch.futures.Future(devices=list(devices))
            # An error set on a future of Python's is a value to those who wait in C++; one that a
            # callback raises is an error for all.
            self._future = first.then(lambda future: self._value())
            self._finisher.add(self, first)
        return self._future

    def _value(self) -> list[Tensor]:
        if self._error is not None:
            raise copy.copy(self._error)
        return self._outputs

    def _follow(self) -> None:
        if self._ready is not None:
            torch.cuda.current_stream(self._outputs[0].device).wait_event(self._ready)

    def _explain(self, error: FarandoleError) -> FarandoleError:
        return self._group.explain(error) if isinstance(error, CollectiveError) else error

    def _stalled(self, limit: float) -> StallError:
        return StallError(
            f"{self._position.what} did not complete within {limit:g} s, the timeout of its "
            "process group: another rank has not called it, or calls something else."
        )


class Finisher:
    """Waits on behalf of futures, in the order in which they were asked for."""

    def __init__(self, name: str) -> None:
        self._name = f"farandole-{name}"
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[CollectiveWork, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: CollectiveWork, future: Any) -> None:
        """Complete ``future`` when ``work`` is over."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put((work, future))

    def close(self) -> None:
        """End the thread, once it has completed what it was given."""
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _serve(self) -> None:
        streams: dict[torch.device, torch.cuda.Stream] = {}
        while (item := self._queue.get()) is not None:
            work, future = item
            with _side_stream(work.result(), streams):
                work.complete()
                work._follow()
                future.set_result(None)


@contextlib.contextmanager
def _side_stream(
    outputs: Sequence[Tensor], streams: dict[torch.device, torch.cuda.Stream]
) -> Iterator[None]:
    """A stream that waits for CUDA results, so that the ones that compute need not."""
    if not outputs or not outputs[0].is_cuda:
        yield
        return
    device = outputs[0].device
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]
    with torch.cuda.stream(streams[device]):
        yield
    for output in outputs:
        output.record_stream(streams[device])


def _nothing() -> None:
    pass
