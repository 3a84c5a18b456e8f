"""Ranks that train differently: an error with ranks and parameters, on every rank, in seconds."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn
from torch_ranks import fill, sgd

import farandole.torch as hvd
from farandole.core.errors import MismatchError
from farandole.testing.ranks import process_outcomes, run_threads

WITHIN = 15.0  # seconds, on a busy machine; the watch itself takes 2


def make():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fill(model)
    return model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())


def step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def all_fail(size, rank_function, timeout=60.0):
    """The errors that ``rank_function`` raised on the ranks, and the seconds until then."""

    def timed(rank):
        hvd.init()
        began = time.monotonic()
        try:
            rank_function(rank)
        except hvd.HorovodInternalError as error:
            return type(error).__name__, str(error), error.ranks, time.monotonic() - began
        return "nothing", "", (), time.monotonic() - began

    outcomes = process_outcomes(size, timed, timeout)
    assert all(outcome.finished for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert outcome.value[3] < WITHIN
    return [outcome.value[:3] for outcome in outcomes]


def test_a_step_that_one_rank_skips():
    """It runs backward, but not ``step()``."""

    def rank_function(rank):
        model, optimizer = make()
        for number in range(20):
            model(torch.ones(2, 4)).sum().backward()
            if (number, rank) != (5, 1):
                optimizer.step()
            optimizer.zero_grad()

    for kind, text, _ in all_fail(3, rank_function):
        assert kind == "MismatchError"
        assert "rank 1 in step 5; ranks 0, 2 in step 6" in text
        assert "0.weight" in text
        assert "SGD" in text


def test_an_iteration_that_one_rank_skips():
    """All of it; the others wait for its last one."""

    def rank_function(rank):
        model, optimizer = make()
        for number in range(8):
            if (number, rank) != (5, 1):
                step(model, optimizer)
        hvd.allreduce(torch.ones(1), name="accuracy")

    for kind, text, _ in all_fail(2, rank_function):
        assert kind == "MismatchError"
        assert re.search(r"rank 0\b.*step 7 of SGD", text, re.DOTALL)
        assert "2.bias" in text
        assert re.search(r'rank 1\b.*allreduce.*"accuracy"', text, re.DOTALL)


def test_a_rank_that_ends_early():
    def rank_function(rank):
        model, optimizer = make()
        for number in range(8):
            if number == 5 and rank == 1:
                hvd.shutdown()
                return
            step(model, optimizer)

    (kind, text, ranks), (other, _, _) = all_fail(2, rank_function)
    assert kind == "PeerLost"
    assert other == "nothing"
    assert 1 in ranks
    assert "rank 1" in text.lower()


@pytest.mark.parametrize("change", ["added", "frozen"])
def test_a_plan_that_one_rank_changes(change):
    def rank_function(rank):
        model, optimizer = make()
        for number in range(20):
            if number == 5 and rank == 1:
                if change == "added":
                    extra = nn.Parameter(torch.zeros(3))
                    optimizer.add_param_group({"params": [extra]})
                else:
                    model[0].weight.requires_grad_(False)
            step(model, optimizer)

    for kind, text, _ in all_fail(2, rank_function):
        assert kind == "MismatchError"
        assert re.search(r"rank 0\b.*step 5 of SGD", text, re.DOTALL)
        assert re.search(r"rank 1\b.*agreement on the parameters of SGD", text, re.DOTALL)
        assert "2.bias" in text


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        ("shape", r"parameter '2.weight' has shape \(4, 4\) on rank 0, \(5, 4\) on rank 1"),
        ("dtype", "parameter '0.weight' has dtype float32 on rank 0, float64 on rank 1"),
        ("layer", "parameter '3.weight' exists on rank 1, not on rank 0"),
        ("op", "op Average on rank 0, Sum on rank 1"),
        ("passes", "backward_passes_per_step 1 on rank 0, 2 on rank 1"),
    ],
)
def test_different_models(difference, line):
    def rank_function(rank):
        hvd.init()
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        more = {}
        if rank == 1:
            if difference == "shape":
                layers[2] = nn.Linear(4, 5)
            if difference == "layer":
                layers.append(nn.Linear(4, 4))
            if difference == "op":
                more["op"] = hvd.Sum
            if difference == "passes":
                more["backward_passes_per_step"] = 2
        model = nn.Sequential(*layers)
        if difference == "dtype" and rank == 1:
            model.double()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), **more
        )
        x = torch.ones(2, 4, dtype=model[0].weight.dtype)
        losses = [model(x).sum() for _ in range(2)]
        if difference == "passes" and rank == 1:
            losses.pop().backward()
        with pytest.raises(MismatchError, match=line):
            losses.pop().backward()
        del optimizer
        hvd.shutdown()

    run_threads(2, rank_function)


def test_optimizers_used_in_another_order():
    """Their bytes never mix: each has a channel of its own."""

    def rank_function(rank):
        pairs = [make(), make()]
        for number in range(20):
            for model, optimizer in pairs if (number, rank) != (5, 1) else pairs[::-1]:
                step(model, optimizer)

    for kind, text, _ in all_fail(2, rank_function):
        assert kind == "MismatchError"
        assert re.search(r"rank 0\b.*of SGD\b", text, re.DOTALL)
        assert re.search(r"rank 1\b.*of SGD \(optimizer 1\)", text, re.DOTALL)


def test_collectives_and_steps_in_another_order():
    def rank_function(rank):
        model, optimizer = make()
        for number in range(20):
            if (number, rank) != (5, 1):
                step(model, optimizer)
                hvd.allreduce(torch.ones(1), name="loss")
            else:
                hvd.allreduce(torch.ones(1), name="loss")
                step(model, optimizer)

    for kind, text, _ in all_fail(2, rank_function):
        assert kind == "MismatchError"
        assert re.search(r"rank 0\b.*step 5 of SGD", text, re.DOTALL)
        assert re.search(r'rank 1\b.*allreduce.*"loss"', text, re.DOTALL)


def test_a_rank_that_dies_in_training():
    def rank_function(rank):
        hvd.init()
        model, optimizer = make()
        began = time.monotonic()
        try:
            for number in range(1000):
                if number == 5 and rank == 1:
                    raise SystemExit(3)
                step(model, optimizer)
        except hvd.HorovodInternalError as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return None

    outcomes = process_outcomes(3, rank_function, 60.0)
    for rank in (0, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "PeerLost"
        assert "rank 1" in text.lower()
        assert seconds < WITHIN
