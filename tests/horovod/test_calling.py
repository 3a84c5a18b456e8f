"""``horovod.run`` and ``horovodrun``, with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import JobFailed, UsageError
from farandole.core.store import LocalStore
from farandole.horovod import runner
from farandole.horovod.runner import launch, options, parcels

run = runner.run


def horovodrun(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farandole.horovod.runner.launch", *words],
        cwd=folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_function_is_called_on_every_rank_and_its_results_come_back_by_rank() -> None:
    offset = 40

    def place(first: int, *, second: int) -> Any:
        import horovod.torch as hvd  # type: ignore[import-not-found]
        import torch

        hvd.init()
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
        return hvd.rank(), hvd.size(), total.item(), first + second + offset

    results = run(place, args=(1,), kwargs={"second": 1}, num_proc=2)
    assert results == [(0, 2, 3.0, 42), (1, 2, 3.0, 42)]


@pytest.mark.slow
def test_results_may_be_large_or_nothing() -> None:
    def large() -> bytes | None:
        return None if os.environ["HOROVOD_RANK"] == "1" else bytes(3 * parcels.PART + 5)

    assert run(large, num_proc=2) == [bytes(3 * parcels.PART + 5), None]


@pytest.mark.slow
def test_the_functions_of_this_programs_modules_are_found_there() -> None:
    assert run(_in_a_module, num_proc=1) == [__name__]


def _in_a_module() -> str:
    return __name__


def test_a_rank_that_fails_ends_the_others_and_is_named() -> None:
    def fail() -> None:
        import time

        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("the reason")
        time.sleep(100)

    started = time.monotonic()
    with pytest.raises(JobFailed, match="Horovod detected that one or more processes exited") as it:
        run(fail, num_proc=2)
    assert time.monotonic() - started < 60
    assert it.value.ranks == (1,)
    assert "KeyError: 'the reason'" in it.value.message


@pytest.mark.slow
def test_a_rank_that_is_killed() -> None:
    def die() -> None:
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(JobFailed, match="exit code is 137"):
        run(die, num_proc=1)


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_result() -> None:
    with pytest.raises(JobFailed, match="Rank 0 ended before the function had returned"):
        run(lambda: sys.exit(0), num_proc=1)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"hosts": "localhost:2", "hostfile": "x"}, "not both"),
        ({"use_gloo": True, "use_mpi": True}, "only allow one"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "3 ranks are wanted"),
        ({"num_proc": 0}, "num_proc=0 must be >= 1"),
        ({"hosts": "::1"}, "brackets"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        run(lambda: None, **arguments)


def test_old_names_of_arguments_still_count() -> None:
    with (
        pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"),
        pytest.raises(UsageError, match="num_proc=0"),
    ):
        run(lambda: 1, np=0)


def test_output_goes_where_this_program_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda: print("from the rank"), num_proc=1, use_mpi=True, disable_cache=True)
    shown = capsys.readouterr()
    assert "from the rank\n" in shown.out
    assert "horovodrun: --mpi has no effect: " in shown.err
    assert "horovodrun: --disable-cache has no effect: " in shown.err


def test_a_command_can_be_run_by_filled_in_arguments() -> None:
    arguments = options.Arguments(num_proc=2, hosts="localhost:2,127.0.0.1:2")
    arguments.command = [sys.executable, "-V"]
    assert launch._run(arguments) is None
    arguments.command = ["false"]
    with pytest.raises(JobFailed, match="exit code is 1"):
        launch._run(arguments)


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="/nowhere/python cannot be started: No such file"):
        run(lambda: 1, executable="/nowhere/python")


SCRIPT = """
import horovod.torch as hvd, sys, torch
hvd.init()
print(sys.argv[1], hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), name="x").item(), flush=True)
"""


def test_a_script_is_run_on_the_ranks_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = horovodrun(
        "-np", "2", "-H", "localhost:2", "--cycle-time-ms", "3", sys.executable, "train.py", "mean",
        folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean 1.5") in (1, 2)  # 1: both ranks in one line
    assert "horovodrun: --cycle-time-ms has no effect: nothing waits for a cycle." in done.stderr


def test_the_exit_code_is_that_of_the_first_rank_to_fail(tmp_path: Path) -> None:
    done = horovodrun("-np", "2", "sh", "-c", "exit 3", folder=tmp_path)
    assert done.returncode == 3


def test_a_wrong_command_line_is_one_line(tmp_path: Path) -> None:
    done = horovodrun("-np", "3", "-H", "localhost:2", "true", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("horovodrun: 3 ranks are wanted and the hosts have 2 slots")
    assert horovodrun("--no-such-option", folder=tmp_path).returncode == 2


@pytest.mark.slow
def test_what_can_be_used_is_shown(tmp_path: Path) -> None:
    done = horovodrun("--check-build", folder=tmp_path)
    assert done.returncode == 0
    assert "[X] PyTorch" in done.stdout
    assert "[ ] MPI" in done.stdout
    assert "[X] Gloo" in done.stdout


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24])
def test_values_of_any_size_go_through_a_store(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    from farandole.core.clock import Deadline

    monkeypatch.setattr(parcels, "PART", 8)
    store = LocalStore()
    value = bytes(range(size))
    assert parcels.take(store, "key") is None
    parcels.put(store, "key", value)
    assert parcels.get(store, "key", Deadline.after(1.0)) == value
    assert parcels.take(store, "key") == value
    assert store.keys("") == []
