"""What ``import farandole.torch as hvd`` offers."""

from __future__ import annotations

import inspect

import pytest
import torch

import farandole.torch as hvd
from farandole.core.errors import CollectiveError
from farandole.torch import mpi_ops

HOROVOD = [
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
    "Average",
    "Sum",
    "Min",
    "Max",
    "Product",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "Adasum",
    "Compression",
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "join",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "remove_process_set",
    "rocm_built",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
]

OURS = ["Checkpoints", "DataLoader", "elastic", "export_weights"]


def test_names():
    assert sorted(hvd.__all__) == sorted(HOROVOD + OURS)
    for name in hvd.__all__:
        assert hasattr(hvd, name)


def test_numbers_and_errors():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert ops == [0, 1, 2, 3, 4, 5]
    assert hvd.HorovodInternalError is CollectiveError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


CALLABLE = [name for name in HOROVOD + OURS if inspect.isroutine(getattr(hvd, name))]


@pytest.mark.parametrize("name", [*CALLABLE, "SyncBatchNorm", "DataLoader"])
def test_every_public_name_says_what_it_does_with_an_example(name):
    text = inspect.getdoc(getattr(hvd, name))
    assert text is not None
    assert "Example::" in text


REDUCES = ["average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
COMPRESSES = [*REDUCES[:2], "compression", *REDUCES[2:]]
SCATTERS = ["name", "op", "process_set", "prescale_factor", "postscale_factor"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("init", ["comm", "process_sets"]),
        ("allreduce", ["tensor", *COMPRESSES]),
        ("allreduce_", ["tensor", *REDUCES]),
        ("allreduce_async", ["tensor", *REDUCES]),
        ("allreduce_async_", ["tensor", *REDUCES]),
        ("grouped_allreduce", ["tensors", *COMPRESSES]),
        ("grouped_allreduce_", ["tensors", *REDUCES]),
        ("grouped_allreduce_async", ["tensors", *REDUCES]),
        ("grouped_allreduce_async_", ["tensors", *REDUCES]),
        ("sparse_allreduce_async", ["tensor", "name", "op", "process_set"]),
        ("allgather", ["tensor", "name", "process_set"]),
        ("allgather_async", ["tensor", "name", "process_set"]),
        ("grouped_allgather", ["tensors", "name", "process_set"]),
        ("grouped_allgather_async", ["tensors", "name", "process_set"]),
        ("broadcast", ["tensor", "root_rank", "name", "process_set"]),
        ("broadcast_", ["tensor", "root_rank", "name", "process_set"]),
        ("broadcast_async", ["tensor", "root_rank", "name", "process_set"]),
        ("broadcast_async_", ["tensor", "root_rank", "name", "process_set"]),
        ("alltoall", ["tensor", "splits", "name", "process_set"]),
        ("alltoall_async", ["tensor", "splits", "name", "process_set"]),
        ("reducescatter", ["tensor", "name", "compression", *SCATTERS[1:]]),
        ("reducescatter_async", ["tensor", *SCATTERS]),
        ("grouped_reducescatter", ["tensors", "name", "compression", *SCATTERS[1:]]),
        ("grouped_reducescatter_async", ["tensors", *SCATTERS]),
        ("barrier", ["process_set"]),
        ("join", ["device"]),
        ("add_process_set", ["process_set"]),
        ("remove_process_set", ["process_set"]),
        ("start_timeline", ["file_path", "mark_cycles"]),
        ("stop_timeline", []),
        ("broadcast_object", ["obj", "root_rank", "name", "process_set"]),
        ("allgather_object", ["obj", "name", "process_set"]),
        ("broadcast_parameters", ["params", "root_rank", "process_set"]),
        ("broadcast_optimizer_state", ["optimizer", "root_rank", "model", "process_set"]),
        (
            "DistributedOptimizer",
            [
                "optimizer",
                "named_parameters",
                "compression",
                "backward_passes_per_step",
                "op",
                "gradient_predivide_factor",
                "num_groups",
                "groups",
                "sparse_as_dense",
                "process_set",
            ],
        ),
    ],
)
def test_signatures(name, parameters):
    """As Horovod's, so that arguments may be given by place; ours come after."""
    assert list(inspect.signature(getattr(hvd, name)).parameters) == parameters


def test_the_module_of_operations_has_the_same_names():
    for name in mpi_ops.__all__:
        assert getattr(mpi_ops, name) is getattr(hvd, name, getattr(mpi_ops, name))
    assert [mpi_ops.num_rank_is_power_2(ranks) for ranks in range(5)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert mpi_ops.gpu_available() == torch.cuda.is_available()


def test_what_it_is_built_of():
    never = (hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built)
    assert not any(each() for each in never)
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert hvd.nccl_built() == 0 or hvd.nccl_built() >= 20000
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert not hvd.rocm_built() or torch.version.hip
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.mpi_threads_supported()
    with pytest.raises(ValueError, match="not been initialized"):
        mpi_ops.is_homogeneous()
    hvd.init()
    assert mpi_ops.is_homogeneous()
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()
    hvd.shutdown()
