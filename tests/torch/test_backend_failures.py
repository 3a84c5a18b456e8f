"""What goes wrong on the backend ``farandole`` is an error that says so, in time."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import threading
import time
from pathlib import Path

import backend_ranks
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farandole.core.errors import (
    DeadlineError,
    MismatchError,
    PeerLost,
    ShutDownError,
    StallError,
    UnsupportedError,
    UsageError,
)


def _all_reduce(by_future: bool) -> None:
    work = dist.all_reduce(torch.ones(10), async_op=True)
    if by_future:
        work.get_future().wait()
    else:
        work.wait()


@pytest.mark.parametrize("pending", [False, True])
def test_a_killed_rank_is_an_error_on_the_others_at_once(tmp_path: Path, pending: bool) -> None:
    def check(rank: int) -> tuple[float, str]:
        dist.all_reduce(torch.ones(10))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        # Where C++ waits for a future, as DDP does, an error is its text.
        with pytest.raises(RuntimeError if pending else PeerLost) as caught:
            _all_reduce(pending)
        return time.monotonic() - began, str(caught.value)

    run = backend_ranks.outcomes(tmp_path, 3, check)
    assert run[2].signal == signal.SIGKILL
    for outcome in run[:2]:
        assert outcome.finished, outcome
        assert outcome.value is not None
        seconds, text = outcome.value
        assert seconds < 2.0
        assert "rank 2 was lost" in text.lower()


def test_ddp_tells_who_was_lost(tmp_path: Path) -> None:
    def check(rank: int) -> str:
        model = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(3):
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                model(torch.ones(2, 4)).sum().backward()
            except RuntimeError as error:
                return str(error)
        return "nothing happened"

    survivor, _ = backend_ranks.outcomes(tmp_path, 2, check)
    assert survivor.finished, survivor
    assert "Rank 1 was lost" in str(survivor.value)


def test_an_operation_ends_with_the_timeout_of_its_group(tmp_path: Path) -> None:
    def check(rank: int) -> str:
        if rank == 1:
            group = dist.distributed_c10d._get_default_group()._group
            told = threading.Event()
            group.control.on_failure(lambda error: told.set())
            told.wait(20)
            return str(group.broken)
        with pytest.raises(StallError) as caught:
            dist.all_reduce(torch.ones(4))
        return str(caught.value)

    for text in backend_ranks.run(tmp_path, 2, check, timeout=datetime.timedelta(seconds=1.5)):
        assert "allreduce" in text
        assert "1.5 s" in text


def test_ranks_in_different_operations_are_told_of_both(tmp_path: Path) -> None:
    def both_wait(rank: int) -> str:
        group = dist.new_group([0, 1])
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(4), group=group if rank else None)
        return str(caught.value)

    for text in backend_ranks.run(tmp_path, 2, both_wait):
        assert "rank 0: allreduce" in text
        assert "process group '0'" in text
        assert "rank 1: allreduce" in text
        assert "process group '1'" in text


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}"

    def check(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(DeadlineError) as caught:
            backend_ranks.join(method, rank, 3, datetime.timedelta(seconds=1))
        return str(caught.value)

    first, _, third = backend_ranks.run_processes(3, check)
    for text in (first, third):
        assert "rank 1 did not come" in text
        assert "within 1 s" in text


def test_calls_that_cannot_work_say_why_and_the_group_stays_usable(tmp_path: Path) -> None:
    def check(rank: int) -> float:
        with pytest.raises(UsageError, match=r"5 elements .* does not consist of 2"):
            dist.all_gather_into_tensor(torch.empty(5), torch.ones(2))
        with pytest.raises(UsageError, match="add up to the 4 rows"):
            dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3], [1, 1])
        with pytest.raises(UsageError, match="3 rows cannot be dealt equally"):
            dist.all_to_all_single(torch.empty(3), torch.ones(3))
        with pytest.raises(UnsupportedError, match="BAND combines bits"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(UsageError, match=r"Sum of torch.bool"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool))
        dist.all_reduce(tensor := torch.ones(1))
        return tensor.item()

    assert backend_ranks.run(tmp_path, 2, check) == [2.0, 2.0]


def test_a_group_that_was_destroyed_says_so(tmp_path: Path) -> None:
    def check(rank: int) -> str:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        native = group
        dist.destroy_process_group(group)
        with pytest.raises(ShutDownError) as caught:
            native.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        return str(caught.value)

    assert all("shut down" in text for text in backend_ranks.run(tmp_path, 2, check))


def test_a_rank_that_ends_without_destroying_leaves_nothing_hanging(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}"

    def check(rank: int) -> str:
        backend_ranks.join(method, rank, 2)
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            return "left"
        with pytest.raises(PeerLost):
            dist.all_reduce(torch.ones(1))
        return "told"

    assert backend_ranks.run_processes(2, check, timeout=20) == ["told", "left"]


def _from_another_host_each(method: str, rank: int) -> float:
    """As ranks that each believe to be on a host of their own."""
    from farandole.torch.backend import introduction

    introduction.host_identity = lambda: f"host{rank}"
    backend_ranks.join(method, rank, 2)
    dist.all_reduce(tensor := torch.ones(1))
    dist.destroy_process_group()
    return tensor.item()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ranks_of_several_hosts_meet_where_torchs_store_is() -> None:
    method = f"tcp://127.0.0.1:{_free_port()}"
    run = backend_ranks.run_processes(2, lambda rank: _from_another_host_each(method, rank))
    assert run == [2.0, 2.0]


def test_ranks_of_several_hosts_need_a_secret_and_a_way(tmp_path: Path) -> None:
    def without_way(rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            _from_another_host_each(f"file://{tmp_path / 'store'}", rank)
        return str(caught.value)

    def without_secret(rank: int) -> str:
        del os.environ["FARANDOLE_SECRET"]
        with pytest.raises(UsageError) as caught:
            _from_another_host_each(method, rank)
        return str(caught.value)

    method = f"tcp://127.0.0.1:{_free_port()}"
    for text in backend_ranks.run_processes(2, without_way):
        assert "FileStore does not tell how they reach each other" in text
    for text in backend_ranks.run_processes(2, without_secret):
        assert "Set FARANDOLE_SECRET to the same value" in text
