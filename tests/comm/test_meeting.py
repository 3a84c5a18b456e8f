"""How ranks find each other: by the environment, by a file, through torchrun's store."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from farandole.comm import meeting
from farandole.comm.meeting import Meeting
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import DeadlineError, SetupError, UsageError
from farandole.core.secret import Secret
from farandole.core.store import StoreServer
from farandole.core.topology import Placement


def placed(rank: int, size: int = 2, **other: Any) -> Placement:
    given = {
        "local_rank": rank, "local_size": size, "source": "mpich", "job": "", "coordinator": None,
    }  # fmt: skip
    return Placement(rank=rank, size=size, **{**given, **other})


def soon() -> Deadline:
    return Deadline.after(20.0)


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "farandole"


def meet_all(size: int, meet: Callable[[int], Meeting], order: list[int]) -> list[Meeting]:
    found: dict[int, Meeting] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: meet(r)})) for r in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_ranks_of_one_machine_meet_by_a_private_file(private, order):
    modes: list[int] = []

    def meet(rank: int) -> Meeting:
        found = meeting.meet(Settings(), placed(rank, 3), soon())
        if rank == 0:
            (file,) = private.iterdir()
            modes.append(stat.S_IMODE(file.stat().st_mode))
        return found

    meetings = meet_all(3, meet, order)
    assert modes == [0o600]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    meetings[2].store.set("key", b"value")
    assert meetings[0].store.peek("key") == b"value"
    assert {each.secret for each in meetings} == {meetings[0].secret}
    assert {each.address for each in meetings} == {"127.0.0.1"}
    meetings[0].all_have_come()
    assert list(private.iterdir()) == []
    for each in reversed(meetings):
        each.close()


def test_what_an_earlier_job_left_behind_is_passed_over(private):
    dead = StoreServer(Secret.new())
    left = {"address": str(dead.address), "secret": Secret.new().hex()}
    dead.close()
    stranger = StoreServer(Secret.new())
    private.mkdir(mode=0o700)
    file = private / meeting._file_name(placed(1))
    file.write_text(json.dumps(left))
    found: list[Meeting] = []
    waiter = threading.Thread(
        target=lambda: found.append(meeting.meet(Settings(), placed(1), soon()))
    )
    waiter.start()
    file.write_text(json.dumps({**left, "address": str(stranger.address)}))
    host = meeting.meet(Settings(), placed(0), soon())
    waiter.join(20)
    host.store.set("key", b"value")
    assert found[0].store.peek("key") == b"value"
    for each in (*found, host, stranger):
        each.close()


def test_jobs_at_the_same_time_do_not_meet():
    names = {
        meeting._file_name(placed(1)),
        meeting._file_name(placed(1, 3)),
        meeting._file_name(placed(1, job="other")),
        meeting._file_name(placed(1, source="slurm")),
    }
    assert len(names) == 4
    assert meeting._file_name(placed(0)) == meeting._file_name(placed(1))


def test_wrapping_shells_are_looked_through(private):
    code = """
        import os
        from farandole.comm import meeting
        from farandole.core.topology import find_placement
        print(meeting._starter(find_placement(os.environ)))
    """
    script = private.parent / "starter.py"
    script.write_text(textwrap.dedent(code))
    shell = f"{sys.executable} {script}; true"
    environ = {**os.environ, "PMI_RANK": "0", "PMI_SIZE": "1"}
    shown = subprocess.run(
        ["sh", "-c", shell], env=environ, capture_output=True, text=True, check=True
    )
    assert int(shown.stdout) == os.getpid()


def test_rank_0_that_does_not_come_is_missed_by_name():
    with pytest.raises(DeadlineError, match=r"did not find rank 0 within 0\.2 s") as caught:
        meeting.meet(Settings(), placed(1), Deadline.after(0.2))
    assert caught.value.ranks == (0,)


def test_a_directory_that_others_can_enter_is_refused(private):
    private.mkdir(mode=0o755)
    with pytest.raises(SetupError, match="others can write or read"):
        meeting.meet(Settings(), placed(0), soon())


def test_a_lone_process_needs_nothing():
    alone = meeting.meet(Settings(), placed(0, 1), soon())
    alone.store.set("key", b"value")
    assert [alone.next_generation() for _ in range(3)] == [0, 1, 2]
    alone.close()


def test_a_launchers_store_is_joined():
    secret = Secret.new()
    server = StoreServer(secret)
    settings = Settings(store_address=str(server.address), secret=secret)
    joined = meeting.meet(settings, placed(1), soon())
    joined.store.set("key", b"value")
    assert server.store.peek("key") == b"value"
    joined.close()
    server.close()
    with pytest.raises(UsageError, match="FARANDOLE_SECRET is not"):
        meeting.meet(Settings(store_address="127.0.0.1:9"), placed(1), soon())


def test_several_machines_meet_through_torchrun_with_a_secret():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = Settings(secret=Secret.new())

    def meet(rank: int) -> Meeting:
        place = placed(
            rank, local_rank=0, local_size=1, source="torchrun", job="j",
            coordinator=f"127.0.0.1:{host.port}",
        )  # fmt: skip
        return meeting.meet(settings, place, soon())

    meetings = meet_all(2, meet, [1, 0])
    meetings[1].store.set("key", b"value")
    assert meetings[0].store.peek("key") == b"value"
    host.set_timeout(datetime.timedelta(seconds=1))
    assert settings.secret is not None
    assert settings.secret.hex().encode() not in host.get("farandole/j")
    for each in reversed(meetings):
        each.close()


def test_several_machines_without_a_way_to_meet_are_told_what_to_set():
    apart = {"local_rank": 0, "local_size": 1}
    with pytest.raises(UsageError, match=r"several machines.*FARANDOLE_STORE"):
        meeting.meet(Settings(), placed(1, **apart), soon())
    with pytest.raises(UsageError, match="Set FARANDOLE_SECRET to the same value"):
        meeting.meet(Settings(), placed(1, source="torchrun", **apart), soon())
    store = StoreServer(Secret.new())
    settings = Settings(
        store_address=str(store.address), secret=Secret.new(), network_interface="no-such0"
    )
    with pytest.raises(UsageError, match="no-such0"):
        meeting.own_address(store.address, settings)
    assert meeting.own_address(store.address, Settings(network_interface="lo")) == "127.0.0.1"
    store.close()


SCRIPT = """
    import torch
    from farandole.comm import group
    from farandole.comm.ops import Op
    from farandole.core.config import Settings

    for _ in range(2):
        here = group.form_root(Settings.from_environment()).current
        total = here.allreduce(torch.tensor(here.rank + 1), op=Op.SUM).item()
        print(f"{here.rank} of {here.size} local {here.local_rank} total {total}", flush=True)
        group.leave_root()
"""
CLEAN = ("FARANDOLE_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_")


def lines_of(command: list[str], tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environ = {name: v for name, v in os.environ.items() if not name.startswith(CLEAN)}
    shown = subprocess.run(
        [*command, str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return sorted(shown.stdout.splitlines())


BOTH = ["0 of 2 local 0 total 3"] * 2 + ["1 of 2 local 1 total 3"] * 2


def test_the_same_script_runs_under_plain_python(tmp_path):
    assert lines_of([sys.executable], tmp_path) == ["0 of 1 local 0 total 1"] * 2


@pytest.mark.slow
def test_the_same_script_runs_under_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert lines_of([*torchrun, "--master-port=0"], tmp_path) == BOTH


def test_the_same_script_runs_under_mpiexec(tmp_path):
    here = os.path.dirname(sys.executable)
    mpiexec = shutil.which("mpiexec") or shutil.which("mpiexec", path=here)
    if mpiexec is None:
        pytest.skip("there is no mpiexec here (pip install mpich)")
    assert lines_of([mpiexec, "-n", "2", sys.executable], tmp_path) == BOTH


@pytest.mark.slow
def test_the_same_script_runs_with_horovods_variables_set_by_hand(tmp_path):
    shell = (
        f"HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 "
        f'{sys.executable} "$0" & HOROVOD_RANK=0 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=0 '
        f'HOROVOD_LOCAL_SIZE=2 {sys.executable} "$0"; wait'
    )
    assert lines_of(["sh", "-c", shell], tmp_path) == BOTH
