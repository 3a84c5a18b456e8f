"""The named path: any order, handles, mismatches, and errors that reach whoever waits."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from random import Random
from typing import Any

import pytest
import torch
from group_ranks import in_group

from farandole.comm import group as groups
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core import events
from farandole.core.config import Settings
from farandole.core.errors import MismatchError, ShutDownError, UsageError
from farandole.testing.ranks import run_processes, run_threads

WAYS = pytest.mark.parametrize("run", [run_threads, run_processes])


@WAYS
def test_many_handles_in_flight_are_waited_for_in_any_order(run):
    def check(group: Group) -> None:
        handles = [
            group.allreduce_async(torch.full((i % 7 + 1,), float(i)), op=Op.SUM, name=f"t{i}")
            for i in range(60)
        ]
        order = sorted(range(60), key=lambda i: (i * 17 + group.rank * 5) % 61)
        for i in order:
            assert handles[i].wait().tolist() == [2.0 * i] * (i % 7 + 1)
            assert handles[i].done()
            assert handles[i].wait() is handles[i].wait()

    run(2, in_group(check))


@WAYS
def test_threads_of_the_users_wait_for_handles_that_another_submitted(run):
    def check(group: Group) -> None:
        handles = [group.allgather_async(torch.tensor([group.rank, i])) for i in range(8)]
        got: dict[int, list[int]] = {}
        threads = [
            threading.Thread(
                target=lambda i=i, handle=handle: got.update({i: handle.wait().tolist()})
            )
            for i, handle in enumerate(handles)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {i: [0, i, 1, i] for i in range(8)}

    run(2, in_group(check))


MISMATCHES = {
    "Mismatched data types": lambda g, r: g.allreduce(
        torch.ones(2).double() if r else torch.ones(2)
    ),
    "Mismatched ALLREDUCE tensor shapes": lambda g, r: g.allreduce(torch.ones(2 + r), name="x"),
    "Mismatched ALLGATHER tensor shapes": lambda g, r: g.allgather(torch.ones(2, 2 + r)),
    "Mismatched operations": lambda g, r: g.barrier() if r else g.allreduce(torch.ones(1)),
    "Mismatched reduction operation": lambda g, r: g.allreduce(torch.ones(2), op=Op(1 + 2 * r)),
    "Mismatched prescale": lambda g, r: g.allreduce(torch.ones(2), prescale=1.0 + r),
    "Mismatched broadcast root ranks": lambda g, r: g.broadcast(torch.ones(2), root=r),
    "Mismatched number of tensors": lambda g, r: g.grouped_allreduce([torch.ones(2)] * (1 + r)),
    "Mismatched ALLREDUCE tensor sh": lambda g, r: g.grouped_allreduce(
        [torch.ones(2), torch.ones(3 + r)], name="several"
    ),
}


@WAYS
def test_a_mismatch_is_one_error_on_all_ranks_and_the_group_goes_on(run):
    def check(group: Group) -> list[str]:
        texts = []
        for stem, call in MISMATCHES.items():
            with pytest.raises(MismatchError, match=stem) as caught:
                call(group, group.rank)
            texts.append(caught.value.message)
            assert caught.value.ranks == (0, 1)
            assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 2.0
        assert group.broken is None
        return texts

    first, second = run(2, in_group(check))
    assert first == second


def test_a_mismatch_changes_nothing_and_spoils_no_other_handle():
    def check(group: Group) -> None:
        kept = torch.ones(3)
        before = group.allreduce_async(torch.ones(2), op=Op.SUM)
        wrong = group.allreduce_async(
            kept, op=Op.SUM, prescale=5.0, postscale=1.0 + group.rank, inplace=True
        )
        after = group.allreduce_async(torch.ones(4), op=Op.SUM)
        assert after.wait().tolist() == [2.0] * 4
        for _ in range(2):
            with pytest.raises(MismatchError, match="postscale"):
                wrong.wait()
        assert before.wait().tolist() == [2.0] * 2
        assert kept.tolist() == [1.0] * 3

    run_threads(2, in_group(check))


def test_grouped_collectives_exchange_one_header_and_fuse_by_dtype():
    def check(group: Group) -> None:
        seen: list[Any] = []
        stop = events.subscribe(events.CollectiveFinished, seen.append)
        try:
            tensors = [torch.ones(3), torch.ones(4, dtype=torch.int16), torch.ones(5)]
            group.grouped_allreduce(tensors, op=Op.SUM, name="several")
        finally:
            stop()
        (event,) = [each for each in seen if each.name == "several"]
        assert event.operation == "allreduce"
        assert event.path == "named"
        assert event.ranks == 1
        assert event.bytes == 8 * 4 + 4 * 4  # int16 travels as int32
        assert event.seconds > 0

    run_threads(1, in_group(check))


def test_waits_are_told_to_whoever_listens():
    seen: list[events.WaitFinished] = []

    def check(group: Group) -> None:
        stop = events.subscribe(events.WaitFinished, seen.append)
        group.allreduce(torch.ones(1))
        stop()

    run_threads(1, in_group(check))
    assert [event.path for event in seen] == ["named"]
    assert seen[0].seconds >= 0


def test_a_handle_outlives_shutdown_with_a_clear_error():
    rank_1_has_left = threading.Event()

    def check(rank: int) -> None:
        group = groups.form_root(Settings()).current
        finished = group.allreduce_async(torch.ones(1), op=Op.SUM)
        finished.wait()
        group.barrier()
        alone = group.allreduce_async(torch.ones(1)) if rank else None
        assert rank or rank_1_has_left.wait(30)
        groups.leave_root()
        rank_1_has_left.set()
        assert finished.wait().item() == 2.0
        if alone is not None:
            with pytest.raises(ShutDownError, match="shut down"):
                alone.wait()
            assert alone.done()
        with pytest.raises(ShutDownError):
            group.allreduce(torch.ones(1))

    run_threads(2, check)


def test_poll_finishes_what_is_there():
    def check(group: Group) -> None:
        tensor = torch.ones(2)
        handle = group.allreduce_async(tensor, inplace=True, op=Op.AVERAGE, postscale=3.0)
        group.barrier()
        deadline = threading.Event()
        for _ in range(1000):
            if handle.done():
                break
            deadline.wait(0.01)
        assert tensor.tolist() == [3.0, 3.0]

    run_threads(2, in_group(check))


def test_a_forked_child_is_told_that_it_is_no_rank():
    def check(group: Group) -> None:
        group.allreduce(torch.ones(1))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                group.allreduce(torch.ones(1))
            except UsageError as error:
                os.write(writing, error.message.encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert b"forked" in os.read(reading, 10_000)
        os.close(reading)
        assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 2.0

    run_processes(2, in_group(check))


def test_slow_collectives_waited_for_in_different_orders_are_no_deadlock():
    def check(group: Group) -> None:
        tensors = [torch.full((1 << 23,), float(i)) for i in range(4)]
        for _ in range(2):
            handles = [group.allreduce_async(each, op=Op.SUM) for each in tensors]
            order = [3, 1, 0, 2] if group.rank else [0, 1, 2, 3]
            for i in order:
                assert handles[i].wait()[-1] == 2.0 * i

    run_processes(2, in_group(check, deadlock_after=0.02, block_notice=0.005))


def test_a_result_belongs_to_the_caller_alone():
    def check(group: Group) -> None:
        handle = group.allgather_async(torch.ones(1000))
        result = weakref.ref(handle.wait())
        assert result() is not None
        del handle
        gc.collect()
        assert result() is None

    run_threads(2, in_group(check))


def test_a_handle_that_nobody_keeps_does_its_work_all_the_same():
    def check(group: Group) -> None:
        tensor = torch.full((1 << 20,), 1.0 + group.rank)
        group.allreduce_async(tensor, op=Op.SUM, inplace=True)
        assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 2.0
        group.barrier()

    run_processes(2, in_group(check))


@WAYS
def test_ranks_that_dawdle_differently_agree_all_the_same(run):
    def check(group: Group) -> None:
        random, pause = Random(group.rank), threading.Event()
        handles = []
        for i in range(40):
            pause.wait(random.random() * 0.004)
            handles.append(group.allreduce_async(torch.tensor([i, group.rank]), op=Op.SUM))
            if random.random() < 0.3:
                j = random.randrange(len(handles))
                assert handles[j].wait().tolist() == [3 * j, 3]
        for j, handle in enumerate(handles):
            assert handle.wait().tolist() == [3 * j, 3]

    run(3, in_group(check))
