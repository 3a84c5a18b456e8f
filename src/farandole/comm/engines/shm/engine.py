"""The verbs of the ``shm`` engine."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping, Sequence

import torch

from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.comm.engines.shm import collectives
from farandole.comm.engines.shm.arena import Arena
from farandole.comm.engines.shm.board import Board
from farandole.comm.engines.shm.driver import Driver
from farandole.comm.engines.shm.peers import Peers
from farandole.core import forks
from farandole.core.errors import FarandoleError, ShutDownError


class ShmEngine(Engine):
    """One rank's end of a channel through shared memory.

    ``arenas`` are the ranks' windows, ``descriptor`` this rank's own, ``pidfds`` the processes of
    the others; ``crowded``: there are more ranks than cores.
    """

    name = "shm"

    def __init__(
        self,
        seat: Seat,
        arenas: Sequence[Arena],
        descriptor: int,
        pidfds: Mapping[int, Sequence[int]],
        *,
        crowded: bool,
    ) -> None:
        super().__init__(seat)
        self._arena = arenas[seat.rank]
        self._descriptor = descriptor
        self._peers = Peers(seat.rank, arenas, pidfds)
        self._board = Board(seat.rank, arenas, crowded=crowded)
        self._driver = Driver(seat.channel, self._board.flags, self._peers)
        _open_engines.add(self)
        forks.abandon_in_children(self)

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Engine`. In shared memory, for as long as that has room."""
        tensor = None if self._descriptor < 0 else self._arena.allocate(length, dtype)
        return super().buffer(length, dtype) if tensor is None else tensor

    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """See :class:`Engine`."""
        return self._driver.begin(collectives.allreduce(self._board, buffer, reduction))

    def reducescatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> Work:
        """See :class:`Engine`."""
        return self._driver.begin(
            collectives.reducescatter(self._board, output, source, counts, reduction)
        )

    def allgather(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> Work:
        """See :class:`Engine`."""
        lengths = [count * source.itemsize for count in counts]
        steps = collectives.allgather(self._board, _as_bytes(output), _as_bytes(source), lengths)
        return self._driver.begin(steps)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """See :class:`Engine`."""
        return self._driver.begin(collectives.broadcast(self._board, _as_bytes(buffer), root))

    def alltoall(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Work:
        """See :class:`Engine`."""
        steps = collectives.alltoall(
            self._board,
            _as_bytes(output),
            _as_bytes(source),
            [count * source.itemsize for count in output_counts],
            [count * source.itemsize for count in source_counts],
        )
        return self._driver.begin(steps)

    def barrier(self) -> Work:
        """See :class:`Engine`."""
        return self._driver.begin(collectives.barrier(self._board))

    def abort(self, error: FarandoleError) -> None:
        """See :class:`Engine`."""
        self._driver.fail(error)

    def close(self) -> None:
        """See :class:`Engine`."""
        self.abort(
            ShutDownError(f"The channel {self.seat.channel!r} was closed on rank {self.seat.rank}.")
        )
        self._driver.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._peers.close()
            os.close(descriptor)
        _open_engines.discard(self)

    def abandon(self) -> None:
        """In a forked child, let go of what is the rank's. See ``core.forks``."""
        if self._descriptor < 0:
            return
        _open_engines.discard(self)
        self._driver.abandon(
            ShutDownError(
                f"This process was forked from rank {self.seat.rank}, and collectives belong to "
                "the rank alone. Call them in the training process, not in a data-loader worker."
            )
        )
        self._arena.detach(self._descriptor)
        self._peers.close()
        os.close(self._descriptor)
        self._descriptor = -1


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


_open_engines: weakref.WeakSet[ShmEngine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()


atexit.register(_close_all)
