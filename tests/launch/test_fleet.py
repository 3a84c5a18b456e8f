"""Agents of several hosts as one, with an ssh that stays on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from launching import Launcher, wait_until

SSH = """#!/bin/sh
test "$1" = -G && { echo "hostname 127.0.0.1"; exit; }
while test "$1" != --; do shift; done
host=$2
shift 2
test $host = unreachable && { echo "ssh: connect to host $host: No route" >&2; exit 255; }
test $host = slow && exec sleep 1000
cd /
exec env -i HOME=/home/of-$host HOST_OF_AGENT=$host sh -c "$*"
"""


@pytest.fixture
def options(launcher: Launcher) -> list[str]:
    path = launcher.folder / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return ["--ssh", str(path), "-H", "a:1,b:2"]


def test_ranks_of_several_hosts_are_one_job(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script(
        "import os, torch\nimport farandole.torch as hvd\nhvd.init()\nenv = os.environ\n"
        "total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)\n"
        "print(total.tolist(), env['HOST_OF_AGENT'], env['HOME'], env['FROM_HERE'], env['X'],\n"
        "      os.path.basename(os.getcwd()), env['RANK'], env['LOCAL_RANK'],\n"
        "      env['HOROVOD_LOCAL_SIZE'], env['FARANDOLE_CROSS_RANK'], flush=True)\n"
        "hvd.shutdown()\n"
    )
    done = launcher.run("-v", *options, "--env", "X=1", script, env={"FROM_HERE": "yes"})
    assert done.returncode == 0, done.stderr
    assert "3 ranks forked: pids" in done.stderr
    folder = launcher.folder.name
    assert sorted(done.stdout.splitlines()) == [
        f"[0] [6.0, 6.0, 6.0] a /home/of-a yes 1 {folder} 0 0 1 0",
        f"[1] [6.0, 6.0, 6.0] b /home/of-b yes 1 {folder} 1 0 2 1",
        f"[2] [6.0, 6.0, 6.0] b /home/of-b yes 1 {folder} 2 1 2 0",
    ]


def test_some_ranks_are_here(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script(
        "import os, sys\nprint(os.environ['RANK'], os.environ.get('HOST_OF_AGENT'),\n"
        "      repr(sys.stdin.read()), os.environ['MASTER_ADDR'])\n"
    )
    (launcher.folder / "input").write_text("for rank 0")
    for hosts, said in (
        ("localhost:1,b:1", ["[0] 0 None 'for rank 0' 127.0.0.1", "[1] 1 b '' 127.0.0.1"]),
        ("b:1,localhost:1", ["[0] 0 b '' 127.0.0.1", "[1] 1 None '' 127.0.0.1"]),
    ):
        with open(launcher.folder / "input") as stdin:
            done = launcher.run(*options[:2], "-H", hosts, "--no-fork", script, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == said


def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(
    launcher: Launcher, options: list[str]
) -> None:
    script = launcher.script("print('begun')")
    done = launcher.run(*options, "-H", "a:1,unreachable:1", "--no-fork", script)
    assert done.returncode == 1
    assert "unreachable cannot be reached: ssh: connect to host unreachable: No" in done.stderr
    assert "Nothing was started." in done.stderr
    assert "begun" not in done.stdout


def test_a_host_that_does_not_get_ready_is_named(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script("print('begun')")
    done = launcher.run(*options, "-H", "a:1,slow:1", "--start-timeout", "2", "--no-fork", script)
    assert done.returncode == 1
    assert "slow did not get ready within 2 s (--start-timeout)." in done.stderr
    assert "begun" not in done.stdout


def test_another_python(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script("import os; print(os.environ['OTHER'])")
    python = launcher.folder / "other python"
    python.write_text(f'#!/bin/sh\nOTHER=used exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = launcher.run(*options, "--no-fork", "--remote-python", str(python), script)
    assert done.stdout == "[0-2] used\n", done.stderr
    python.unlink()
    done = launcher.run(*options, "--no-fork", "--remote-python", str(python), script)
    assert f"has no Python {python}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_anywhere(
    launcher: Launcher, options: list[str], number: signal.Signals
) -> None:
    script = launcher.script(
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('there', flush=True)\ntime.sleep(1000)\n"
    )
    process = launcher.start(*options, "--no-fork", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert wait_until(lambda: not launcher.running(), limit=5.0), launcher.running()


def test_ctrl_c_while_hosts_get_ready(launcher: Launcher, options: list[str]) -> None:
    process = launcher.start(*options, "-H", "a:1,slow:1", "--no-fork", launcher.script("pass"))
    assert wait_until(lambda: any("sleep 1000" in each for each in launcher.running()), limit=20.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert b"ended by SIGINT" in err


def test_a_failure_on_one_host_ends_all(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script(
        "import os, time\nif os.environ['RANK'] == '2': os._exit(7)\ntime.sleep(1000)\n"
    )
    done = launcher.run(*options, "--no-fork", script)
    assert done.returncode == 7
    assert "farandole: rank 2 exited with code 7 (stopped: ranks 0-1)." in done.stderr


def test_a_lost_host_ends_the_job(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script(
        "import os, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getppid(), 9)\ntime.sleep(1000)\n"
    )
    done = launcher.run(*options, "--no-fork", script)
    assert done.returncode == 1
    assert "farandole: rank 1 was lost with b (that is, ranks 1-2): ssh ended" in done.stderr


def test_much_output_waits_for_a_reader_that_pauses(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script("for n in range(200_000): print('line', n, 'x' * 80)\n")
    process = launcher.start(*options, "-H", "b:1", "--no-fork", script)
    assert process.stdout is not None
    process.stdout.read(100)
    assert not wait_until(lambda: _memory(process.pid) > 120 << 20, limit=2.0)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert rest.endswith(b"line 199999 " + b"x" * 80 + b"\n")


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
