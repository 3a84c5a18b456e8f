"""Sparse tensors and sparse gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.core.errors import MismatchError, UsageError
from farandole.testing.ranks import run_threads


def ranks(function, size=2):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run_threads(size, rank_function)


def random_rows(rank, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(10 * seed + rank)
    dense = torch.rand(9, 4, generator=random, dtype=torch.float64)
    return torch.where(dense < 0.7, 0.0, dense).to(dtype)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("dims", [1, 2])
def test_allreduce_equals_the_dense_one(op, dims):
    def rank_function(rank):
        waits = [
            hvd.sparse_allreduce_async(
                random_rows(rank, seed=i).to_sparse(dims), name=f"rows {i}", op=op
            )
            for i in range(4)
        ]
        for i, wait in enumerate(waits):
            result = wait()
            assert result.is_sparse
            assert result.sparse_dim() == dims
            expected = hvd.allreduce(random_rows(rank, seed=i), op=op)
            torch.testing.assert_close(result.to_dense(), expected)

    ranks(rank_function, size=3)


def test_allreduce_of_nothing_and_of_repeated_entries():
    def rank_function(rank):
        indices = torch.tensor([[1, 1, 0]]) if rank else torch.empty(1, 0, dtype=torch.long)
        values = torch.ones(indices.shape[1], dtype=torch.int32)
        tensor = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
        total = hvd.sparse_allreduce_async(tensor, "counts", hvd.Sum)()
        assert total.to_dense().tolist() == [1, 2, 0]

    ranks(rank_function)


def test_allreduce_refuses():
    def rank_function(rank):
        with pytest.raises(TypeError, match=r"takes a sparse COO tensor, not torch\.strided"):
            hvd.sparse_allreduce_async(torch.ones(3), "x", hvd.Sum)
        with pytest.raises(UsageError, match="Average or Sum, not Max"):
            hvd.sparse_allreduce_async(torch.ones(3).to_sparse(), "x", hvd.Max)

    ranks(rank_function, size=1)


def dense_twin(embedding):
    twin = nn.Embedding(*embedding.weight.shape, sparse=False, dtype=embedding.weight.dtype)
    twin.load_state_dict(embedding.state_dict())
    return twin


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_training_equals_that_with_dense_gradients(op, sparse_as_dense):
    """One embedding that both ranks use, one that a single rank uses, one that nobody does."""
    size, steps = 2, 5

    def train(rank, sparse):
        torch.manual_seed(0)
        model = nn.ModuleList(
            [nn.Embedding(6, 3, sparse=sparse, dtype=torch.float64) for _ in range(3)]
            + [nn.Linear(3, 1, dtype=torch.float64)]
        )
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * 0.1 - number)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            op=op,
            sparse_as_dense=sparse and sparse_as_dense,
        )
        both, single, nobody, head = model
        for step in range(steps):
            for part in range(2):  # two backward passes a step
                rows = torch.tensor([(step + rank) % 6, (step + 1 + part) % 6, 2])
                hidden = both(rows)
                if rank == 1 and part == 0:
                    hidden = hidden + single(rows)
                head(hidden).pow(2).sum().backward()
            assert both.weight.grad.is_sparse == sparse
            assert nobody.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for result in ranks(lambda rank: (train(rank, True), train(rank, False)), size):
        for sparse, dense in zip(*result, strict=True):
            torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_optimizers_that_need_sparse_gradients(sparse_as_dense):
    def rank_function(rank):
        embedding = nn.Embedding(10, 3, sparse=True)
        nn.init.zeros_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1),
            sparse_as_dense=sparse_as_dense,
        )
        for _ in range(3):
            rows = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]][rank])
            embedding(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return embedding.weight.detach()

    first, second = ranks(rank_function)
    assert torch.equal(first, second)
    assert first.count_nonzero(dim=1).tolist() == [0, 3, 3, 3, 3, 3, 0, 0, 0, 3]


def test_a_gradient_that_becomes_sparse_later():
    """Half way through, a parameter that had dense gradients gets sparse ones, and back."""

    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(4, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for step in range(4):
            sparse = step in (1, 2)
            rows = torch.tensor([rank, 3])
            nn.functional.embedding(rows, weight, sparse=sparse).sum().backward()
            assert weight.grad.to_dense().tolist() == [[0.5] * 2, [0.5] * 2, [0.0] * 2, [1.0] * 2]
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


def test_ranks_whose_embeddings_differ():
    def rank_function(rank):
        embedding = nn.Embedding(5 + rank, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters()
        )
        with pytest.raises(
            MismatchError, match=r"sparse parameter 'weight' is .*\(5, 2\) on rank 0"
        ):
            embedding(torch.tensor([rank])).sum().backward()
        del optimizer

    ranks(rank_function)
