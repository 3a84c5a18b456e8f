"""SyncBatchNorm equals one process's BatchNorm on the global batch."""

from __future__ import annotations

import copy
import random
import re
import time

import pytest
import torch
from torch import nn
from torch_ranks import assert_equal_bits, fill, sgd, weights

import farandole.torch as hvd
from farandole.core.errors import MismatchError
from farandole.testing.ranks import process_outcomes, run_processes, run_threads


def ranks(function, size=3, run=run_threads):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run(size, rank_function)


def global_batch(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "parts", "dtype"),
    [
        ((9, 4), [2, 3, 4], torch.float64),
        ((9, 4), [0, 8, 1], torch.float64),
        ((7, 4, 3, 5), [1, 5, 1], torch.float64),
        ((7, 4, 3, 5), [3, 2, 2], torch.float32),
        ((7, 4, 6), [3, 2, 2], torch.bfloat16),
    ],
)
def test_equals_batch_norm_on_the_global_batch(shape, parts, dtype, affine, momentum):
    def rank_function(rank):
        norm = fill(hvd.SyncBatchNorm(4, momentum=momentum, affine=affine), 1)
        plain_class = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
        plain = fill(plain_class(4, momentum=momentum, affine=affine), 1)
        if dtype is torch.float64:
            norm, plain = norm.double(), plain.double()
        for step in range(3):
            whole = global_batch(shape, dtype, step)
            weight = global_batch(shape, dtype, 100 + step)
            mine = whole.split(parts)[rank].clone().requires_grad_()
            whole.requires_grad_()
            tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
            norm.zero_grad()
            plain.zero_grad()
            ours, theirs = norm(mine), plain(whole)
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs.split(parts)[rank], **tolerance)
            (ours * weight.split(parts)[rank]).sum().backward()
            (theirs * weight).sum().backward()
            torch.testing.assert_close(mine.grad, whole.grad.split(parts)[rank], **tolerance)
            for own, total in zip(norm.parameters(), plain.parameters(), strict=True):
                summed = hvd.allreduce(own.grad, op=hvd.Sum)
                torch.testing.assert_close(summed, total.grad, **tolerance)
            torch.testing.assert_close(norm.running_mean, plain.running_mean, **tolerance)
            torch.testing.assert_close(norm.running_var, plain.running_var, **tolerance)
            assert norm.num_batches_tracked == step + 1
        norm.eval()
        plain.eval()
        torch.testing.assert_close(norm(mine), plain(mine), **tolerance)
        return list(norm.state_dict().values())

    assert_equal_bits(ranks(rank_function))


def test_channels_last():
    def rank_function(rank):
        norm = hvd.SyncBatchNorm(4)
        x = global_batch((6, 4, 3, 3), torch.float32).to(memory_format=torch.channels_last)
        mine = x.chunk(3)[rank].clone(memory_format=torch.preserve_format).requires_grad_()
        y = norm(mine)
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.square().sum().backward()
        torch.testing.assert_close(y, nn.BatchNorm2d(4)(x).chunk(3)[rank])

    ranks(rank_function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision(dtype):
    def rank_function(rank):
        norm, alone = hvd.SyncBatchNorm(4).to(dtype), nn.BatchNorm1d(4)
        x = global_batch((9, 4), dtype)
        mine = x.chunk(3)[rank].clone().requires_grad_()
        y = norm(mine)
        y.sum().backward()
        assert y.dtype == mine.grad.dtype == norm.weight.grad.dtype == dtype
        torch.testing.assert_close(y.float(), alone(x.float()).chunk(3)[rank], rtol=0.02, atol=0.02)

    ranks(rank_function)


def test_without_running_statistics_evaluation_uses_the_batch():
    def rank_function(rank):
        norm = hvd.SyncBatchNorm(4, track_running_stats=False).eval()
        x = global_batch((6, 4), torch.float32)
        torch.testing.assert_close(
            norm(x.chunk(3)[rank]), nn.BatchNorm1d(4)(x).chunk(3)[rank], rtol=1e-5, atol=1e-5
        )

    ranks(rank_function)


def test_refuses():
    def rank_function(rank):
        norm = hvd.SyncBatchNorm(4)
        with pytest.raises(ValueError, match="at least 2D"):
            norm(torch.ones(4))
        with pytest.raises(ValueError, match="expected 4 channels in dimension 1, got 3"):
            norm(torch.ones(2, 3))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            norm(torch.ones(1 if rank == 1 else 0, 4))

    ranks(rank_function)


def test_one_process_needs_no_init_in_evaluation():
    norm = hvd.SyncBatchNorm(4).eval()
    assert norm(torch.zeros(2, 4)).tolist() == [[0.0] * 4] * 2
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        norm.train()(torch.zeros(2, 4))


def test_copies():
    def rank_function(rank):
        norm = hvd.SyncBatchNorm(4)
        norm(torch.randn(2, 4))
        other = copy.deepcopy(norm)
        assert other.running_mean.equal(norm.running_mean)
        return other(torch.ones(2, 4) * rank).shape

    ranks(rank_function)


def test_layers_in_another_order():
    """Seen before the values are used, and without a transport's crash, whatever their sizes."""

    def rank_function(rank):
        hvd.init()
        small, large = hvd.SyncBatchNorm(4), hvd.SyncBatchNorm(100)
        try:
            for step in range(4):
                layers = [(small, 4), (large, 100)]
                for norm, channels in layers[::-1] if (step, rank) == (2, 1) else layers:
                    norm(torch.randn(3, channels))
        except MismatchError as error:
            return str(error)
        return None

    for outcome in process_outcomes(2, rank_function, 60.0):
        assert outcome.finished, outcome
        assert re.search(r"rank 0: SyncBatchNorm\(4\), layer 0", outcome.value)
        assert re.search(r"rank 1: SyncBatchNorm\(100\), layer 1", outcome.value)


@pytest.mark.slow
def test_metrics_layers_and_buckets_in_flight_together():
    """With random delays on each rank, on real processes; against one process."""

    def network(norm):
        return fill(
            nn.Sequential(
                nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(),
                nn.Conv2d(6, 6, 3), norm(6), nn.ReLU(),
                nn.Flatten(), nn.Linear(96, 5),
            ).double()
        )  # fmt: skip

    def data(step):
        generator = torch.Generator().manual_seed(step)
        return (
            torch.randn(12, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(5, (12,), generator=generator),
        )

    def rank_function(rank):
        delay = random.Random(rank)
        model = network(hvd.SyncBatchNorm)
        for layer in model:
            layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.01 * delay.random()))
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        losses = []
        for step in range(12):
            images, labels = (part.chunk(3)[rank] for part in data(step))
            time.sleep(0.02 * delay.random())
            before = hvd.allreduce_async(labels.sum(), op=hvd.Sum, name="labels")
            loss = nn.functional.cross_entropy(model(images), labels)
            handle = hvd.allreduce_async(loss.detach(), name="loss")
            loss.backward()
            time.sleep(0.01 * delay.random())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(hvd.synchronize(handle))
            assert hvd.synchronize(before) == data(step)[1].sum()
        return [*weights(model), *losses]

    results = ranks(rank_function, run=run_processes)
    assert_equal_bits(results)
    alone = network(nn.BatchNorm2d)
    plain = sgd(alone.parameters())
    losses = []
    for step in range(12):
        images, labels = data(step)
        loss = nn.functional.cross_entropy(alone(images), labels)
        loss.backward()
        plain.step()
        plain.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(results[0], [*weights(alone), *losses], rtol=1e-9, atol=1e-11)
