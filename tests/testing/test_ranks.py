from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from farandole.core.errors import PeerLost, UsageError
from farandole.core.topology import assigned
from farandole.testing.ranks import (
    RanksFailed,
    process_outcomes,
    run_processes,
    run_threads,
    take_seat,
    thread_outcomes,
)

HERE = {"text": "of this module"}


def describe_self(extra: str, rank: int) -> tuple[int, str, str, int]:
    return rank, HERE["text"], extra, os.getpid()


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_values_come_by_rank(run) -> None:
    results = run(3, functools.partial(describe_self, "more"))
    assert [result[:3] for result in results] == [(r, "of this module", "more") for r in range(3)]


def test_processes_are_processes_and_threads_are_not() -> None:
    pids = {result[3] for result in run_processes(3, functools.partial(describe_self, ""))}
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert {result[3] for result in run_threads(3, functools.partial(describe_self, ""))} == {
        os.getpid()
    }


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_ranks_share_a_store(run) -> None:
    def be(rank: int) -> tuple[int, int, str]:
        seat = take_seat("channel")
        seat.store.set(f"from/{rank}", str(rank * 11).encode())
        return seat.rank, seat.size, seat.store.get(f"from/{1 - rank}", seat.deadline).decode()

    assert run(2, be) == [(0, 2, "11"), (1, 2, "0")]
    assert run(2, be) == [(0, 2, "11"), (1, 2, "0")]  # a store of its own each time


def test_a_seat_is_for_ranks() -> None:
    with pytest.raises(UsageError, match="run_processes"):
        take_seat()


def test_a_place_is_a_threads_own() -> None:
    places = run_threads(2, lambda rank: assigned.get())
    assert [place.placement.rank for place in places if place] == [0, 1]
    assert assigned.get() is None


def test_the_environment_is_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_TEST_WORD", "farandole")

    def be(rank: int) -> tuple[str, str]:
        return os.environ["FARANDOLE_TEST_WORD"], os.environ["FARANDOLE_RANK"]

    assert run_processes(2, be) == [("farandole", "0"), ("farandole", "1")]


@pytest.mark.parametrize("outcomes", [thread_outcomes, process_outcomes])
def test_what_a_rank_raises_is_told(outcomes) -> None:
    def be(rank: int) -> str:
        if rank:
            raise PeerLost("rank 5 is gone", ranks=[5])
        return "fine"

    first, second = outcomes(2, be)
    assert first.finished
    assert first.value == "fine"
    assert not second.finished
    assert isinstance(second.error, PeerLost)
    assert second.error.ranks == (5,)
    assert "rank 5 is gone" in second.traceback


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_failed_rank_fails_the_run(run) -> None:
    def be(rank: int) -> None:
        raise KeyError("missing thing")

    with pytest.raises(RanksFailed, match="rank 0 raised KeyError") as caught:
        run(1, be)
    assert "missing thing" in str(caught.value)


def test_every_end_of_a_process() -> None:
    def be(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            os._exit(3)
        if rank == 2:
            raise SystemExit(5)
        if rank == 3:
            print("to output")
            print("to errors", file=sys.stderr)
            sys.exit("a reason")

    killed, left, exited, reasoned = process_outcomes(4, be)
    assert (killed.signal, killed.exit_code) == (signal.SIGKILL, None)
    assert (left.signal, left.exit_code) == (None, 3)
    assert exited.exit_code == 5
    assert reasoned.exit_code == 1
    assert reasoned.output == "to output\n"
    assert reasoned.errors == "to errors\na reason\n"
    assert not any(outcome.finished for outcome in (killed, left, exited, reasoned))
    assert "SIGKILL" in killed.describe()


def test_what_cannot_travel_is_told() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def raise_odd(rank: int) -> None:
        raise Odd(1, 2)

    (outcome,) = process_outcomes(1, raise_odd)
    assert "Odd" in repr(outcome.error)
    assert "1 and 2" in str(outcome.error)
    (outcome,) = process_outcomes(1, lambda rank: threading.Lock())
    assert isinstance(outcome.error, TypeError)
    assert not outcome.finished


@pytest.mark.parametrize("outcomes", [thread_outcomes, process_outcomes])
def test_the_deadline_shows_where_ranks_were(outcomes) -> None:
    released = threading.Event() if outcomes is thread_outcomes else None

    def linger_for_long(rank: int) -> None:
        if rank == 0:
            return
        if released is None:
            time.sleep(1000)
        else:
            released.wait(1000)

    first, second = outcomes(2, linger_for_long, timeout=0.5)
    if released is not None:
        released.set()
    assert first.finished
    assert second.timed_out
    assert not second.finished
    assert "linger_for_long" in second.stacks


def wait_until_gone(pid: int) -> None:
    """It was killed already, but it is init's to reap."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_nothing_survives_a_run() -> None:
    def be(rank: int) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid  # in the rank's session

    (pid,) = run_processes(1, be)
    wait_until_gone(pid)


def test_a_run_after_a_failed_one() -> None:
    with pytest.raises(RanksFailed):
        run_processes(2, lambda rank: time.sleep(1000), timeout=0.1)
    assert run_processes(2, lambda rank: rank) == [0, 1]


def test_ranks_can_compute() -> None:
    def be(rank: int) -> float:
        layer = torch.nn.Linear(64, 64)
        layer(torch.ones(256, 64)).sum().backward()
        return float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())

    assert run_processes(2, be) == [300.0**3] * 2


def test_ranks_draw_different_random_numbers() -> None:
    import random

    first, second = run_processes(2, lambda rank: random.random())
    assert first != second
