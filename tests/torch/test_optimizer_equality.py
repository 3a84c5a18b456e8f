"""Training with several ranks equals training with one process on the same global batch."""

from __future__ import annotations

import pytest
import torch
from torch_ranks import (
    OPTIMIZERS,
    STEPS,
    assert_equal_bits,
    batches,
    loss_of,
    make_model,
    share,
    train_alone,
    weights,
)

import farandole.torch as hvd
from farandole.testing.ranks import run_processes, run_threads

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5}


def train(rank, make, dtype, passes, style, op=hvd.Average, factor=1.0):
    hvd.init()
    size = hvd.size()
    model = make_model(dtype)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        op=op,
        gradient_predivide_factor=factor,
    )
    for number, batch in enumerate(batches(STEPS * passes, dtype)):
        loss = loss_of(model, share(batch, rank, size))
        (loss / size if op == hvd.Sum else loss).backward()
        if style == "step after every pass" or (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    hvd.shutdown()
    return weights(model)


def check(results, make, dtype, passes):
    assert_equal_bits(results)
    for ours, alone in zip(results[0], train_alone(make, dtype, passes), strict=True):
        torch.testing.assert_close(ours, alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [2, 4])
def test_processes(size):
    """Everything in one start of the processes: each start costs."""
    cases = [
        (OPTIMIZERS[name], dtype, passes, style)
        for name in OPTIMIZERS
        for dtype in (torch.float64, torch.float32)
        for passes, style in [(1, ""), (3, "step after every pass"), (3, "step after the group")]
    ]

    def rank_function(rank):
        return [train(rank, *case) for case in cases]

    by_rank = run_processes(size, rank_function, timeout=100)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(results, *case[:3])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 1.0), (hvd.Average, 2.0), (hvd.Sum, 1.0)])
def test_operations(op, factor, passes):
    results = run_threads(
        2,
        lambda rank: train(rank, OPTIMIZERS["sgd"], torch.float64, passes, "", op, factor),
    )
    check(results, OPTIMIZERS["sgd"], torch.float64, passes)
