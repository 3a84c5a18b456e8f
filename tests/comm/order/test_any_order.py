"""Ranks submit named tensors in any order, with mistakes in between."""

from __future__ import annotations

import threading
from random import Random

import pytest
import torch
from group_ranks import in_group

from farandole.comm.engines.base import Reduction, Work
from farandole.comm.engines.threads import ThreadsEngine
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core import events
from farandole.core.errors import MismatchError, StallError, UsageError
from farandole.testing.ranks import run_processes, run_threads

WAYS = pytest.mark.parametrize("run", [run_threads, run_processes])


def shuffled_rounds(rounds: int, names: int, seed: int):
    """Each rank submits all names in its own order; in some rounds one rank gets one wrong."""

    def check(group: Group) -> list[str]:
        shared, own = Random(seed), Random(seed * 1000 + group.rank)
        texts = []
        for number in range(rounds):
            wrong = shared.randrange(names) if shared.random() < 0.3 else -1
            culprit = shared.randrange(group.size)
            sizes = [shared.randrange(1, 50) for _ in range(names)]
            handles = {}
            for i in own.sample(range(names), names):
                odd = 1 if i == wrong and group.rank == culprit else 0
                tensor = torch.full((sizes[i] + odd,), float(group.rank + i + number))
                handles[i] = group.allreduce_async(tensor, op=Op.SUM, name=f"t{i}")
            ranks = sum(range(group.size))
            for i in own.sample(range(names), names):
                if i == wrong:
                    with pytest.raises(MismatchError, match="ALLREDUCE tensor shapes") as caught:
                        handles[i].wait()
                    texts.append(caught.value.message)
                else:
                    total = ranks + group.size * (i + number)
                    assert handles[i].wait().tolist() == [float(total)] * sizes[i]
        return texts

    return check


def test_a_hundred_names_in_random_orders_on_four_threads():
    texts = run_threads(4, in_group(shuffled_rounds(20, 100, seed=1)), timeout=120)
    assert texts[0]
    assert all(each == texts[0] for each in texts)


def test_names_in_random_orders_on_processes():
    texts = run_processes(3, in_group(shuffled_rounds(12, 40, seed=2)), timeout=120)
    assert all(each == texts[0] for each in texts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@WAYS
def test_a_thousand_rounds_of_a_hundred_names_on_four_ranks(run):
    texts = run(4, in_group(shuffled_rounds(1000, 100, seed=3)), timeout=1700)
    assert all(each == texts[0] for each in texts)


@WAYS
def test_all_kinds_of_collectives_in_opposite_orders(run):
    def check(group: Group) -> None:
        rank, size = group.rank, group.size
        calls = [
            lambda: group.allreduce_async(torch.ones(2), op=Op.SUM, name="x"),
            lambda: group.allgather_async(torch.full((rank + 1,), rank), name="x"),
            lambda: group.broadcast_async(torch.full((2,), rank), root=1, name="x"),
            lambda: group.alltoall_async(torch.arange(size), name="x"),
            lambda: group.reducescatter_async(torch.ones(size), op=Op.SUM, name="x"),
            lambda: group.grouped_allreduce_async([torch.ones(1)] * 3, op=Op.SUM, name="x"),
        ]
        for _ in range(3):
            places = list(range(len(calls)))
            handles = {i: calls[i]() for i in (places if rank else reversed(places))}
            assert handles[0].wait().tolist() == [float(size)] * 2
            assert handles[1].wait().tolist() == [r for r in range(size) for _ in range(r + 1)]
            assert handles[2].wait().tolist() == [1, 1]
            assert handles[3].wait()[0].tolist() == [rank] * size
            assert handles[4].wait().tolist() == [float(size)]
            assert [each.item() for each in handles[5].wait()] == [float(size)] * 3

    run(3, in_group(check))


def test_a_name_in_use_is_refused_until_its_collective_has_begun():
    both = threading.Barrier(2)

    def check(group: Group) -> None:
        if group.rank == 0:
            first = group.allreduce_async(torch.ones(1), op=Op.SUM, name="twice")
            for _ in range(3):
                with pytest.raises(UsageError, match="same name as another tensor that is curr"):
                    group.allreduce_async(torch.ones(1), op=Op.SUM, name="twice")
            group.allgather_async(torch.ones(1), name="twice")
            both.wait(30)
        else:
            both.wait(30)
            first = group.allreduce_async(torch.ones(1), op=Op.SUM, name="twice")
            group.allgather_async(torch.ones(1), name="twice")
        assert first.wait().item() == 2.0
        assert group.allreduce(torch.ones(1), op=Op.SUM, name="twice").item() == 2.0

    run_threads(2, in_group(check))


def test_a_name_stays_in_use_until_its_data_has_moved(monkeypatch):
    left, let_go = threading.Event(), threading.Event()
    allreduce = ThreadsEngine.allreduce

    def gated(engine: ThreadsEngine, buffer: torch.Tensor, reduction: Reduction) -> Work:
        if engine.seat.rank == 1:
            assert let_go.wait(30)
        work = allreduce(engine, buffer, reduction)
        left.set()
        return work

    monkeypatch.setattr(ThreadsEngine, "allreduce", gated)

    def check(group: Group) -> None:
        first = group.allreduce_async(torch.ones(1), op=Op.SUM, name="twice")
        if group.rank == 0:
            assert left.wait(30)
            with pytest.raises(UsageError, match="same name as another tensor that is curr"):
                group.allreduce_async(torch.ones(1), op=Op.SUM, name="twice")
            let_go.set()
        assert first.wait().item() == 2.0
        assert group.allreduce(torch.ones(1), op=Op.SUM, name="twice").item() == 2.0

    run_threads(2, in_group(check))


def test_unnamed_ones_meet_by_their_number_whatever_named_ones_come_between():
    def check(group: Group) -> None:
        named = [] if group.rank else [group.allreduce_async(torch.ones(1), name="early")]
        values = [group.allreduce(torch.tensor(float(i)), op=Op.SUM).item() for i in range(5)]
        assert values == [0.0, 2.0, 4.0, 6.0, 8.0]
        if group.rank:
            named.append(group.allreduce_async(torch.ones(1), name="early"))
        assert named[0].wait().item() == 1.0

    run_threads(2, in_group(check))


@WAYS
def test_different_names_that_can_never_meet_name_ranks_and_tensors(run):
    def on_rank(rank: int) -> str:
        def check(group: Group) -> None:
            group.allreduce(torch.ones(1), name=f"mine{group.rank}")

        with pytest.raises(MismatchError) as caught:
            in_group(check, deadlock_after=0.5)(rank)
        return caught.value.message

    first, second = run(2, on_rank)
    assert first == second
    assert 'rank 0: allreduce "mine0"' in first
    assert 'rank 1: allreduce "mine1"' in first


@WAYS
def test_a_tensor_that_some_ranks_never_submit_ends_as_a_stall(run):
    def on_rank(rank: int) -> str:
        def check(group: Group) -> None:
            if group.rank == 2:
                group.allreduce_async(torch.ones(1), name="other")
                pause = threading.Event()
                while group.broken is None:
                    pause.wait(0.05)
            group.allreduce(torch.ones(1), name="loss")

        with pytest.raises(StallError) as caught:
            in_group(check, stall_timeout=1.0)(rank)
        assert caught.value.ranks == (2,)
        return caught.value.message

    texts = run(3, on_rank)
    assert texts[0] == texts[1] == texts[2]
    assert "rank 2, which did not arrive" in texts[0]
    assert 'ranks 0-1: allreduce "loss"' in texts[0]


def test_a_rank_that_is_alone_tells_of_its_rounds_too():
    def check(group: Group) -> None:
        told: list[events.CycleStarted] = []
        stop = events.subscribe(events.CycleStarted, told.append)
        try:
            for _ in range(3):
                assert group.allreduce(torch.ones(1), op=Op.SUM, name="x").item() == 1.0
        finally:
            stop()
        assert [each.group for each in told] == [group.key] * 3

    run_threads(1, in_group(check))
