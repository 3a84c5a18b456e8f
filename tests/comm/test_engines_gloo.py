"""What Gloo leaves to the engine: see the docstring of ``comm.engines.gloo``."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from farandole.comm.c10d_store import C10dStore
from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Reduction
from farandole.core.clock import Deadline
from farandole.core.errors import (
    DeadlineError,
    FarandoleBug,
    PeerLost,
    SetupError,
    ShutDownError,
    StallError,
    UsageError,
)
from farandole.core.store import LocalStore
from farandole.testing.ranks import process_outcomes, run_processes, run_threads, take_seat


def open_engine(channel: str = "test", timeout: float = 30.0) -> Engine:
    return registry.opener("torch")(take_seat(channel, timeout=timeout))


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    def be(rank: int) -> str:
        engine = open_engine()
        work = engine.allreduce(torch.ones(1000), Reduction.SUM) if rank == 0 else None
        if work is None:
            child = os.fork()
            if child == 0:
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


def test_a_forked_child_is_told_that_collectives_are_the_ranks() -> None:
    def be(rank: int) -> int:
        engine = open_engine()
        child = os.fork()
        if child == 0:
            try:
                engine.barrier()
            except ShutDownError as error:
                os._exit(7 if f"forked from rank {rank}" in error.message else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        buffer = torch.ones(3)
        engine.allreduce(buffer, Reduction.SUM).wait()
        assert buffer.tolist() == [2.0] * 3
        engine.close()
        return os.waitstatus_to_exitcode(status)

    assert run_processes(2, be) == [7, 7]


def test_an_interpreter_ends_with_an_operation_in_flight() -> None:
    script = """
import os, select
import torch
from farandole.comm.engines import registry
from farandole.comm.engines.base import Reduction
from farandole.core.store import StoreClient
from farandole.testing.ranks import take_seat
seat = take_seat()
engine = registry.opener("torch")(seat)
if seat.rank == 0:
    work = engine.allreduce(torch.ones(10), Reduction.SUM)
    seat.store.set("pid", str(os.getpid()).encode())
else:
    pid = int(seat.store.get("pid", seat.deadline))
    ended, _, _ = select.select([os.pidfd_open(pid)], [], [], 20.0)
    assert ended, "rank 0 hangs at its end"
"""

    def be(rank: int) -> None:
        os.execv(sys.executable, [sys.executable, "-c", script])

    for outcome in process_outcomes(2, be, timeout=40.0):
        assert outcome.exit_code == 0, outcome.describe()


def test_waiting_without_a_limit_can_be_interrupted() -> None:
    def be(rank: int) -> str:
        seat = take_seat()
        engine = registry.opener("torch")(seat)
        if rank == 1:
            seat.store.get("interrupted", seat.deadline)
            engine.close()
            return ""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        work = engine.barrier()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.done()
        seat.store.set("interrupted", b"")
        engine.close()
        return "interrupted"

    assert run_processes(2, be) == ["interrupted", ""]


def test_a_rank_that_does_not_come_is_named() -> None:
    def be(rank: int) -> str:
        if rank == 2:
            return ""
        with pytest.raises(DeadlineError) as caught:
            open_engine("gradients", timeout=1.0)
        return caught.value.message

    first, second, _ = run_processes(3, be)
    expected = (
        "The channel 'gradients' of 3 ranks did not open within 1 s: rank 2 of it did not come."
    )
    assert first == second == expected


def test_an_address_that_is_not_ours_is_refused() -> None:
    def be(rank: int) -> None:
        import dataclasses

        seat = dataclasses.replace(take_seat(), address="203.0.113.7")
        with pytest.raises(SetupError, match="FARANDOLE_INTERFACE"):
            registry.opener("torch")(seat)

    run_processes(1, be)


def test_what_the_backend_refuses_is_our_bug() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        with pytest.raises(FarandoleBug, match="report"):
            engine.alltoall(torch.ones(2), torch.ones(2), [1, 1, 1], [1, 1, 1]).wait()
        engine.close()

    run_processes(2, be)


def test_torchs_own_default_group_is_not_touched() -> None:
    def be(rank: int) -> None:
        seat = take_seat()
        path = f"/tmp/farandole-test-{seat.store.get('name', seat.deadline).decode()}"
        before = open_engine("before")
        assert not dist.is_initialized()
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        after = open_engine("after")
        for engine in (before, after):
            buffer = torch.ones(2)
            engine.allreduce(buffer, Reduction.SUM).wait()
            assert buffer.tolist() == [2.0, 2.0]
        before.abort(StallError("enough"))
        theirs = torch.ones(2)
        dist.all_reduce(theirs)
        assert theirs.tolist() == [2.0, 2.0]
        after.close()
        dist.all_reduce(theirs)
        dist.destroy_process_group()

    def name_then_be(rank: int) -> None:
        if rank == 0:
            take_seat().store.set("name", os.urandom(8).hex().encode())
        be(rank)

    run_processes(2, name_then_be)


def test_threads_engine_refuses_ranks_of_other_processes() -> None:
    def be(rank: int) -> str:
        seat = take_seat()
        try:
            registry.opener("threads")(seat)
        except UsageError as error:
            return error.message
        return "opened"

    first, second = run_processes(2, be)
    assert first == "opened"
    assert "FARANDOLE_ENGINE=torch" in second


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UsageError, match=r"no engine 'mpi'\. There are: auto, .*, torch"):
        registry.opener("mpi")


def test_devices_that_no_backend_carries() -> None:
    def be(rank: int) -> None:
        for name in ("torch", "threads"):
            with pytest.raises(UsageError, match="meta"):
                registry.opener(name)(take_seat(device="meta"))

    run_threads(1, be)


def test_c10d_store_is_a_torch_store() -> None:
    ours = LocalStore()
    store = C10dStore(ours, "c10d/", Deadline.after(5.0))
    other = dist.PrefixStore("group", store)  # C++ that calls back
    other.set("key", "value")
    assert other.get("key") == b"value"
    assert ours.keys("c10d/") == ["c10d/group/key"]
    assert other.add("count", 2) == 2
    assert other.add("count", 3) == 5
    assert other.check(["key"])
    assert not other.check(["key", "missing"])
    assert other.compare_set("flag", "", "up") == b"up"
    assert other.compare_set("flag", "down", "gone") == b"up"
    assert store.num_keys() == 3
    assert other.delete_key("key")
    assert other.num_keys() == 2
    assert not other.check(["key"])


def test_c10d_store_waits_to_its_deadline() -> None:
    store = C10dStore(LocalStore(), "", Deadline.after(0.01))
    with pytest.raises(DeadlineError):
        dist.PrefixStore("group", store).get("missing")
