"""Parameters, optimizer state and objects, given to all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_ranks import assert_equal_bits, batches, fill, loss_of, make_model, weights

import farandole.torch as hvd
from farandole.core.errors import MismatchError
from farandole.testing.ranks import run_processes, run_threads
from farandole.torch import objects, state


def ranks(function, size=3, run=run_threads):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run(size, rank_function)


@pytest.mark.parametrize("form", ["state_dict", "pairs", "tensors"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_parameters(form, root, monkeypatch):
    monkeypatch.setattr(state, "PIECE", 100)

    def rank_function(rank):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2).double())
        model = fill(model, rank).to(memory_format=torch.channels_last)
        model[1].running_mean.fill_(rank)
        model[1].num_batches_tracked.fill_(rank)
        forms = {
            "state_dict": model.state_dict(),
            "pairs": list(model.state_dict().items()),
            "tensors": list(model.state_dict().values()),
        }
        hvd.broadcast_parameters(forms[form], root_rank=root)
        assert model[1].num_batches_tracked == root
        assert torch.equal(model[1].running_mean, torch.full((4,), float(root)))
        for ours, theirs in zip(
            model.parameters(), fill(copy.deepcopy(model), root).parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)
        return list(model.state_dict().values())

    assert_equal_bits(ranks(rank_function))


def test_broadcast_parameters_names_what_differs():
    def rank_function(rank):
        model = nn.Linear(2, 3 if rank == 1 else 2)
        expected = r"parameter 'weight' has shape \(2, 2\) on ranks 0, 2, \(3, 2\) on rank 1"
        with pytest.raises(MismatchError, match=expected):
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        same = nn.Linear(2, 2)
        hvd.broadcast_parameters(same.state_dict(), root_rank=0)  # the job goes on

    ranks(rank_function)


def test_broadcast_parameters_refuses():
    def rank_function(rank):
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"Pass model.state_dict\(\)"):
            hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
        with pytest.raises(TypeError, match="'step' is int, not a tensor"):
            hvd.broadcast_parameters({"step": 3}, root_rank=0)
        with pytest.raises(ValueError, match="invalid root rank 3"):
            hvd.broadcast_parameters(model.state_dict(), root_rank=3)

    ranks(rank_function)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


def take_steps(model, optimizer, count):
    for batch in batches(count):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("dressed", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(name, dressed):
    """State that only the root has, or only the others, and hyperparameters."""

    def rank_function(rank):
        model = make_model().to(memory_format=torch.contiguous_format)  # LBFGS knows no other
        optimizer = OPTIMIZERS[name](model.parameters())
        root = 1
        take_steps(model, optimizer, {0: 0, 1: 2, 2: 1}[rank])
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * (rank + 1)
        before = weights(model)
        told = copy.deepcopy(optimizer.state_dict())
        if dressed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        if rank == root:
            assert str(optimizer.state_dict()) == str(told)
        assert all(map(torch.equal, before, weights(model)))
        if rank == 0 and name == "plain sgd":  # it has no state, and Horovod gives gradients then
            assert not any(parameter.grad.count_nonzero() for parameter in model.parameters())
        elif rank == 0:
            assert all(parameter.grad is None for parameter in model.parameters())
        # From the same weights, all go on alike.
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        take_steps(model, optimizer, 2)
        return weights(model)

    assert_equal_bits(ranks(rank_function))


def test_state_can_be_loaded_between_steps():
    def rank_function(rank):
        model = fill(nn.Linear(3, 2), rank)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 + rank))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return optimizer.param_groups[0]["lr"]

    assert ranks(rank_function) == [1.1] * 3


def test_state_that_only_others_have_goes():
    def rank_function(rank):
        model = make_model()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        take_steps(model, optimizer, rank)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return len(optimizer.state_dict()["state"])

    assert ranks(rank_function) == [0, 0, 0]


def test_different_optimizers():
    def rank_function(rank):
        model = make_model()
        optimizer = OPTIMIZERS["adamw" if rank else "sgd"](model.parameters())
        with pytest.raises(MismatchError, match=r"rank 0: SGD with \[7\](.|\n)*rank 1: AdamW"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        with pytest.raises(TypeError, match="takes a torch"):
            hvd.broadcast_optimizer_state(model, root_rank=0)

    ranks(rank_function)


@pytest.mark.parametrize("piece", [7, objects.PIECE])
def test_objects(piece, monkeypatch):
    monkeypatch.setattr(objects, "PIECE", piece)

    def rank_function(rank):
        mine = {"rank": rank, "text": "x" * 10 * rank, "tensor": torch.arange(rank)}
        gathered = hvd.allgather_object(mine)
        assert [each["rank"] for each in gathered] == [0, 1, 2]
        assert [each["text"] for each in gathered] == ["", "x" * 10, "x" * 20]
        assert torch.equal(gathered[2]["tensor"], torch.arange(2))
        got = hvd.broadcast_object(mine if rank == 2 else None, root_rank=2, name="it")
        assert got["text"] == "x" * 20
        assert (got is mine) == (rank == 2)
        assert hvd.broadcast_object(None, root_rank=0) is None
        with pytest.raises(ValueError, match="invalid root rank 7"):
            hvd.broadcast_object(mine, root_rank=7)

    ranks(rank_function)


def test_lambdas_and_processes():
    def rank_function(rank):
        functions = hvd.allgather_object(lambda x: x + 10 * rank)
        hvd.broadcast_parameters({"weight": torch.full((1000, 1000), float(rank))}, root_rank=1)
        return [function(1) for function in functions]

    assert ranks(rank_function, run=run_processes) == [[1, 11, 21]] * 3
