"""Horovod's collectives: forms, handles and gradients. What they compute is comm's to test."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import farandole.torch as hvd
from farandole.testing.ranks import run_threads


def ranks(function, size=3):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run_threads(size, rank_function)


def test_place():
    def rank_function(rank):
        assert hvd.is_initialized()
        hvd.init()
        return (
            hvd.rank(),
            hvd.size(),
            hvd.local_rank(),
            hvd.local_size(),
            hvd.cross_rank(),
            hvd.cross_size(),
        )

    assert ranks(rank_function) == [(rank, 3, rank, 3, 0, 1) for rank in range(3)]
    assert not hvd.is_initialized()
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.barrier):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd.init\(\)"):
            ask()


def test_allreduce_forms():
    def rank_function(rank):
        mine = torch.tensor([1.0, 2.0]) * (rank + 1)
        assert hvd.allreduce(mine).tolist() == [2.0, 4.0]
        assert hvd.allreduce(mine, average=False).tolist() == [6.0, 12.0]
        assert hvd.allreduce(mine, op=hvd.Sum, name="sum").tolist() == [6.0, 12.0]
        assert hvd.allreduce(mine, op=hvd.Min).tolist() == [1.0, 2.0]
        assert hvd.allreduce(mine, op=hvd.Max).tolist() == [3.0, 6.0]
        assert hvd.allreduce(mine, op=hvd.Product).tolist() == [6.0, 48.0]
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert scaled.tolist() == [6.0, 12.0]
        assert hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)).tolist() == [6.0, 12.0]
        assert mine.tolist() == [rank + 1.0, 2 * rank + 2.0]
        target = mine.clone()
        assert hvd.allreduce_(target, op=hvd.Sum) is target
        handle = hvd.allreduce_async_(mine, op=hvd.Sum)
        assert hvd.synchronize(handle) is mine
        assert mine.tolist() == target.tolist() == [6.0, 12.0]
        with pytest.raises(ValueError, match="The op parameter supersedes average"):
            hvd.allreduce(mine, average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="op must be Average, Sum"):
            hvd.allreduce(mine, op=17)

    ranks(rank_function)


def test_grouped_forms():
    def rank_function(rank):
        def mine():
            return [torch.full((2,), float(rank)), torch.tensor(rank)]

        def values(tensors):
            return [tensor.tolist() for tensor in tensors]

        expected = [[3.0, 3.0], 3]
        assert values(hvd.grouped_allreduce(mine(), op=hvd.Sum)) == expected
        result = hvd.synchronize(hvd.grouped_allreduce_async(mine(), op=hvd.Sum))
        assert isinstance(result, tuple)
        assert values(result) == expected
        target = mine()
        hvd.grouped_allreduce_(target, op=hvd.Sum)
        assert values(target) == expected
        target = mine()
        hvd.synchronize(hvd.grouped_allreduce_async_(target, op=hvd.Sum))
        assert values(target) == expected
        gathered = hvd.grouped_allgather([torch.full((rank,), rank), torch.tensor([rank])])
        assert values(gathered) == [[1, 2, 2], [0, 1, 2]]
        gathered = hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([rank])]))
        assert values(gathered) == [[0, 1, 2]]
        rows = [torch.arange(3), torch.arange(6)]
        assert values(hvd.grouped_reducescatter(rows, op=hvd.Sum))[0] == [3 * rank]
        parts = hvd.synchronize(hvd.grouped_reducescatter_async(rows, op=hvd.Sum))
        assert values(parts)[1] == [6 * rank, 6 * rank + 3]

    ranks(rank_function)


def test_other_collectives():
    def rank_function(rank):
        mine = torch.full((rank, 2), rank)
        assert hvd.allgather(mine)[:, 0].tolist() == [1, 2, 2]
        assert hvd.synchronize(hvd.allgather_async(mine))[:, 0].tolist() == [1, 2, 2]
        value = torch.tensor([rank])
        assert hvd.broadcast(value, root_rank=1).tolist() == [1]
        assert hvd.synchronize(hvd.broadcast_async(value, 2)).tolist() == [2]
        assert value.tolist() == [rank]
        assert hvd.broadcast_(value, root_rank=1) is value
        assert value.tolist() == [1]
        assert hvd.synchronize(hvd.broadcast_async_(value, 2)).tolist() == [1]
        rows = torch.arange(3) + 10 * rank
        assert hvd.alltoall(rows).tolist() == [rank, 10 + rank, 20 + rank]
        received, counts = hvd.alltoall(rows, splits=[0, 1, 2])
        assert counts.tolist() == [rank] * 3
        assert received.numel() == 3 * rank
        received, counts = hvd.synchronize(hvd.alltoall_async(rows))
        assert counts.tolist() == [1, 1, 1]
        assert hvd.reducescatter(rows, op=hvd.Sum).tolist() == [30 + 3 * rank]
        assert hvd.synchronize(hvd.reducescatter_async(rows)).tolist() == [10 + rank]
        hvd.barrier()
        with pytest.raises(ValueError, match="invalid root rank"):
            hvd.broadcast(value, root_rank=5)

    ranks(rank_function)


def test_handles():
    def rank_function(rank):
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        assert isinstance(handle, int)
        assert hvd.poll(handle) in (True, False)
        assert hvd.synchronize(handle).tolist() == [3.0, 3.0]
        assert hvd.poll(handle) is True
        assert hvd.synchronize(handle) is None
        with pytest.raises(TypeError, match="a handle is the integer"):
            hvd.synchronize("handle")

    ranks(rank_function)


def test_mismatch_leaves_the_job_usable():
    def rank_function(rank):
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(torch.ones(2 + rank))
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert ranks(rank_function) == [3.0] * 3


# Gradients: dL/dx on each rank, for L = sum(weights * y) on each rank.


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_allreduce_gradient(op):
    def rank_function(rank):
        x, z = double(1.0, 2.0).requires_grad_(), double(3.0).requires_grad_()
        y = hvd.allreduce(x, op=op, prescale_factor=2.0)
        (y * (rank + 1)).sum().backward()
        factor = 2.0 if op == hvd.Sum else 2.0 / 3
        assert torch.allclose(x.grad, double(6.0, 6.0) * factor)
        x.grad = None
        y, w = hvd.grouped_allreduce([x, z], op=op)
        ((y.sum() + w.sum()) * (rank + 1)).backward()
        assert torch.allclose(x.grad, double(6.0, 6.0) * factor / 2)
        assert torch.allclose(z.grad, double(6.0) * factor / 2)

    ranks(rank_function)


def test_minimum_has_no_gradient():
    def rank_function(rank):
        y = hvd.allreduce(double(1.0).requires_grad_(), op=hvd.Min)
        with pytest.raises(ValueError, match="op=Min has no gradient"):
            y.sum().backward()

    ranks(rank_function)


def test_allgather_gradient():
    def rank_function(rank):
        x = torch.full((rank, 2), 1.0, dtype=torch.float64, requires_grad=True)
        y = hvd.allgather(x)
        assert y.shape == (3, 2)
        places = torch.arange(3, dtype=torch.float64).unsqueeze(1)
        (y * places * (rank + 1)).sum().backward()
        assert torch.equal(x.grad, (places * 2).expand(3, 2)[[[], [0], [1, 2]][rank]])
        x.grad = None
        (hvd.grouped_allgather([x, x])[1] * places).sum().backward()
        assert torch.equal(x.grad, places.expand(3, 2)[[[], [0], [1, 2]][rank]])

    ranks(rank_function)


def test_broadcast_gradient():
    def rank_function(rank):
        x = double(1.0, 2.0).requires_grad_()
        (hvd.broadcast(x, root_rank=1) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == ([2.0, 2.0] if rank == 1 else [0.0, 0.0])

    ranks(rank_function)


@pytest.mark.parametrize("splits", [None, [1, 0, 2], torch.tensor([1, 1, 0], dtype=torch.int32)])
def test_alltoall_gradient(splits):
    def rank_function(rank):
        x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
        result = hvd.alltoall(x, splits=splits)
        y = result if splits is None else result[0]
        (y * (rank + 1)).sum().backward()
        sent = {None: [1, 1, 1]}.get(splits) if splits is None else list(map(int, splits))
        expected = [to + 1.0 for to, count in enumerate(sent) for _ in range(count)]
        assert x.grad.tolist() == expected + [0.0] * (3 - len(expected))

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_reducescatter_gradient(op):
    """Horovod's: the gathered gradients, with Sum times the number of ranks."""

    def rank_function(rank):
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        (hvd.reducescatter(x, op=op) * (rank + 1)).sum().backward()
        factor = 3.0 if op == hvd.Sum else 1.0
        assert torch.allclose(x.grad, double(1.0, 1.0, 2.0, 3.0) * factor)
        x.grad = None
        hvd.grouped_reducescatter([x], op=op)[0].sum().backward()
        assert torch.allclose(x.grad, torch.ones(4, dtype=torch.float64) * factor)

    ranks(rank_function)


def test_one_rank_records_and_another_does_not():
    def rank_function(rank):
        x = torch.ones(3, 2, requires_grad=rank == 0)
        hvd.allreduce(x)
        hvd.grouped_allreduce([x])
        hvd.allgather(x)
        hvd.grouped_allgather([x])
        hvd.broadcast(x, 0)
        hvd.alltoall(x)
        hvd.reducescatter(x)
        hvd.grouped_reducescatter([x])

    ranks(rank_function)


def test_gradcheck_alone():
    def rank_function(rank):
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        assert gradcheck(lambda x: hvd.allreduce(x, postscale_factor=3.0), [x])
        assert gradcheck(lambda x: hvd.reducescatter(x, op=hvd.Sum), [x])
        assert gradcheck(hvd.allgather, [x])
        assert gradcheck(hvd.alltoall, [x])
        assert gradcheck(lambda x: hvd.broadcast(x, 0), [x])

    ranks(rank_function, size=1)
