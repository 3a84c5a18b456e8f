"""Join after uneven loops: the optimizers of the others go on, with zeros from who has joined."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from farandole.core.errors import MismatchError
from farandole.testing.ranks import run_processes, run_threads

BATCHES = (5, 9, 7)
EPOCHS = 2
RATE = 0.1

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


MAKERS: dict[str, Make] = {"sgd": sgd, "adamw": adamw}

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


def weights_of(trained: Iterable[nn.Module]) -> list[Tensor]:
    return [each.detach().clone() for model in trained for each in model.parameters()]


def reference(
    make: Make, count: int, batches: Sequence[int], *, divide_by_all: bool = True
) -> list[Tensor]:
    """The same training in one process, with zeros for the ranks that have no batch."""
    trained = models(count)
    for model in trained:
        optimizer = make(model.parameters())
        for batch in [*range(max(batches))] * EPOCHS:
            there = [rank for rank, number in enumerate(batches) if batch < number]
            optimizer.zero_grad()
            divisor = len(batches) if divide_by_all else len(there)
            for rank in there:
                (loss_of(model, rank, batch) / divisor).backward()
            optimizer.step()
    return weights_of(trained)


def train(
    rank: int, make: Make, count: int, batches: Sequence[int]
) -> tuple[list[int], list[Tensor]]:
    hvd.init()
    trained = models(count)
    optimizers = [
        hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        for model in trained
    ]
    last = []
    for _ in range(EPOCHS):
        for batch in range(batches[rank]):
            for model, optimizer in zip(trained, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, batch).backward()
                optimizer.step()
        last.append(hvd.join())
    hvd.shutdown()
    return last, weights_of(trained)


def require_close(
    results: Sequence[tuple[list[int], list[Tensor]]], last: int, expected: list[Tensor]
) -> None:
    for lasts, weights in results:
        assert lasts == [last] * EPOCHS
        for mine, theirs, wanted in zip(weights, results[0][1], expected, strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("run", "make", "count"),
    [
        (run_threads, "sgd", 1),
        (run_threads, "sgd", 2),
        (run_threads, "adamw", 1),
        (run_processes, "adamw", 2),
    ],
)
def test_uneven_ranks_train_as_if_the_missing_batches_had_no_gradient(run, make, count):
    results = run(3, lambda rank: train(rank, MAKERS[make], count, BATCHES))
    require_close(results, 1, reference(MAKERS[make], count, BATCHES))


@pytest.mark.parametrize(
    ("run", "batches"),
    [
        (run_threads, (0, 3, 2)),
        (run_threads, (3, 0, 2)),
        (run_threads, (0, 4, 0)),
        (run_processes, (0, 0, 3)),
    ],
)
def test_a_rank_may_join_before_its_first_step(run, batches):
    results = run(3, lambda rank: train(rank, sgd, 2, batches))
    require_close(results, batches.index(max(batches)), reference(sgd, 2, batches))


def test_averages_over_the_ranks_that_take_part(monkeypatch):
    monkeypatch.setenv("FARANDOLE_JOIN_AVERAGE", "participants")
    results = run_threads(3, lambda rank: train(rank, sgd, 1, BATCHES))
    require_close(results, 1, reference(sgd, 1, BATCHES, divide_by_all=False))


def test_nobody_has_any_data():
    results = run_threads(3, lambda rank: train(rank, sgd, 2, (0, 0, 0)))
    for _, weights in results:
        assert all(map(torch.equal, weights, weights_of(models(2))))


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


def test_an_optimizer_that_is_gone_on_one_rank_catches_up_nowhere(caplog):
    """The set of ranks that have it cannot broadcast; that the weights differ is said."""

    def on_rank(rank: int) -> None:
        hvd.init()
        (model,) = models(1)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        for batch in range(rank + 1):
            optimizer.zero_grad()
            loss_of(model, rank, batch).backward()
            optimizer.step()
        if rank == 0:
            del optimizer
        assert hvd.join() == 2
        hvd.shutdown()

    run_threads(3, on_rank)
    assert "SGD is not there any more on rank 0" in caplog.text


def test_a_step_may_be_anything():
    """Clipping and a schedule are the script's; what they led to is given to all."""
    batches = (2, 5, 3)

    def train_on(ranks: Sequence[int], optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for batch in range(max(batches[rank] for rank in ranks)):
            optimizer.zero_grad()
            for rank in ranks:
                if batch < batches[rank]:
                    (loss_of(model, rank, batch) / (len(batches) if ranks[1:] else 1)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()

    def on_rank(rank: int) -> tuple[float, list[Tensor]]:
        hvd.init()
        trained = models(1)
        optimizer = hvd.DistributedOptimizer(sgd(trained[0].parameters()))
        train_on([rank], optimizer, trained[0])
        hvd.join()
        hvd.shutdown()
        return optimizer.param_groups[0]["lr"], weights_of(trained)

    alone = models(1)
    optimizer = sgd(alone[0].parameters())
    train_on([0, 1, 2], optimizer, alone[0])
    for rate, weights in run_threads(3, on_rank):
        assert rate == optimizer.param_groups[0]["lr"]
        for mine, wanted in zip(weights, weights_of(alone), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_groups_of_passes_go_on_after_it():
    def on_rank(rank: int) -> list[Tensor]:
        hvd.init()
        trained = models(1)
        optimizer = hvd.DistributedOptimizer(
            sgd(trained[0].parameters()), backward_passes_per_step=2
        )
        for _ in range(EPOCHS):
            for batch in range(BATCHES[rank]):
                loss_of(trained[0], rank, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            hvd.join()
        hvd.shutdown()
        return weights_of(trained)

    first, *others = run_threads(3, on_rank)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_parameters_may_thaw_on_ranks_without_data():
    """The others agree on a new plan; who has joined lets go of the old one."""
    batches = ((3, 2, 2), (0, 4, 3))

    def thaw(model: nn.Sequential, epoch: int) -> None:
        model[0].requires_grad_(epoch > 0)

    def on_rank(rank: int) -> list[Tensor]:
        hvd.init()
        (model,) = models(1)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for epoch, counts in enumerate(batches):
            thaw(model, epoch)
            for batch in range(counts[rank]):
                optimizer.zero_grad()
                loss_of(model, rank, batch).backward()
                optimizer.step()
            hvd.join()
        hvd.shutdown()
        return weights_of([model])

    (alone,) = models(1)
    optimizer = sgd(alone.parameters())
    for epoch, counts in enumerate(batches):
        thaw(alone, epoch)
        for batch in range(max(counts)):
            optimizer.zero_grad()
            for rank in range(3):
                if batch < counts[rank]:
                    (loss_of(alone, rank, batch) / 3).backward()
            optimizer.step()
    for weights in run_threads(3, on_rank):
        for mine, wanted in zip(weights, weights_of([alone]), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_a_set_of_ranks_catches_up_by_itself():
    """The rank that joined last need not be one of them."""
    batches = (6, 2, 4)

    def on_rank(rank: int) -> list[Tensor]:
        hvd.init()
        some = hvd.add_process_set([1, 2])
        ours, everyones = models(2)
        optimizers = [
            hvd.DistributedOptimizer(sgd(ours.parameters()), process_set=some),
            hvd.DistributedOptimizer(sgd(everyones.parameters())),
        ]
        for batch in range(batches[rank]):
            for model, optimizer in zip((ours, everyones), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, batch).backward()
                optimizer.step()
        assert hvd.join() == 0
        hvd.shutdown()
        return weights_of([ours, everyones])

    first, second, third = run_threads(3, on_rank)
    assert all(map(torch.equal, second, third))
    count = len(weights_of(models(1)))
    assert all(map(torch.equal, first[count:], third[count:]))
    assert not torch.equal(first[0], third[0])


def test_adasum_catches_up():
    def on_rank(rank: int) -> list[Tensor]:
        hvd.init()
        (model,) = models(1)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
        for batch in range((2, 4)[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, batch).backward()
            optimizer.step()
        hvd.join()
        hvd.shutdown()
        return weights_of([model])

    first, second = run_threads(2, on_rank)
    assert all(map(torch.equal, first, second))


def test_different_parameters_are_found_without_a_first_step():
    def on_rank(rank: int) -> str:
        hvd.init()
        model = nn.Linear(2 + rank, 1)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        if rank == 1:
            loss = model(torch.ones(1, 3)).sum()
            with pytest.raises(MismatchError) as caught:
                loss.backward()
            optimizer.zero_grad()
            hvd.join()
        else:
            with pytest.raises(MismatchError) as caught:
                hvd.join()
        hvd.shutdown()
        return str(caught.value)

    texts = run_threads(2, on_rank)
    assert len(set(texts)) == 1
    assert "parameter 'weight' has shape (1, 2) on rank 0, (1, 3) on rank 1" in texts[0]


def test_a_step_that_one_rank_left_out_is_found_though_another_has_joined():
    def on_rank(rank: int) -> str:
        hvd.init()
        (model,) = models(1)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        text = ""
        if rank > 0:
            loss_of(model, rank, 0).backward()
            if rank == 1:
                optimizer.step()
            with pytest.raises(MismatchError) as caught:
                loss_of(model, rank, 1).backward()
            text = str(caught.value)
        hvd.join()
        hvd.shutdown()
        return text

    _, first, second = run_threads(3, on_rank)
    assert first == second
    assert "rank 2 in step 0; rank 1 in step 1" in first
