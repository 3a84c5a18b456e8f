"""Horovod's module of this name: what scripts import from it, as far as it is not in its package.

Everything of :mod:`farandole.torch` that Horovod has here is here too.
"""

from __future__ import annotations

import torch

from farandole.comm.ops import Op
from farandole.core.errors import CollectiveError as HorovodInternalError
from farandole.torch.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from farandole.torch.collectives import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from farandole.torch.compression import Compression
from farandole.torch.handles import poll, synchronize
from farandole.torch.joining import join
from farandole.torch.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from farandole.torch.session import (
    cross_rank,
    cross_size,
    current,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from farandole.torch.sparse import sparse_allreduce_async
from farandole.torch.timeline import start_timeline, stop_timeline

Average = Op.AVERAGE
Sum = Op.SUM
Adasum = Op.ADASUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT


def is_homogeneous() -> bool:
    """Whether every machine has the same number of ranks. ``NotInitializedError`` before init.

    Example::

        assert is_homogeneous()
    """
    hosts = current().topology.hosts
    return len({hosts.count(host) for host in hosts}) == 1


def gpu_available() -> bool:
    """Whether torch sees a GPU.

    Example::

        device = "cuda" if gpu_available() else "cpu"
    """
    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum works with ``num_rank`` ranks.

    Example::

        op = Adasum if num_rank_is_power_2(size()) else Average
    """
    return num_rank > 0 and not num_rank & (num_rank - 1)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
