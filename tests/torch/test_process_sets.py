"""Collectives and optimizers among some of the ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_ranks import fill

import farandole.torch as hvd
from farandole.core.errors import NotInitializedError, UsageError
from farandole.testing.ranks import run_processes, run_threads


def ranks(function, size=4, run=run_threads):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.barrier()  # rank 0 is needed until the others are done, in whatever set they are
        hvd.shutdown()
        return result

    return run(size, rank_function)


def halves():
    """The set of the even ranks, that of the odd ones, and the one that this rank is in."""
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    odd = hvd.add_process_set(hvd.ProcessSet(range(1, hvd.size(), 2)))
    return even, odd, odd if hvd.rank() % 2 else even


def test_what_a_set_says():
    def rank_function(rank):
        unregistered = hvd.ProcessSet([2, 0])
        assert unregistered.ranks == [0, 2]
        assert unregistered.process_set_id is None
        assert unregistered.size() is unregistered.rank() is unregistered.included() is None
        assert hvd.global_process_set.process_set_id == 0
        assert hvd.global_process_set.ranks == [0, 1, 2, 3]
        assert hvd.global_process_set.size() == 4
        assert hvd.global_process_set.rank() == rank
        assert hvd.global_process_set.included()

        even, odd, mine = halves()
        assert (even.process_set_id, odd.process_set_id) == (1, 2)
        assert mine.ranks == [rank % 2, rank % 2 + 2]
        assert mine.size() == 2
        assert mine.rank() == rank // 2
        assert mine.included()
        other = even if mine is odd else odd
        assert not other.included()
        assert other.size() == 2
        with pytest.raises(ValueError, match="does not belong to ProcessSet"):
            other.rank()

        assert hvd.remove_process_set(odd)
        assert not hvd.remove_process_set(odd)
        assert odd.process_set_id is None
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert hvd.add_process_set(odd).process_set_id == 3
        return mine

    kept = ranks(rank_function)[0]
    assert kept.process_set_id is None
    assert hvd.global_process_set.size() is None
    with pytest.raises(NotInitializedError):
        hvd.add_process_set([0])


def test_collectives():
    def rank_function(rank):
        _, _, mine = halves()
        members = mine.ranks
        ones = torch.full((4, 2), float(rank))
        total = float(sum(members))
        options = {"process_set": mine}
        assert hvd.allreduce(ones, op=hvd.Sum, **options).unique().tolist() == [total]
        assert hvd.allreduce(ones, **options).unique().tolist() == [total / 2]
        assert hvd.allreduce_(ones.clone(), op=hvd.Max, **options).unique().tolist() == [members[1]]
        grouped = hvd.grouped_allreduce([ones, ones], op=hvd.Sum, name="pair", **options)
        assert [each.unique().tolist() for each in grouped] == [[total]] * 2
        assert hvd.allgather(ones, name="rows", **options)[:, 0].tolist() == [
            float(member) for member in members for _ in range(4)
        ]
        for root in members:
            assert hvd.broadcast(ones, root, **options).unique().tolist() == [root]
            handle = hvd.broadcast_async_(ones.clone(), root, **options)
            assert hvd.synchronize(handle).unique().tolist() == [root]
        _, counts = hvd.alltoall(ones, splits=[1, 3], **options)
        assert counts.tolist() == [[1, 1], [3, 3]][mine.rank()]
        assert hvd.reducescatter(ones, op=hvd.Sum, **options).shape == (2, 2)
        hvd.barrier(mine)
        assert hvd.broadcast_object({"root": rank}, members[1], process_set=mine) == {
            "root": members[1]
        }
        assert hvd.allgather_object(rank, process_set=mine) == members
        outsider = (members[0] + 1) % 4
        with pytest.raises(UsageError, match="received invalid root rank"):
            hvd.broadcast(ones, outsider, **options)

    ranks(rank_function)


def test_gradients_of_collectives():
    def rank_function(rank):
        _, _, mine = halves()
        leaf = torch.ones(2, 3, requires_grad=True)
        hvd.allreduce(leaf, op=hvd.Sum, process_set=mine).sum().backward()
        assert leaf.grad.unique().tolist() == [2.0]
        leaf = torch.ones(2, 3, requires_grad=True)
        hvd.broadcast(leaf, mine.ranks[1], process_set=mine).sum().backward()
        assert leaf.grad.unique().tolist() == [float(mine.rank())]

    ranks(rank_function)


def test_refusals():
    def rank_function(rank):
        even, odd, mine = halves()
        other = even if mine is odd else odd
        with pytest.raises(UsageError, match="does not belong to"):
            hvd.allreduce(torch.ones(2), process_set=other)
        with pytest.raises(UsageError, match="is not registered"):
            hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([rank]))
        with pytest.raises(UsageError, match="is registered already"):
            hvd.add_process_set(even)
        with pytest.raises(ValueError):  # noqa: PT011 - whose text is comm's
            hvd.add_process_set([0, 2])
        with pytest.raises(ValueError):  # noqa: PT011
            hvd.add_process_set([rank])
        with pytest.raises(UsageError, match="each rank once"):
            hvd.ProcessSet([0, 0])
        with pytest.raises(UsageError, match="uses no MPI communicators"):
            hvd.ProcessSet(object())
        assert hvd.allreduce(torch.ones(1)).item() == 1.0

    ranks(rank_function)


def test_given_to_init_and_gone_after_shutdown():
    def rank_function(rank):
        first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
        hvd.init(process_sets=[first, second])
        hvd.init(process_sets=[first])  # repeated: does nothing
        assert (first.process_set_id, second.process_set_id) == (1, 2)
        hvd.shutdown()
        assert first.process_set_id is None
        hvd.init(process_sets="dynamic")
        third = hvd.add_process_set([0, 2])
        assert third.process_set_id == 1
        if rank == 0:
            with pytest.raises(UsageError, match="not registered"):
                first.rank() or hvd.barrier(first)
        hvd.barrier()
        hvd.shutdown()
        with pytest.raises(ValueError):  # noqa: PT011 - whose text is comm's
            hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])])
        assert not hvd.is_initialized()
        with pytest.raises(UsageError, match="no MPI communicators"):
            hvd.init(comm=[0])
        with pytest.raises(UsageError, match=r"must hold hvd\.ProcessSet"):
            hvd.init(process_sets=[[0, 1]])
        hvd.init(comm=[0, 1, 2])
        hvd.shutdown()

    run_threads(3, rank_function)


def test_an_optimizer_on_a_set():
    """The even ranks share gradients; the odd ones, each for itself, do not."""

    def rank_function(rank):
        even, _, _ = halves()
        model = fill(nn.Linear(3, 2), seed=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), process_set=even
        )
        copied = copy.deepcopy(optimizer)
        assert len(copied.param_groups) == 1
        everybody = fill(nn.Linear(2, 1), seed=1)
        whole = hvd.DistributedOptimizer(torch.optim.SGD(everybody.parameters(), lr=0.1))
        for step in range(4):
            x = torch.full((2, 3), float(rank**2 + step))
            everybody(model(x)).sum().backward()
            optimizer.step()
            whole.step()
            optimizer.zero_grad()
            whole.zero_grad()
        return model.weight.detach(), everybody.weight.detach()

    results = ranks(rank_function)
    own, common = zip(*results, strict=True)
    assert all(torch.equal(each, common[0]) for each in common)
    assert torch.equal(own[0], own[2])
    assert not torch.allclose(own[1], own[3])
    assert not torch.allclose(own[0], own[1])


@pytest.mark.slow
def test_between_processes():
    def rank_function(rank):
        _, _, mine = halves()
        model = fill(nn.Linear(3, 2), seed=rank)
        hvd.broadcast_parameters(model.state_dict(), mine.ranks[0], process_set=mine)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), process_set=mine
        )
        for step in range(4):
            model(torch.full((2, 3), float(rank + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gathered = hvd.allgather(model.weight.detach().reshape(1, -1), process_set=mine)
        everybody = hvd.allgather(model.weight.detach().reshape(1, -1))
        return gathered, everybody

    for gathered, everybody in ranks(rank_function, run=run_processes):
        assert torch.equal(gathered[0], gathered[1])
        assert not torch.allclose(everybody[0], everybody[1])
