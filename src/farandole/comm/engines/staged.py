"""Device tensors through an engine of the host: where ranks share a GPU, which NCCL refuses.

One thread takes the operations in the order in which they were begun: it copies the sources into
host memory, runs the operation on the host engine, and copies the results back. The device's part
is behind :class:`Lane`, so that everything but it runs on any machine.

Unlike NCCL's, a wait blocks the host until the operation has ended: no stream can wait for a host.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.core.errors import FarandoleBug, FarandoleError

Act = Callable[..., tuple[Work, list[torch.Tensor]]]
"""From the sources in host memory to the host's operation and its results in host memory."""


class Lane(Protocol):
    """A stream of the device, and copies on it. Marks are moments in a stream."""

    def mark_caller(self) -> Any:
        """Called by the thread that begins: a mark behind all that its stream has queued."""
        ...

    def follow(self, mark: Any) -> None:
        """Let what comes next in the lane begin after ``mark``."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory; returns when it is complete."""
        ...

    def host(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory of the size and dtype of ``like``."""
        ...

    def put(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Copy back; may return before it is complete."""
        ...

    def mark(self) -> Any:
        """A mark behind all that the lane has queued."""
        ...

    def hold_caller(self, mark: Any) -> None:
        """Called by the thread that waits: its stream goes on after ``mark``."""
        ...


class CudaLane:
    """A lane on a CUDA device, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark_caller(self) -> torch.cuda.Event:
        """See :class:`Lane`."""
        return _mark(torch.cuda.current_stream(self._device))

    def follow(self, mark: torch.cuda.Event) -> None:
        """See :class:`Lane`."""
        self._stream.wait_event(mark)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Lane`."""
        host = self.host(tensor)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def host(self, like: torch.Tensor) -> torch.Tensor:
        """See :class:`Lane`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def put(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """See :class:`Lane`."""
        # The tensor may have been made in inference mode.
        with torch.cuda.stream(self._stream), torch.inference_mode():
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """See :class:`Lane`."""
        return _mark(self._stream)

    def hold_caller(self, mark: torch.cuda.Event) -> None:
        """See :class:`Lane`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class StagedWork(Work):
    """An operation that the staging thread runs, or will."""

    def __init__(
        self,
        lane: Lane,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        act: Act,
    ) -> None:
        self._lane = lane
        self._sources = sources
        self._targets = targets
        self._act = act
        self._ready = lane.mark_caller()
        self._end: Any = None
        self._error: FarandoleError | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Carry the operation out, in the staging thread."""
        self._lane.follow(self._ready)
        work, results = self._act(*map(self._lane.fetch, self._sources))
        work.wait()
        for target, result in zip(self._targets, results, strict=True):
            self._lane.put(target, result)
        self._end = self._lane.mark()
        self._over.set()

    def fail(self, error: FarandoleError) -> None:
        """End the operation with ``error``."""
        # Without the frames, which would keep the inner engine's operation.
        self._error = error.with_traceback(None)
        self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise copy.copy(self._error)
        self._lane.hold_caller(self._end)
        return True

    def done(self) -> bool:
        """See :class:`Work`."""
        return self._over.is_set()


class StagedEngine(Engine):
    """Carries the tensors of ``lane``'s device through ``inner``, which it owns."""

    name = "torch"

    def __init__(self, seat: Seat, inner: Engine, lane: Lane) -> None:
        super().__init__(seat)
        self._inner = inner
        self._lane = lane
        self._queue: queue.SimpleQueue[StagedWork | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(
            target=self._serve, name=f"farandole-staging-{seat.channel}", daemon=True
        )
        self._thread.start()

    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """See :class:`Engine`."""

        def act(host: torch.Tensor) -> tuple[Work, list[torch.Tensor]]:
            return self._inner.allreduce(host, reduction), [host]

        return self._begin([buffer], [buffer], act)

    def reducescatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> Work:
        """See :class:`Engine`."""

        def act(host: torch.Tensor) -> tuple[Work, list[torch.Tensor]]:
            result = self._lane.host(output)
            return self._inner.reducescatter(result, host, counts, reduction), [result]

        return self._begin([source], [output], act)

    def allgather(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> Work:
        """See :class:`Engine`."""

        def act(host: torch.Tensor) -> tuple[Work, list[torch.Tensor]]:
            result = self._lane.host(output)
            return self._inner.allgather(result, host, counts), [result]

        return self._begin([source], [output], act)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """See :class:`Engine`."""

        def act(host: torch.Tensor) -> tuple[Work, list[torch.Tensor]]:
            return self._inner.broadcast(host, root), [host]

        return self._begin([buffer], [buffer], act)

    def alltoall(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Work:
        """See :class:`Engine`."""

        def act(host: torch.Tensor) -> tuple[Work, list[torch.Tensor]]:
            result = self._lane.host(output)
            work = self._inner.alltoall(result, host, output_counts, source_counts)
            return work, [result]

        return self._begin([source], [output], act)

    def barrier(self) -> Work:
        """See :class:`Engine`."""
        return self._begin([], [], lambda: (self._inner.barrier(), []))

    def abort(self, error: FarandoleError) -> None:
        """See :class:`Engine`."""
        self._inner.abort(error)

    def close(self) -> None:
        """See :class:`Engine`."""
        if self._closed:
            return
        self._closed = True
        self._inner.close()
        self._queue.put(None)
        self._thread.join()

    def _begin(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], act: Act
    ) -> Work:
        work = StagedWork(self._lane, sources, targets, act)
        self._queue.put(work)
        if self._closed:
            self._fail_queued()
        return work

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self._carry(work)
        self._fail_queued()

    def _carry(self, work: StagedWork) -> None:
        try:
            work.run()
        except FarandoleError as error:
            work.fail(error)
        except Exception as error:  # noqa: BLE001 - the device may fail in many ways
            bug = FarandoleBug(f"Staging a tensor for {self.seat.channel!r} failed: {error!r}.")
            self._inner.abort(bug)
            work.fail(bug)

    def _fail_queued(self) -> None:
        while not self._queue.empty():
            work = self._queue.get()
            if work is not None:
                self._carry(work)
