"""What ``join()`` does with gradients that travel in another way than plain buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_ranks import assert_equal_bits, fill, sgd, weights

import farandole.torch as hvd
from farandole.core.errors import MismatchError
from farandole.testing.ranks import run_threads

COUNTS = (2, 5, 3)


def batch(rank, number):
    random = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 3, generator=random)


def test_compressed_gradients():
    def rank_function(rank):
        hvd.init()
        model = fill(nn.Linear(3, 2))
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), compression=hvd.Compression.bf16
        )
        for number in range(COUNTS[rank]):
            model(batch(rank, number)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        last = hvd.join()
        hvd.shutdown()
        return last, weights(model)

    results = run_threads(len(COUNTS), rank_function)
    assert {last for last, _ in results} == {1}
    assert_equal_bits([trained for _, trained in results])

    model = fill(nn.Linear(3, 2))
    optimizer = sgd(model.parameters())
    for number in range(max(COUNTS)):
        for rank, count in enumerate(COUNTS):
            if number < count:
                (model(batch(rank, number)).pow(2).mean() / len(COUNTS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(results[0][1], weights(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("compression", [hvd.Compression.powersgd(1), hvd.Compression.topk(0.2)])
def test_compression_that_remembers_on_a_rank_that_joins_before_its_first_step(compression):
    counts = ((0, 3), (2, 2), (4, 0))

    def rank_function(rank):
        hvd.init()
        model = fill(nn.Linear(3, 4))
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), compression=compression)
        for epoch in counts:
            for number in range(epoch[rank]):
                model(batch(rank, number)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            hvd.join()
        hvd.shutdown()
        return weights(model)

    assert_equal_bits(run_threads(2, rank_function))


def test_adasum():
    """Zeros do not change what the others have."""

    def rank_function(rank):
        hvd.init()
        mine = torch.arange(4.0) + 1
        if rank == 0:
            combined = hvd.allreduce(mine, op=hvd.Adasum, name="x")
            assert combined.tolist() == mine.tolist()
        last = hvd.join()
        hvd.shutdown()
        return last

    assert run_threads(2, rank_function) == [0, 0]


def test_sparse_gradients():
    """They travel in an allgather, which zeros cannot stand in for."""

    def rank_function(rank):
        hvd.init()
        rows = torch.eye(3).to_sparse(1)
        if rank == 0:
            wait = hvd.sparse_allreduce_async(rows, "rows", hvd.Sum)
            with pytest.raises(MismatchError, match="Allgather is not supported with Join"):
                wait()
        last = hvd.join(rank)  # the index of a GPU, of no use here
        hvd.shutdown()
        return last

    assert run_threads(2, rank_function) == [0, 0]
