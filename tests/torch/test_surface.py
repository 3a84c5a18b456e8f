"""What ``import farandole.torch as hvd`` offers."""

from __future__ import annotations

import inspect

import pytest

import farandole.torch as hvd
from farandole.core.errors import CollectiveError

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
]

OURS = ["DataLoader"]


def test_names():
    assert sorted(hvd.__all__) == sorted(HOROVOD + OURS)
    for name in hvd.__all__:
        assert hasattr(hvd, name)


def test_numbers_and_errors():
    assert [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 3, 4, 5]
    assert hvd.HorovodInternalError is CollectiveError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


CALLABLE = [name for name in HOROVOD + OURS if inspect.isroutine(getattr(hvd, name))]


@pytest.mark.parametrize("name", [*CALLABLE, "SyncBatchNorm", "DataLoader"])
def test_every_public_name_says_what_it_does_with_an_example(name):
    text = inspect.getdoc(getattr(hvd, name))
    assert text is not None
    assert "Example::" in text


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "allreduce",
            ["tensor", "average", "name", "op", "prescale_factor", "postscale_factor"],
        ),
        ("allgather", ["tensor", "name"]),
        ("broadcast", ["tensor", "root_rank", "name"]),
        ("alltoall", ["tensor", "splits", "name"]),
        ("reducescatter", ["tensor", "name", "op", "prescale_factor", "postscale_factor"]),
        ("broadcast_object", ["obj", "root_rank", "name"]),
        ("broadcast_parameters", ["params", "root_rank"]),
        ("broadcast_optimizer_state", ["optimizer", "root_rank", "model"]),
        (
            "DistributedOptimizer",
            [
                "optimizer",
                "named_parameters",
                "backward_passes_per_step",
                "op",
                "gradient_predivide_factor",
                "num_groups",
                "groups",
                "sparse_as_dense",
            ],
        ),
    ],
)
def test_signatures(name, parameters):
    assert list(inspect.signature(getattr(hvd, name)).parameters) == parameters
