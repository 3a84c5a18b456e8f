"""The timeline of real ranks: one file, readable at any moment, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import farandole.torch as hvd
from farandole.core.clock import Deadline
from farandole.core.errors import NotInitializedError, PeerLost, UsageError
from farandole.testing.ranks import process_outcomes, run_processes, run_threads

sys.path.append(str(Path(__file__).parents[1] / "monitor"))
from trace_format import read, rows, unfinished


def train(steps: int) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def names(path: Path, rank: int, title: str) -> list[str]:
    return [str(record["name"]) for record in rows(read(path), rank)[title]]


def test_all_ranks_are_in_the_file_that_start_timeline_names(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> None:
        hvd.init()
        hvd.start_timeline(path if rank == 0 else "/nowhere/ignored", mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="loss")
        train(3)
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(3), name="after")
        hvd.shutdown()

    run_processes(2, rank_function)
    records = read(path)
    assert unfinished(records) == []
    for rank in (0, 1):
        spans = names(path, rank, "allreduce.loss")
        assert spans[:2] == ["NEGOTIATE_ALLREDUCE"] * 2
        assert spans[2] == spans[-1] == "ALLREDUCE"
        assert "SHM_ALLREDUCE" in spans
        found = rows(records, rank)
        assert [record["name"] for record in found["steps"]] == ["STEP"] * 3
        assert len(found["gradients: bucket 0"]) == 2 * 3
        assert "CYCLE_START" in {record["name"] for record in found["cycles"]}
        assert "allreduce.after" not in found


def test_the_settings_name_a_file_for_the_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> None:
        os.environ["HOROVOD_TIMELINE"] = str(path)
        hvd.init()
        hvd.init()
        hvd.allreduce(torch.ones(3), name="loss")
        hvd.shutdown()

    run_processes(2, rank_function)
    for rank in (0, 1):
        assert "SHM_ALLREDUCE" in names(path, rank, "allreduce.loss")
        assert "cycles" not in rows(read(path), rank)


def test_the_file_is_whole_whenever_another_process_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> int:
        if rank == 2:
            return look_until(path, "allreduce.last")
        os.environ["FARANDOLE_SIZE"] = "2"
        os.environ["FARANDOLE_LOCAL_SIZE"] = "2"
        hvd.init()
        hvd.start_timeline(path)
        for step in range(300):
            hvd.allreduce(torch.ones(4), name=f"tensor {step % 5}")
        hvd.allreduce(torch.ones(4), name="last")
        hvd.stop_timeline()
        hvd.shutdown()
        return 0

    _, _, looks = run_processes(3, rank_function)
    assert looks > 1
    assert unfinished(read(path)) == []


def look_until(path: Path, title: str) -> int:
    """Read the file without a rest until both ranks have that row; how often it was read."""
    looks = 0
    end = Deadline.after(40.0)
    while not end.expired():
        if path.exists():
            looks += 1
            records = read(path)
            if all(title in rows(records, rank) for rank in (0, 1)):
                break
    return looks


def test_a_killed_rank_leaves_what_it_did_until_then(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> str:
        hvd.init()
        hvd.start_timeline(path)
        hvd.allreduce(torch.ones(3), name="loss")
        if rank == 1:
            hvd.allreduce_async(torch.ones(3), name="never")
            end = Deadline.after(20.0)
            while "allreduce.never" not in rows(read(path), 1) and not end.expired():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            hvd.barrier()
        hvd.stop_timeline()
        return "alive"

    first, second = process_outcomes(2, rank_function)
    assert first.value == "alive", first.describe()
    assert second.signal == signal.SIGKILL, second.describe()
    assert (1, "NEGOTIATE_ALLREDUCE") in unfinished(read(path))


def test_a_reduction_of_gradients_that_never_ends_shows(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> None:
        hvd.init()
        hvd.start_timeline(path)
        train(2)
        model = torch.nn.Linear(8, 4)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        if rank == 0:
            with pytest.raises(PeerLost):
                train_one(model, optimizer)
            hvd.stop_timeline()
        else:
            train_one(model, optimizer)
            os.kill(os.getpid(), signal.SIGKILL)

    def train_one(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            if step == 1 and hvd.rank() == 1:
                return
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    first, second = process_outcomes(2, rank_function)
    assert first.finished, first.describe()
    assert second.signal == signal.SIGKILL, second.describe()
    assert (0, "ALLREDUCE") in unfinished(read(path))


def test_a_killed_rank_0_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> None:
        hvd.init()
        hvd.start_timeline(path)
        for step in range(10**6):
            hvd.allreduce(torch.ones(3), name=f"tensor {step % 5}")
            if rank == 0 and step > 50 and "allreduce.tensor 4" in rows(read(path), 1):
                os.kill(os.getpid(), signal.SIGKILL)

    first, second = process_outcomes(2, rank_function)
    assert first.signal == signal.SIGKILL, first.describe()
    assert isinstance(second.error, PeerLost), second.describe()
    assert "allreduce.tensor 4" in rows(read(path), 1)


def test_ranks_that_are_threads_record_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def rank_function(rank: int) -> None:
        hvd.init()
        hvd.start_timeline(path)
        hvd.allreduce(torch.ones(3), name="loss")
        hvd.stop_timeline()
        hvd.shutdown()

    run_threads(3, rank_function)
    for rank in range(3):
        assert names(path, rank, "allreduce.loss").count("NEGOTIATE_ALLREDUCE") == 2


def test_files_follow_each_other(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"

    def rank_function(rank: int) -> None:
        hvd.init()
        hvd.start_timeline(first)
        hvd.start_timeline(first)
        hvd.allreduce(torch.ones(1), name="a")
        hvd.start_timeline(second)
        hvd.allreduce(torch.ones(1), name="b")
        hvd.stop_timeline()
        hvd.stop_timeline()
        hvd.shutdown()

    run_threads(1, rank_function)
    assert "allreduce.a" in rows(read(first), 0)
    assert set(rows(read(second), 0)) & {"allreduce.a", "allreduce.b"} == {"allreduce.b"}


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    def rank_function(rank: int) -> None:
        with pytest.raises(NotInitializedError):
            hvd.start_timeline(tmp_path / "timeline.json")
        with pytest.raises(NotInitializedError):
            hvd.stop_timeline()
        hvd.init()
        with pytest.raises(UsageError, match="No such file or directory"):
            hvd.start_timeline(tmp_path / "nowhere" / "timeline.json")
        hvd.start_timeline(tmp_path / "timeline.json")
        hvd.shutdown()

    run_threads(1, rank_function)
    assert json.loads((tmp_path / "timeline.json").read_text())
