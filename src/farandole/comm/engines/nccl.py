"""CUDA tensors between GPUs, by torch's NCCL.

Who waits for whom
    A native operation runs on a stream of the group's own, behind what the caller's current stream
    has queued. ``wait()`` of a native operation makes the then current stream wait and returns at
    once. What an operation still needs is copied or reduced on that stream. A tensor that was
    allocated on a third stream must not be reused before all this has run: the caller's stream is
    recorded on it when it is handed back.

Failures
    The watchdog of torch would end the whole process on an error of the network. Here it is told
    to leave that to whoever aborts the engine, which ends the kernels that hang. Values that come
    out of an aborted operation are undefined; every later call on the engine raises.

Closing
    A rank that finishes first must not take its communicator from under the others' last
    kernels: an unbroken engine is finalised, within a limit, and only a broken one is aborted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm.c10d_store import C10dStore
from farandole.comm.engines.base import Engine, Seat
from farandole.comm.engines.c10d import C10dEngine, Native
from farandole.core.errors import DeadlineError, FarandoleError, SetupError

FOREVER = datetime.timedelta(days=365)
"""torch's own limit for an operation, so that it never acts: stalls are judged by the watch."""

CLOSE_LIMIT = datetime.timedelta(seconds=10)
"""How long an unbroken engine may take to finalise before it is aborted."""

LEFT_TO_US: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What tells torch's watchdog not to end the process; read when a group is built."""

POLL = 0.001
"""Seconds between two looks at the first operation, which no host thread can wait for."""


class NcclEngine(C10dEngine):
    """One rank's end of an NCCL communicator."""

    name = "torch"

    def __init__(self, seat: Seat, backend: Native) -> None:
        super().__init__(seat, backend)
        self._finalised = False

    def _await(self, native: Native, timeout: float | None) -> bool:
        self._check()
        native.wait()
        return True

    def _is_loss(self, text: str) -> bool:
        return "NCCL" in text or "nccl" in text

    def _hand_over(self, tensors: tuple[torch.Tensor, ...]) -> None:
        stream = torch.cuda.current_stream(self.seat.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def _interrupt(self) -> None:
        if not self._finalised:
            self._backend.abort()

    def _give_up(self) -> None:
        """Nothing is held beside the backend."""

    def close(self) -> None:
        """See :class:`Engine`."""
        with self._lock:
            idle = all(work.done() for work in self._works)
        if self._failure is None and idle:
            self._backend._set_default_timeout(CLOSE_LIMIT)
            with contextlib.suppress(RuntimeError):  # not finalised: aborted below
                self._backend.shutdown()
                self._finalised = True
        super().close()


def open_nccl(seat: Seat) -> Engine:
    """Open the channel of ``seat`` over NCCL; returns when every rank has opened its end.

    The ranks must have met already and sit on different GPUs. Raises ``DeadlineError`` when the
    first operation does not complete in time, ``SetupError`` when NCCL cannot connect the GPUs.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = FOREVER
    store = C10dStore(seat.store, f"engine/nccl/{seat.channel}/", seat.deadline)
    try:
        with _watchdog_left_to_us(), torch.cuda.device(seat.device):
            backend = nccl(store, seat.rank, seat.size, options)
            backend.eager_connect_single_device(seat.device)
    except FarandoleError:
        raise
    except RuntimeError as error:
        raise SetupError(
            f"NCCL could not connect the GPUs of the channel {seat.channel!r} on rank {seat.rank}: "
            f"{error}. NCCL_DEBUG=INFO says more; FARANDOLE_INTERFACE chooses the network.",
            ranks=[seat.rank],
        ) from error
    engine = NcclEngine(seat, backend)
    first = engine.barrier()
    while not first.done():
        if seat.deadline.expired():
            error_ = DeadlineError(
                f"The first NCCL operation of the channel {seat.channel!r} did not complete within "
                f"{seat.deadline.limit:g} s: a rank died meanwhile, or the GPUs cannot reach each "
                "other. NCCL_DEBUG=INFO says more."
            )
            engine.abort(error_)
            engine.close()
            raise error_
        time.sleep(POLL)
    first.wait()
    return engine


@contextlib.contextmanager
def _watchdog_left_to_us() -> Iterator[None]:
    """Set :data:`LEFT_TO_US` while a group is built, and not for groups of the user's."""
    before = {name: os.environ.get(name) for name in LEFT_TO_US}
    os.environ.update(LEFT_TO_US)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
