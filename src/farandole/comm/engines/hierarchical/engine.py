"""The ``hierarchical`` engine: operations in stages inside hosts and across them.

Of the bytes of a large tensor each host must send and receive twice its part of a ring of hosts.
A flat ring of ranks sends more: with H hosts of R ranks 2(HR-1)/HR of the tensor instead of
2(H-1)/H, half as much again for 2 x 2 ranks. Prior art: the hierarchical allreduce of Horovod, and
of BlueConnect (Cho et al. 2019), which is this one.

What gains nothing from the hosts, an alltoall, a barrier or a tensor so small that its three stages
would cost more than they save, goes through a flat engine over all ranks, which this one also has.
Whether a tensor is small depends on what all ranks know alike.

Large tensors are cut into pieces, so that the stages of one piece run beside those of the next.
"""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from farandole.comm.codec import Exchange
from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.comm.engines.hierarchical.belts import Belts, StreamBelts, ThreadBelts
from farandole.comm.engines.hierarchical.pieces import (
    BroadcastPiece,
    EncodedPiece,
    GatherPiece,
    Piece,
    ReducePiece,
    ScatterPiece,
    Ways,
)
from farandole.core import forks
from farandole.core.errors import FarandoleError, PeerLost, ShutDownError

PIECE_BYTES = 2 * 1024 * 1024
"""A tensor is cut into pieces of at most about this size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """From how many bytes up an operation goes by stages; ``None``: never."""

    reduce: int | None = 0
    """Of what is reduced."""
    move: int | None = 0
    """Of what an allgather or a broadcast leaves on each rank."""


class HierarchicalEngine(Engine):
    """One rank's end of the channel. Owns ``flat`` and the engines in ``ways``."""

    name = "hierarchical"

    def __init__(self, seat: Seat, flat: Engine, ways: Ways, limits: Limits) -> None:
        super().__init__(seat)
        self.limits = limits
        """May be changed, by all ranks between the same two operations."""
        self._flat = flat
        self._ways = ways
        self._lock = threading.RLock()
        self._failure: FarandoleError | None = None
        self._closed = False
        self._belts: Belts = (
            StreamBelts(ways, self._broken, seat.device)
            if seat.device.type == "cuda"
            else ThreadBelts(ways, self._broken, seat.channel)
        )
        forks.abandon_in_children(self)
        _open_engines.add(self)

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Engine`."""
        return (self._ways.up or self._flat).buffer(length, dtype)

    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """See :class:`Engine`."""
        if not _reaches(self.limits.reduce, buffer):
            return self._run_flat(lambda flat: flat.allreduce(buffer, reduction))
        return self._send([ReducePiece(part, reduction) for part in _cut(buffer)], buffer)

    def reducescatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> Work:
        """See :class:`Engine`."""
        if not _reaches(self.limits.reduce, source):
            return self._run_flat(
                lambda flat: flat.reducescatter(output, source, counts, reduction)
            )
        return self._send([ScatterPiece(output, source, counts, reduction)], output, source)

    def allgather(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> Work:
        """See :class:`Engine`."""
        if not _reaches(self.limits.move, output):
            return self._run_flat(lambda flat: flat.allgather(output, source, counts))
        return self._send([GatherPiece(output, source, counts)], output, source)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """See :class:`Engine`."""
        if not _reaches(self.limits.move, buffer):
            return self._run_flat(lambda flat: flat.broadcast(buffer, root))
        return self._send([BroadcastPiece(part, root) for part in _cut(buffer)], buffer)

    def alltoall(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Work:
        """See :class:`Engine`."""
        return self._run_flat(
            lambda flat: flat.alltoall(output, source, output_counts, source_counts)
        )

    def barrier(self) -> Work:
        """See :class:`Engine`."""
        return self._run_flat(lambda flat: flat.barrier())

    def sum_encoded(self, buffer: torch.Tensor, exchange: Exchange) -> Work:
        """See :class:`Engine`. Sums exactly inside the hosts if ``exchange`` is for across them."""
        if not exchange.across_hosts:
            return exchange.sum(buffer, self)
        return self._send([EncodedPiece(buffer, exchange.parts(self._ways.layout.lanes))], buffer)

    def abort(self, error: FarandoleError) -> None:
        """See :class:`Engine`."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        for engine in self._engines():
            engine.abort(error)

    def close(self) -> None:
        """See :class:`Engine`."""
        self.abort(
            ShutDownError(f"The channel {self.seat.channel!r} was closed on rank {self.seat.rank}.")
        )
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._belts.close()
        for engine in self._engines():
            engine.close()
        _open_engines.discard(self)

    def abandon(self) -> None:
        """In a forked child, which has none of the threads. See ``core.forks``."""
        self._failure = ShutDownError(
            f"This process was forked from rank {self.seat.rank}, and collectives belong to the "
            "rank alone. Call them in the training process, not in a data-loader worker."
        )
        self._lock = threading.RLock()
        self._closed = True

    def _engines(self) -> list[Engine]:
        ways = self._ways
        between = [each for each in (ways.up, ways.across, ways.down) if each is not None]
        return [self._flat, *between]

    def _send(self, pieces: Sequence[Piece], *tensors: torch.Tensor) -> Work:
        with self._lock:  # nothing reaches the belts after they were told to end
            if self._failure is None:
                return self._belts.send(pieces, tensors)
        raise copy.copy(self._failure)

    def _run_flat(self, begin: Callable[[Engine], Work]) -> Work:
        if self._failure is not None:
            raise copy.copy(self._failure)
        try:
            return FlatWork(begin(self._flat), self._broken)
        except FarandoleError as error:
            raise self._broken(error) from None

    def _broken(self, error: FarandoleError) -> FarandoleError:
        """What to raise for ``error`` of one of the engines; ends the others too.

        The other ranks may wait for this one in any of them.
        """
        if isinstance(error, PeerLost):
            error = PeerLost(
                f"Rank {self.seat.rank} of the channel {self.seat.channel!r} lost another rank of "
                f"it. {error.message}"
            )
        self.abort(error)
        assert self._failure is not None
        return copy.copy(self._failure)


class FlatWork(Work):
    """An operation of the flat engine, whose failure is that of the whole."""

    def __init__(self, work: Work, failed: Callable[[FarandoleError], FarandoleError]) -> None:
        self._work = work
        self._failed = failed

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        try:
            return self._work.wait(timeout)
        except FarandoleError as error:
            raise self._failed(error) from None

    def done(self) -> bool:
        """See :class:`Work`."""
        return self._work.done()


def _reaches(limit: int | None, tensor: torch.Tensor) -> bool:
    return limit is not None and tensor.numel() * tensor.element_size() >= limit


def _cut(buffer: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts of about equal size; none of an empty buffer."""
    size = buffer.numel() * buffer.element_size()
    return buffer.tensor_split(-(-size // PIECE_BYTES)) if size else ()


_open_engines: weakref.WeakSet[HierarchicalEngine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()


atexit.register(_close_all)
