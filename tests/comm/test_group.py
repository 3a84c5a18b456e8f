"""Groups: forming, leaving, breaking, splitting."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from group_ranks import in_group

from farandole.comm import group as groups
from farandole.comm.control.position import Position
from farandole.comm.engines.base import Reduction
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core import events
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import (
    DeadlineError,
    MismatchError,
    NotInitializedError,
    PeerLost,
    ShutDownError,
    UsageError,
)
from farandole.testing.ranks import process_outcomes, run_processes, run_threads

WAYS = pytest.mark.parametrize("run", [run_threads, run_processes])


@WAYS
def test_ranks_know_their_place_and_generations_count_up(run):
    def on_rank(rank: int) -> None:
        with pytest.raises(NotInitializedError, match=r"use hvd.init\(\)"):
            groups.root()
        for generation in range(3):
            ref = groups.form_root(Settings.from_environment())
            assert groups.form_root(Settings.from_environment()) is ref
            assert groups.root() is ref
            group = ref.current
            assert (group.rank, group.size, group.generation) == (rank, 3, generation)
            assert (group.local_rank, group.local_size) == (rank, 3)
            assert (group.cross_rank, group.cross_size) == (0, 1)
            assert group.broken is None
            assert group.allreduce(torch.tensor(rank), op=Op.SUM).item() == 3
            groups.leave_root()
            groups.leave_root()
            with pytest.raises(NotInitializedError):
                ref.current  # noqa: B018

    run(3, on_rank)


def test_forming_and_closing_are_told(monkeypatch):
    seen: list[object] = []
    stops = [
        events.subscribe(kind, seen.append) for kind in (events.GroupFormed, events.GroupClosed)
    ]

    def on_rank(rank: int) -> list[bytes | None]:
        ref = groups.form_root(Settings())
        assert ref.meeting is not None
        keys = [ref.meeting.store.peek(f"{word}/{rank}") for word in ("init", "formed")]
        groups.leave_root()
        return keys

    assert run_threads(1, on_rank) == [[b"0", b"0"]]
    for stop in stops:
        stop()
    assert seen == [events.GroupFormed(0, 1, 0, "farandole"), events.GroupClosed(0, 0)]


@pytest.mark.parametrize("last", [0, 2])
def test_ranks_leave_in_any_order(last):
    gone = [threading.Event() for _ in range(3)]

    def on_rank(rank: int) -> None:
        group = groups.form_root(Settings()).current
        assert group.allreduce(torch.tensor(1), op=Op.SUM).item() == 3
        place = rank if last == 2 else 2 - rank
        order = [0, 1, 2] if last == 2 else [2, 1, 0]
        if place > 0:
            assert gone[order[place - 1]].wait(30)
        groups.leave_root()
        gone[rank].set()

    run_threads(3, on_rank)


def test_hundreds_of_cycles_are_cheap_and_leave_nothing():
    def on_rank(rank: int) -> float:
        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        groups.form_root(Settings.from_environment()).current.allreduce(torch.ones(1))
        groups.leave_root()
        before, begin = held(), time.perf_counter()
        for _ in range(200):
            groups.form_root(Settings.from_environment())
            groups.leave_root()
        seconds = (time.perf_counter() - begin) / 200
        for _ in range(20):
            groups.form_root(Settings.from_environment()).current.allreduce(torch.ones(1))
            groups.leave_root()
        assert held() == before
        return seconds

    assert max(run_processes(2, on_rank)) < 0.3


def test_leaving_is_not_held_up_by_work_that_nobody_waits_for():
    # Gloo can leave a send for ever whose connection is shut down under it.
    def on_rank(rank: int) -> None:
        for _ in range(60):
            group = groups.form_root(Settings.from_environment()).current
            group.allreduce_async(torch.ones(1 << 20), inplace=True)
            group.allreduce(torch.ones(1))
            groups.leave_root()

    run_processes(2, on_rank)


def test_the_store_does_not_fill_up():
    def on_rank(rank: int) -> int:
        counts = []
        for _ in range(4):
            ref = groups.form_root(Settings.from_environment())
            ref.current.allreduce(torch.ones(1))
            ref.current.barrier()
            assert ref.meeting is not None
            counts.append(len(ref.meeting.store.keys("")))
            ref.current.barrier()
            groups.leave_root()
        return counts[-1] - counts[1]

    assert run_processes(2, on_rank) == [0, 0]


def test_ranks_that_do_not_come_are_named():
    def on_rank(rank: int) -> None:
        if rank == 1:
            return
        with pytest.raises(DeadlineError, match="1") as caught:
            groups.form_root(Settings(start_timeout=1.0))
        assert caught.value.ranks == (1,)
        with pytest.raises(NotInitializedError):
            groups.root()

    run_threads(3, on_rank)


def many(group: Group) -> None:
    for _ in range(100):
        group.allreduce(torch.ones(1 << 16))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_dead_rank_is_named_by_all_others_and_later_calls_say_so_too(victim):
    def check(group: Group) -> float:
        group.allreduce(torch.ones(4))
        meeting = groups.root().meeting
        assert meeting is not None
        meeting.store.set(f"past/{group.rank}", b"1")
        if group.rank == victim:
            for rank in range(3):
                meeting.store.get(f"past/{rank}", Deadline.after(30))
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.perf_counter()
        for _ in range(2):
            with pytest.raises(PeerLost) as caught:
                many(group)
            assert caught.value.ranks == (victim,)
        assert isinstance(group.broken, PeerLost)
        with pytest.raises(PeerLost):
            group.barrier()
        return time.perf_counter() - begin

    outcomes = process_outcomes(3, in_group(check))
    assert outcomes[victim].signal == signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.finished, outcome.describe()
            assert outcome.value is not None
            assert outcome.value < 10


def test_a_rank_that_leaves_while_it_is_needed_is_named():
    def on_rank(rank: int) -> None:
        group = groups.form_root(Settings()).current
        group.barrier()
        if rank == 2:
            groups.leave_root()
            return
        with pytest.raises(PeerLost, match=r"[Rr]ank 2 has[^$]*allreduce \"loss\"") as caught:
            group.allreduce(torch.ones(1), name="loss")
        assert caught.value.ranks == (2,)
        groups.leave_root()

    run_threads(3, on_rank)


@WAYS
def test_other_orders_become_an_error_that_names_ranks_and_calls(run):
    def check(group: Group) -> None:
        if group.rank == 0:
            group.allreduce(torch.ones(1), name="loss")
            group.allgather(torch.ones(1), name="predictions")
        else:
            group.allreduce(torch.ones(1), name="loss")
            group.agree("epoch", b"3", "the end of the epoch")

    def on_rank(rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            in_group(check, deadlock_after=0.5)(rank)
        return caught.value.message

    first, second = run(2, on_rank)
    assert 'allgather "predictions"' in first
    assert "the end of the epoch" in first
    assert first == second


def test_splits_talk_among_themselves():
    def check(group: Group) -> None:
        evens, odds = group.split([2, 0]), group.split([1, 3])
        mine = odds if group.rank % 2 else evens
        other = evens if group.rank % 2 else odds
        assert mine is not None
        assert other is None
        assert mine.members == ((1, 3) if group.rank % 2 else (2, 0))
        assert mine.rank == mine.members.index(group.rank)
        assert mine.local_size == 2
        total = mine.allreduce(torch.tensor(group.rank), op=Op.SUM).item()
        assert total == sum(mine.members)
        assert mine.broadcast(torch.tensor(group.rank), root=0).item() == mine.members[0]
        inner = mine.split([1])
        assert (inner is None) == (mine.rank == 0)
        assert group.allreduce(torch.tensor(1), op=Op.SUM).item() == 4
        mine.close()
        with pytest.raises(ShutDownError):
            mine.barrier()
        assert group.allreduce(torch.tensor(1), op=Op.SUM).item() == 4

    run_threads(4, in_group(check))


def test_splits_must_be_the_same_everywhere():
    def check(group: Group) -> None:
        with pytest.raises(MismatchError, match=r"rank 0: \[0\]; rank 1: \[1\]"):
            group.split([group.rank])
        for wrong in ([], [0, 0], [2]):
            with pytest.raises(UsageError):
                group.split(wrong)
        assert group.allreduce(torch.tensor(1), op=Op.SUM).item() == 2

    run_threads(2, in_group(check))


def test_agreements_of_one_topic_meet_in_order():
    def check(group: Group) -> None:
        for step in range(3):
            said = group.agree("plan", f"{group.rank}/{step}".encode(), "the plan")
            assert said == [f"{rank}/{step}".encode() for rank in range(3)]
        assert group.agree("other", b"x", "another thing") == [b"x"] * 3

    run_threads(3, in_group(check))


def test_engines_are_opened_once_for_each_path():
    def check(group: Group) -> None:
        cpu = torch.device("cpu")
        named, planned = group.engine("named", cpu), group.engine("planned/0", cpu)
        assert named is not planned
        assert group.engine("planned/0", cpu) is planned
        buffer = torch.ones(3)
        work = planned.allreduce(buffer, Reduction.SUM)
        group.wait(work, Position("planned", group.key, 1, "bucket 0"))
        assert buffer.tolist() == [2.0] * 3

    run_threads(2, in_group(check))


def test_torch_distributed_of_the_users_own_works_before_and_after():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def on_rank(rank: int) -> None:
        def theirs() -> None:
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
            )
            check_theirs()

        def check_theirs() -> None:
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0, 2.0]

        theirs()
        group = groups.form_root(Settings.from_environment()).current
        assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 2.0
        check_theirs()
        groups.leave_root()
        check_theirs()
        dist.destroy_process_group()
        group = groups.form_root(Settings.from_environment()).current
        assert not dist.is_initialized()
        assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 2.0
        groups.leave_root()

    run_processes(2, on_rank)
