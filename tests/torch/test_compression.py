"""Gradients and tensors that travel smaller than they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch_ranks import STEPS, assert_equal_bits, batches, loss_of, make_model, sgd, share, weights

import farandole.torch as hvd
from farandole.core.errors import MismatchError, UsageTypeError
from farandole.testing.ranks import run_threads
from farandole.torch.compression import Compressor


def ranks(function, size=2):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run_threads(size, rank_function)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_there_and_back(name):
    compression = getattr(hvd.Compression, name)
    narrow = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=dtype)
        travels, context = compression.compress(tensor)
        assert travels.dtype == (narrow or dtype)
        back = compression.decompress(travels, context)
        assert back.dtype == dtype
        assert torch.equal(back, tensor)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.complex64):
        tensor = torch.ones(3, dtype=dtype)
        travels, context = compression.compress(tensor)
        assert travels.dtype == dtype
        assert torch.equal(compression.decompress(travels, context), tensor)


def test_collectives():
    def rank_function(rank):
        fine = torch.tensor([1.0 + 2**-14, float(rank)], dtype=torch.float64)
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            assert hvd.allreduce(fine, compression=compression).tolist() == [1.0, 0.5]
            one, two = hvd.grouped_allreduce(
                [fine, torch.ones(2, dtype=torch.int32)], compression=compression, op=hvd.Sum
            )
            assert one.tolist() == [2.0, 1.0]
            assert two.dtype == torch.int32
            part = hvd.reducescatter(fine, compression=compression, op=hvd.Sum)
            assert part.tolist() == [[2.0], [1.0]][rank]
            parts = hvd.grouped_reducescatter([fine, fine], compression=compression)
            assert [each.tolist() for each in parts] == [[[1.0], [0.5]][rank]] * 2
        leaf = torch.ones(3, requires_grad=True)
        hvd.allreduce(leaf, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
        assert leaf.grad.tolist() == [2.0] * 3

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_training_stays_close_and_equal_on_the_ranks(compression, op):
    size = 2

    def train(rank, **more):
        model = make_model(torch.float32)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=op, **more
        )
        for batch in batches(STEPS, torch.float32):
            loss = loss_of(model, share(batch, rank, size))
            loss.backward()
            assert all(each.grad.dtype == torch.float32 for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def rank_function(rank):
        return train(rank, compression=compression), train(rank)

    results = ranks(rank_function)
    assert_equal_bits([compressed for compressed, _ in results])
    for compressed, exact in zip(*results[0], strict=True):
        torch.testing.assert_close(compressed, exact, rtol=0.05, atol=0.05)
        assert not torch.equal(compressed, exact) or exact.numel() < 20


def test_every_kind_of_parameter_and_pass():
    """Missing gradients, dtypes that are not compressed, several passes before a step."""

    def rank_function(rank):
        one = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        two = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        half = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        nobody = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([one, two, half, nobody], lr=1.0), compression=hvd.Compression.fp16
        )
        for _ in range(3):
            loss = (two * (rank + 1)).real.sum() + half.float().sum()
            if rank == 0:
                loss = loss + one.sum()
            loss.backward()
            assert one.grad.tolist() == [0.5] * 3
            assert one.grad.dtype == torch.float64
            assert two.grad.tolist() == [1.5 + 0j] * 3
            assert half.grad.tolist() == [1.0] * 3
            assert nobody.grad is None
            (one * (rank + 1)).sum().backward()
            assert one.grad.tolist() == [2.0] * 3
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


class Halved(Compressor):
    """A user's own: another shape, another dtype, a context."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).float().reshape(1, -1), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (2 * tensor).reshape(-1).to(ctx)


class Whole(Compressor):
    @staticmethod
    def compress(tensor):
        return tensor.to(torch.int32), None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.float()


def test_a_compression_of_ones_own():
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Halved)
        for _ in range(2):
            (weight * (rank + 1)).sum().backward()
            assert weight.grad.tolist() == [1.5] * 5
            optimizer.step()
            optimizer.zero_grad()
        again = copy.deepcopy(optimizer)
        assert pickle.loads(pickle.dumps(optimizer)).state_dict() == again.state_dict()

        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Whole)
        with pytest.raises(UsageTypeError, match=r"made a torch\.int32 tensor"):
            weight.sum().backward()
        with pytest.raises(UsageTypeError, match="compression must be one of"):
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression="fp16")

    ranks(rank_function)


def test_ranks_that_compress_differently():
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(5))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            compression=[hvd.Compression.none, hvd.Compression.fp16][rank],
        )
        with pytest.raises(MismatchError, match="compression NoneCompressor on rank 0"):
            weight.sum().backward()
        del optimizer

    ranks(rank_function)
