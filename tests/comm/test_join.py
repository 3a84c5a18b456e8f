"""Join: ranks that have done their part feed zeros until all have."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from group_ranks import in_group

from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import MismatchError, PeerLost, UsageError
from farandole.testing.ranks import run_processes, run_threads

WAYS = pytest.mark.parametrize("run", [run_threads, run_processes])


@WAYS
def test_ranks_with_uneven_rounds_end_together_and_know_who_was_last(run):
    rounds = [2, 5, 3]

    def check(group: Group) -> None:
        mine = rounds[group.rank]
        for again in range(2):
            for number in range(mine):
                there = sum(each > number for each in rounds)
                total = group.allreduce(torch.ones(3), op=Op.SUM, name="known").tolist()
                assert total == [float(there)] * 3
                mean = group.allreduce(torch.ones(2), name=f"other{again}.{number}").tolist()
                assert mean == pytest.approx([there / 3] * 2)
                group.allreduce(torch.ones(1))
            assert group.join() == 1
        assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 3.0
        group.barrier()

    run(3, in_group(check))


def test_zeros_take_part_in_every_reduction():
    def check(group: Group) -> None:
        if group.rank == 0:
            values = torch.tensor([3.0, -2.0])
            assert group.allreduce(values, op=Op.MIN, name="min").tolist() == [0.0, -2.0]
            assert group.allreduce(values, op=Op.MAX, name="max").tolist() == [3.0, 0.0]
            assert group.allreduce(values, op=Op.PRODUCT, name="mul").tolist() == [0.0, 0.0]
            pair = [torch.ones(2, dtype=torch.int16), torch.ones(1, dtype=torch.bfloat16)]
            both = group.grouped_allreduce(pair, op=Op.SUM, prescale=2.0, name="pair")
            assert [each.tolist() for each in both] == [[2, 2], [2.0]]
        assert group.join() == 0

    run_threads(2, in_group(lambda group: (group.barrier(), check(group))))


def test_averages_can_be_over_those_who_take_part():
    def check(group: Group) -> None:
        group.barrier()
        if group.rank != 1:
            for _ in range(2):
                mean = group.allreduce(torch.full((2,), 4.0 + 2 * group.rank), name="mean")
                assert mean.tolist() == [6.0, 6.0]
        group.join()
        mean = group.allreduce(torch.full((2,), float(group.rank)), name="mean")
        assert mean.tolist() == [1.0, 1.0]

    run_threads(3, in_group(check, join_average="participants"))


@WAYS
def test_other_collectives_are_refused_while_somebody_has_joined(run):
    def check(group: Group) -> list[str]:
        texts = []
        if group.rank:
            calls = {
                "Allgather": lambda: group.allgather(torch.ones(1)),
                "Broadcast": lambda: group.broadcast(torch.ones(1), root=1),
                "Alltoall": lambda: group.alltoall(torch.ones(3)),
                "Reducescatter": lambda: group.reducescatter(torch.ones(3)),
                "Barrier": group.barrier,
            }
            for what, call in calls.items():
                with pytest.raises(
                    MismatchError, match=f"^{what} is not supported with Join at this time"
                ) as caught:
                    call()
                texts.append(caught.value.message)
            assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 2.0
        group.join()
        group.barrier()
        return texts

    _, first, second = run(3, in_group(check))
    assert first == second


def test_process_sets_get_zeros_too():
    def check(group: Group) -> None:
        part = group.set_group(group.add_set([0, 1]))
        if group.rank == 0:
            assert part is not None
            assert part.allreduce(torch.ones(1), op=Op.SUM, name="x").item() == 1.0
        group.join()

    run_threads(3, in_group(check))


def test_joining_twice_at_a_time_is_refused():
    def check(group: Group) -> None:
        if group.rank == 0:
            ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()

            def join() -> None:
                try:
                    ended.put(group.join())
                except UsageError:
                    ended.put(None)

            threads = [threading.Thread(target=join) for _ in range(2)]
            for thread in threads:
                thread.start()
            assert ended.get(timeout=30) is None
            group.control.allgather("go", b"", [0, 1])
            assert ended.get(timeout=30) == 1
            for thread in threads:
                thread.join()
        else:
            group.control.allgather("go", b"", [0, 1])
            assert group.join() == 1

    run_threads(2, in_group(check))


def test_one_rank_alone_joins_at_once():
    assert run_threads(1, in_group(lambda group: group.join())) == [0]


def test_a_rank_that_leaves_instead_of_joining_is_named():
    def on_rank(rank: int) -> None:
        def check(group: Group) -> None:
            group.barrier()
            if group.rank == 0:
                with pytest.raises(PeerLost, match="join") as caught:
                    group.join()
                assert caught.value.ranks == (1,)

        in_group(check)(rank)

    run_threads(2, on_rank)


@WAYS
def test_a_rank_that_waits_for_something_else_is_named(run):
    def on_rank(rank: int) -> None:
        def check(group: Group) -> None:
            if group.rank == 0:
                group.join()
            else:
                group.agree("epoch", b"3", "the end of the epoch")

        with pytest.raises(MismatchError, match=r"rank 0: join[^$]*the end of the epoch"):
            in_group(check, deadlock_after=0.5)(rank)

    run(2, on_rank)
