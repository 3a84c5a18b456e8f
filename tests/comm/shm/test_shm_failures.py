"""What the engine ``shm`` owes when something goes wrong: see ``comm.engines.shm.driver``."""

from __future__ import annotations

import functools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Generator

import pytest
import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.comm.engines.shm import driver
from farandole.comm.engines.shm.engine import ShmEngine
from farandole.core.clock import Deadline
from farandole.core.errors import CollectiveError, FarandoleBug, PeerLost, ShutDownError, StallError
from farandole.testing.ranks import process_outcomes, run_processes, take_seat

LONG = 2_000_003
"""Elements of a tensor that takes many rounds."""


def open_engine(channel: str = "test") -> Engine:
    return registry.opener("shm")(take_seat(channel))


def _in_place(engine: Engine) -> Work:
    return engine.allreduce(engine.buffer(LONG, torch.float32), Reduction.SUM)


COLLECTIVES: dict[str, Callable[[Engine], Work]] = {
    "short": lambda engine: engine.allreduce(torch.ones(10), Reduction.SUM),
    "long": lambda engine: engine.allreduce(torch.ones(LONG), Reduction.SUM),
    "in place": _in_place,
    "reducescatter": lambda engine: engine.reducescatter(
        torch.ones(LONG), torch.ones(3 * LONG), [LONG] * 3, Reduction.SUM
    ),
    "broadcast": lambda engine: engine.broadcast(torch.ones(LONG), 2),
    "alltoall": lambda engine: engine.alltoall(
        torch.ones(3 * LONG), torch.ones(3 * LONG), [LONG] * 3, [LONG] * 3
    ),
}


def lose_a_peer(collective: str, phase: int, before: bool, rank: int) -> float:
    """Rank 2 is killed as its ``phase``-th step begins or ends. Seconds until this rank knew."""
    seat = take_seat()
    engine = registry.opener("shm")(seat)
    engine.barrier().wait()
    if rank == 2:
        step = driver.Driver._step
        steps = 0

        def die_in_step(self: driver.Driver, operation: driver.Operation) -> None:
            nonlocal steps
            steps += 1
            if steps == phase and before:
                die()
            step(self, operation)
            if steps == phase:
                die()

        def die() -> None:
            seat.store.set("died", repr(time.monotonic()).encode())
            os.kill(os.getpid(), signal.SIGKILL)

        driver.Driver._step = die_in_step  # type: ignore[method-assign]
        COLLECTIVES[collective](engine).wait()
        die()  # it had fewer steps
    with pytest.raises(PeerLost, match=r"rank 2 died|rank \d left"):  # noqa: PT012 - either may
        COLLECTIVES[collective](engine).wait(20.0)
        engine.barrier().wait(20.0)
    known = time.monotonic()
    with pytest.raises(PeerLost):
        engine.barrier()
    engine.close()
    return known - float(seat.store.get("died", seat.deadline))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_peer_killed_in_any_phase_is_lost_at_once(collective: str) -> None:
    seconds = []
    for phase in (1, 2, 3, 6):
        for before in (True, False):
            lose = functools.partial(lose_a_peer, collective, phase, before)
            *survivors, dead = process_outcomes(3, lose)
            assert dead.signal == signal.SIGKILL
            for outcome in survivors:
                assert outcome.finished, outcome.describe()
                assert outcome.value is not None
                seconds.append(outcome.value)
    assert statistics.median(seconds) < 0.1, seconds
    assert max(seconds) < 2.0, seconds  # a loaded machine may run nobody for a while


def test_an_abort_reaches_all_who_wait_at_once() -> None:
    def be(rank: int) -> float:
        seat = take_seat()
        engine = registry.opener("shm")(seat)
        engine.barrier().wait()
        if rank == 3:
            for each in range(3):
                seat.store.get(f"waits/{each}", seat.deadline)
            seat.store.set("aborted", repr(time.monotonic()).encode())
            engine.abort(StallError("enough"))
            return 0.0
        work = engine.allreduce(torch.ones(LONG), Reduction.SUM)
        assert not work.wait(0.01)
        seat.store.set(f"waits/{rank}", b"")
        with pytest.raises(PeerLost, match=r"rank 3 left it \(StallError: enough\)"):
            work.wait()
        seconds = time.monotonic() - float(seat.store.get("aborted", seat.deadline))
        engine.close()
        return seconds

    *seconds, _ = run_processes(4, be)
    assert statistics.median(seconds) < 0.1, seconds


def test_who_completed_what_others_have_yet_to_read_may_leave() -> None:
    """A rank that closes after its last operation costs nobody that operation."""

    def be(rank: int) -> None:
        for attempt in range(30):
            engine = open_engine(f"channel/{attempt}")
            buffer = torch.ones(1000)
            engine.allreduce(buffer, Reduction.SUM).wait()
            assert buffer[0].item() == 3.0
            engine.close()

    run_processes(3, be)


def test_waiting_can_be_interrupted_and_taken_up_again() -> None:
    def be(rank: int) -> str:
        seat = take_seat()
        engine = registry.opener("shm")(seat)
        if rank == 1:
            seat.store.get("interrupted", seat.deadline)
            buffer = torch.ones(LONG)
            engine.allreduce(buffer, Reduction.SUM).wait()
            assert bool((buffer == 2.0).all())
            engine.barrier().wait()
            engine.close()
            return ""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        buffer = torch.ones(LONG)
        work = engine.allreduce(buffer, Reduction.SUM)
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
        assert not work.done()
        seat.store.set("interrupted", b"")
        work.wait()
        assert bool((buffer == 2.0).all())
        engine.barrier().wait()
        engine.close()
        return "interrupted"

    assert run_processes(2, be) == ["interrupted", ""]


def test_an_interrupt_amid_a_step_breaks_the_channel_and_says_so() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        if rank == 1:
            with pytest.raises(PeerLost, match="broken off half way by KeyboardInterrupt"):
                engine.allreduce(torch.ones(10), Reduction.SUM).wait()
            engine.close()
            return

        def steps() -> Generator[None, None, None]:
            raise KeyboardInterrupt
            yield

        assert isinstance(engine, ShmEngine)
        with pytest.raises(KeyboardInterrupt):
            engine._driver.begin(steps())
        with pytest.raises(CollectiveError, match="KeyboardInterrupt"):
            engine.barrier()
        engine.close()

    run_processes(2, be)


def test_what_torch_refuses_is_our_bug() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        with pytest.raises(FarandoleBug, match="report"):
            engine.alltoall(torch.ones(2), torch.ones(2), [1, 1, 1], [1, 1, 1]).wait()
        engine.close()

    run_processes(2, be)


def test_a_forked_child_is_told_that_collectives_are_the_ranks() -> None:
    def be(rank: int) -> int:
        engine = open_engine()
        engine.barrier().wait()
        pending = engine.allreduce(torch.ones(LONG), Reduction.SUM)
        child = os.fork()
        if child == 0:
            try:
                engine.barrier()
            except ShutDownError as error:
                os._exit(7 if f"forked from rank {rank}" in error.message else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        pending.wait()
        engine.barrier().wait()
        engine.close()
        return os.waitstatus_to_exitcode(status)

    assert run_processes(2, be) == [7, 7]


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    def be(rank: int) -> str:
        engine = open_engine()
        work = engine.allreduce(torch.ones(1000), Reduction.SUM) if rank == 0 else None
        if work is None:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        assert work is not None
        with pytest.raises(PeerLost):
            work.wait(20.0)
        return "noticed"

    alive, dead = process_outcomes(2, be, timeout=30.0)
    assert alive.value == "noticed", alive.describe()
    assert dead.signal == signal.SIGKILL


def test_what_nobody_waits_for_proceeds() -> None:
    """A rank that begins and goes on with something else keeps nobody waiting."""

    def be(rank: int) -> None:
        seat = take_seat()
        engine = registry.opener("shm")(seat)
        buffers = [torch.full((LONG,), float(rank)) for _ in range(3)]
        works = [engine.allreduce(buffer, Reduction.SUM) for buffer in buffers]
        if rank == 0:
            seat.store.get("done", seat.deadline)
            assert all(work.wait(5.0) for work in works)
        else:
            assert all(work.wait(20.0) for work in works)
            seat.store.set("done", b"")
        assert all(bool((buffer == 1.0).all()) for buffer in buffers)
        engine.barrier().wait()
        engine.close()

    run_processes(2, be)


def test_waiting_takes_little_of_the_processor() -> None:
    def be(rank: int) -> float:
        seat = take_seat()
        engine = registry.opener("shm")(seat)
        engine.barrier().wait()
        if rank == 1:
            seat.store.get("waited", seat.deadline)
            engine.barrier().wait()
            engine.close()
            return 0.0
        work = engine.barrier()
        before = time.process_time()
        assert not work.wait(1.0)
        used = time.process_time() - before
        seat.store.set("waited", b"")
        work.wait()
        engine.close()
        return used

    used, _ = run_processes(2, be)
    assert used < 0.1


def test_several_threads_wait_at_once() -> None:
    def be(rank: int) -> int:
        engine = open_engine()
        buffers = [torch.full((50_000,), float(index)) for index in range(20)]
        works = [engine.allreduce(buffer, Reduction.SUM) for buffer in buffers]
        done: list[int] = []

        def wait(index: int) -> None:
            if works[index].wait(20.0) and bool((buffers[index] == 2.0 * index).all()):
                done.append(index)

        threads = [threading.Thread(target=wait, args=(index,)) for index in reversed(range(20))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.barrier().wait()
        engine.close()
        return len(done)

    assert run_processes(2, be) == [20, 20]


def test_what_moves_nothing_is_done_though_others_have_left() -> None:
    """A rank leaves when all that it took part in is done, and others may be behind."""

    def be(rank: int) -> None:
        seat = take_seat()
        engine = registry.opener("shm")(seat)
        if rank == 1:
            engine.close()
            seat.store.set("left", b"")
            return
        seat.store.get("left", Deadline.after(10))
        nothing = torch.ones(0)
        engine.allreduce(nothing, Reduction.SUM).wait()
        engine.reducescatter(nothing, nothing, [0, 0], Reduction.SUM).wait()
        with pytest.raises(PeerLost):
            engine.allreduce(torch.ones(1), Reduction.SUM).wait()
        engine.close()

    run_processes(2, be)
