"""The systems whose collectives are measured: our engines, and the rivals that are installed.

Each offers the same operations on flat float32 tensors. What it takes to call one is part of what
is measured, as a user would call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.bench.seats import Seats
from farandole.comm.engines.base import Engine, Reduction

Call = Callable[[], object]


class System(Protocol):
    """One way to move tensors between ranks."""

    def allocate(self, length: int) -> Tensor:
        """A float32 tensor of the kind that this system moves best."""
        ...

    def prepare(self, operation: str, output: Tensor, source: Tensor) -> Call:
        """A call that carries ``operation`` out and returns when it is complete.

        ``allreduce`` and ``broadcast`` (from rank 0) work in place on ``output``, and ``source``
        is the same tensor.
        """
        ...


class EngineSystem:
    """One of our engines. ``own_memory``: tensors are made by it, as gradients' buckets are."""

    def __init__(self, engine: Engine, *, own_memory: bool) -> None:
        self._engine = engine
        self._own_memory = own_memory

    def allocate(self, length: int) -> Tensor:
        """See :class:`System`."""
        if self._own_memory:
            return self._engine.buffer(length, torch.float32)
        return torch.zeros(length)

    def prepare(self, operation: str, output: Tensor, source: Tensor) -> Call:
        """See :class:`System`."""
        engine, size = self._engine, self._engine.seat.size
        parts = [source.numel() // size] * size
        calls: dict[str, Call] = {
            "allreduce": lambda: engine.allreduce(output, Reduction.SUM).wait(),
            "allgather": lambda: engine.allgather(output, source, [source.numel()] * size).wait(),
            "reducescatter": lambda: engine.reducescatter(
                output, source, parts, Reduction.SUM
            ).wait(),
            "broadcast": lambda: engine.broadcast(output, 0).wait(),
            "alltoall": lambda: engine.alltoall(output, source, parts, parts).wait(),
        }
        return calls[operation]


class GlooSystem:
    """torch.distributed with Gloo, as its default process group."""

    def allocate(self, length: int) -> Tensor:
        """See :class:`System`."""
        return torch.zeros(length)

    def prepare(self, operation: str, output: Tensor, source: Tensor) -> Call:
        """See :class:`System`."""
        calls: dict[str, Call] = {
            "allreduce": lambda: dist.all_reduce(output),
            "allgather": lambda: dist.all_gather_into_tensor(output, source),
            "reducescatter": lambda: dist.reduce_scatter_tensor(output, source),
            "broadcast": lambda: dist.broadcast(output, 0),
            "alltoall": lambda: dist.all_to_all_single(output, source),
        }
        return calls[operation]


class MpiSystem:
    """MPI through mpi4py, on the tensors' memory."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD

    def allocate(self, length: int) -> Tensor:
        """See :class:`System`."""
        return torch.zeros(length)

    def prepare(self, operation: str, output: Tensor, source: Tensor) -> Call:
        """See :class:`System`."""
        world, there, here = self._world, output.numpy(), source.numpy()
        calls: dict[str, Call] = {
            "allreduce": lambda: world.Allreduce(self._mpi.IN_PLACE, there),
            "allgather": lambda: world.Allgather(here, there),
            "reducescatter": lambda: world.Reduce_scatter_block(here, there),
            "broadcast": lambda: world.Bcast(there, 0),
            "alltoall": lambda: world.Alltoall(here, there),
        }
        return calls[operation]


class CopySystem:
    """No communication: each rank copies a tensor of the message's size. The machine's limit."""

    def allocate(self, length: int) -> Tensor:
        """See :class:`System`."""
        return torch.zeros(length)

    def prepare(self, operation: str, output: Tensor, source: Tensor) -> Call:
        """See :class:`System`."""
        larger = max(output.numel(), source.numel())
        origin, target = torch.ones(larger), torch.ones(larger)  # zeros might have no memory yet
        return lambda: target.copy_(origin)


def make(name: str, seats: Seats) -> System:
    """The system called ``name``: an engine's name, ``NAME:copied``, ``gloo``, ``mpi``, ``copy``.

    Collective over all ranks. ``shm:copied`` is the engine ``shm`` with tensors of any memory,
    which it has to copy.
    """
    if name == "gloo":
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=seats.torch_store(), rank=seats.rank, world_size=seats.size
            )
        return GlooSystem()
    if name == "mpi":
        return MpiSystem()
    if name == "copy":
        return CopySystem()
    engine, _, memory = name.partition(":")
    return EngineSystem(seats.open(engine), own_memory=memory != "copied")


def mpi_name() -> str:
    """Which MPI it is: ``mpich``, ``openmpi``, else ``mpi``."""
    from mpi4py import MPI

    said = MPI.Get_library_version().lower().replace(" ", "")
    return next((name for name in ("mpich", "openmpi") if name in said), "mpi")
