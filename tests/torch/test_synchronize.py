"""``synchronize()``, ``skip_synchronize()`` and the warning between them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.testing.ranks import run_threads

STEM = r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)"


def on_two_ranks(function):
    def rank_function(rank):
        hvd.init()
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        function(rank, model, hvd.DistributedOptimizer(optimizer))
        hvd.shutdown()

    run_threads(2, rank_function)


def backward(model, rank):
    model(torch.full((1, 2), float(rank))).sum().backward()


def test_a_step_after_synchronize_warns_and_keeps_what_was_clipped():
    # Threads share the list of filters, so both ranks run inside of one.
    def function(rank, model, optimizer):
        backward(model, rank)
        optimizer.synchronize()
        assert model.weight.grad.tolist() == [[0.5, 0.5]]
        model.weight.grad.fill_(0.25)
        optimizer.step()
        assert model.weight.tolist() == [[0.75, 0.75]]

    with pytest.warns(UserWarning, match=STEM) as caught:
        on_two_ranks(function)
    assert len(caught) == 2


def test_no_warning_where_there_is_no_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def function(rank, model, optimizer):
            for _ in range(2):
                backward(model, rank)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
            backward(model, rank)
            optimizer.step()

        on_two_ranks(function)


def test_names_of_parameters():
    def function(rank, model, optimizer):
        names = optimizer._parameter_names
        assert list(names) == [model.weight]
        named = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
        )
        assert named._parameter_names == {model.weight: "weight"}

    on_two_ranks(function)
