"""Join after uneven loops: the optimizers of the others go on, with zeros from who has joined."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from farandole.testing.ranks import run_processes, run_threads

WAYS = pytest.mark.parametrize("run", [run_threads, run_processes])
BATCHES = [5, 9, 7]
EPOCHS = 2
RATE = 0.1


with torch.random.fork_rng():
    torch.manual_seed(0)
    STARTS = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(2)]


def models(count: int) -> list[nn.Sequential]:
    return copy.deepcopy(STARTS[:count])


def loss_of(model: nn.Module, rank: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 100 + batch)
    inputs = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    loss: Tensor = model(inputs).pow(2).mean()
    return loss


def reference(count: int, divide_by_all: bool) -> list[Tensor]:
    """The same training in one process, with zeros for the ranks that have no batch."""
    trained = models(count)
    for model in trained:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in range(max(BATCHES) * EPOCHS):
            batch %= max(BATCHES)
            there = [rank for rank, number in enumerate(BATCHES) if batch < number]
            optimizer.zero_grad()
            divisor = len(BATCHES) if divide_by_all else len(there)
            for rank in there:
                (loss_of(model, rank, batch) / divisor).backward()
            optimizer.step()
    return [parameter.detach() for model in trained for parameter in model.parameters()]


def train(rank: int, count: int) -> tuple[int, list[Tensor]]:
    hvd.init()
    trained = models(count)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE), model.named_parameters()
        )
        for model in trained
    ]
    last = -1
    for _ in range(EPOCHS):
        for batch in range(BATCHES[rank]):
            for model, optimizer in zip(trained, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, batch).backward()
                optimizer.step()
        last = hvd.join()
        for model in trained:
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.shutdown()
    return last, [parameter.detach() for model in trained for parameter in model.parameters()]


def require_close(results: Sequence[tuple[int, list[Tensor]]], expected: list[Tensor]) -> None:
    for last, weights in results:
        assert last == 1
        for mine, theirs, wanted in zip(weights, results[0][1], expected, strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@WAYS
@pytest.mark.parametrize("count", [1, 2])
def test_uneven_ranks_train_as_if_the_missing_batches_had_no_gradient(run, count):
    require_close(run(3, lambda rank: train(rank, count)), reference(count, divide_by_all=True))


def test_averages_over_the_ranks_that_take_part(monkeypatch):
    monkeypatch.setenv("FARANDOLE_JOIN_AVERAGE", "participants")
    require_close(run_threads(3, lambda rank: train(rank, 1)), reference(1, divide_by_all=False))


def test_an_optimizer_that_is_gone_on_one_rank_holds_up_nobody():
    def on_rank(rank: int) -> None:
        hvd.init()
        (first, second) = models(2)
        both = [
            hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=RATE))
            for each in (first, second)
        ]
        for model, optimizer in zip((first, second), both, strict=True):
            loss_of(model, rank, 0).backward()
            optimizer.step()
        if rank == 0:
            del both, optimizer
        assert hvd.join() in (0, 1)
        hvd.shutdown()

    run_threads(2, on_rank)
