"""``DistributedOptimizer(op=Adasum)``: the ranks' steps combine, not their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_ranks import adamw, assert_equal_bits, fill, sgd, weights

import farandole.torch as hvd
from farandole.core.errors import UnsupportedError
from farandole.testing.ranks import run_processes, run_threads


def make_model():
    return fill(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))).double()


def inputs(step, rank):
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=random, dtype=torch.float64)


def pair(a, b):
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa else 1.0
    right = 1 - dot / (2 * bb) if bb else 1.0
    return left * a + right * b


def reference(size, make, steps, passes=1):
    """All ranks, one after the other, with one optimizer each."""
    models = [make_model() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(steps):
        before = weights(models[0])
        for rank in range(size):
            for part in range(passes):
                models[rank](inputs(step * passes + part, rank)).pow(2).sum().backward()
            optimizers[rank].step()
            optimizers[rank].zero_grad()
        deltas = [
            [after - was for after, was in zip(weights(model), before, strict=True)]
            for model in models
        ]
        while len(deltas) > 1:
            deltas = [
                [pair(a, b) for a, b in zip(deltas[i], deltas[i + 1], strict=True)]
                for i in range(0, len(deltas), 2)
            ]
        with torch.no_grad():
            for model in models:
                for parameter, was, delta in zip(
                    model.parameters(), before, deltas[0], strict=True
                ):
                    parameter.copy_(was + delta)
    return weights(models[0])


def train(rank, make, steps, passes=1, **more):
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=passes,
        **more,
    )
    for number in range(steps * passes):
        model(inputs(number, rank)).pow(2).sum().backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    hvd.shutdown()
    return weights(model)


@pytest.mark.filterwarnings("ignore:optimizer.step")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("passes", [1, 2])
def test_equals_the_reference(size, make, passes):
    results = run_threads(size, lambda rank: train(rank, make, 4, passes))
    assert_equal_bits(results)
    for ours, theirs in zip(results[0], reference(size, make, 4, passes), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optimizer.step")
def test_between_processes():
    results = run_processes(2, lambda rank: train(rank, adamw, 3))
    assert_equal_bits(results)
    for ours, theirs in zip(results[0], reference(2, adamw, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:optimizer.step")
def test_with_compression():
    def rank_function(rank):
        return train(rank, sgd, 3, compression=hvd.Compression.fp16)

    results = run_threads(2, rank_function)
    assert_equal_bits(results)
    for ours, theirs in zip(results[0], reference(2, sgd, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_what_it_cannot_do():
    def rank_function(rank):
        hvd.init()
        model = make_model()
        with pytest.raises(UnsupportedError, match="power of two, and is 3"):
            hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
        hvd.shutdown()

    run_threads(3, rank_function)

    def alone(rank):
        hvd.init()
        optimizer = hvd.DistributedOptimizer(sgd(make_model().parameters()), op=hvd.Adasum)
        refusal = pytest.raises(UnsupportedError, match="Skipping synchronization is not supported")
        with refusal, optimizer.skip_synchronize():
            pass
        with pytest.raises(ValueError, match="op=Average only"):
            hvd.DistributedOptimizer(
                sgd(make_model().parameters()), op=hvd.Adasum, gradient_predivide_factor=2.0
            )
        hvd.shutdown()

    run_threads(1, alone)
