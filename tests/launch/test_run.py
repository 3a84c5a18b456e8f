"""``farandole run``, from the command to what users see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
from launching import COMMAND, Launcher

ALLREDUCE = """
import torch
import farandole.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
print(total.tolist(), hvd.size(), hvd.local_size(), flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_ranks_find_each_other(launcher: Launcher, how: str) -> None:
    options = ["--no-fork"] if how == "exec" else []
    done = launcher.run("-np", "2", *options, launcher.script(ALLREDUCE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[3.0, 3.0, 3.0] 2 2") in (1, 2)


@pytest.mark.slow
def test_twenty_launches_at_once(launcher: Launcher) -> None:
    script = launcher.script(ALLREDUCE)
    started = [launcher.start("-np", "2", script) for _ in range(20)]
    for process in started:
        out, err = process.communicate(timeout=110)
        assert process.returncode == 0, err.decode()
        assert b"[3.0, 3.0, 3.0]" in out


def test_the_users_own_process_group_works(launcher: Launcher) -> None:
    script = launcher.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x); print(x.item())\n"
        "dist.destroy_process_group()\n"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.0") in (1, 2)


def test_what_ranks_need_first_is_imported_before_the_fork(launcher: Launcher) -> None:
    script = launcher.script(
        "import sys\nbefore = set(sys.modules)\n" + ALLREDUCE
        + "print('later:', *sorted(set(sys.modules) - before))\n"
    )  # fmt: skip
    done = launcher.run("-v", "-np", "2", script)
    assert "forked" in done.stderr
    later = {name for found in re.findall(r"later:(.*)", done.stdout) for name in found.split()}
    assert not {name for name in later if name.startswith("farandole.comm.engines")} - {
        "farandole.comm.engines.nccl"
    }


def test_rank_0_alone_has_standard_input(launcher: Launcher) -> None:
    (launcher.folder / "input").write_text("for rank 0")
    script = launcher.script("import sys; print(repr(sys.stdin.read()))")
    with open(launcher.folder / "input") as stdin:
        done = launcher.run("-np", "2", "--no-fork", script, stdin=stdin)
    assert sorted(done.stdout.splitlines()) == ["[0] 'for rank 0'", "[1] ''"]


def test_one_file_a_rank_holds_all_bytes(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys\n"
        "sys.stdout.buffer.write(bytes(range(256)) * 2000 + b'\\r 1%\\r 2%')\n"
        "sys.stdout.flush()\n"
        "sys.stderr.write('rank ' + os.environ['RANK'])\n"
    )
    done = subprocess.run(
        [*COMMAND, "-np", "2", "--no-fork", "--output-dir", "logs/run", script],
        cwd=launcher.folder, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    whole = bytes(range(256)) * 2000 + b"\r 1%\r 2%"
    for rank in (0, 1):
        log = (launcher.folder / "logs" / "run" / f"rank-{rank}.log").read_bytes()
        assert len(log) == len(whole) + len("rank 0")
        assert log.replace(b"rank %d" % rank, b"") == whole
    assert b" 2%\n" in done.stdout


def test_much_output_is_not_lost(launcher: Launcher) -> None:
    script = launcher.script("for n in range(20000): print('line', n)\n")
    done = launcher.run("-np", "2", "--no-fork", script)
    for rank in "01":
        own = [
            line.partition("] ")[2] for line in done.stdout.splitlines()
            if line.startswith(("[0-1]", f"[{rank}]"))
        ]  # fmt: skip
        assert own == [f"line {n}" for n in range(20000)]


def test_a_reader_that_pauses_does_not_keep_ctrl_c_from_working(launcher: Launcher) -> None:
    script = launcher.script("while True: print('y' * 100)\n")
    process = launcher.start("-np", "2", "--no-fork", script)
    assert process.stdout is not None
    process.stdout.read(100)
    time.sleep(0.3)  # the pipe is full by now; if it is not, the test is only weaker
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_lines_come_when_they_are_printed(launcher: Launcher) -> None:
    script = launcher.script("import time\nprint('early')\ntime.sleep(1000)\n")
    for options in ([], ["--no-fork"]):
        process = launcher.start("-np", "2", *options, script)
        assert process.stdout is not None
        assert b"early" in process.stdout.readline()
        process.kill()
        process.communicate()


def test_on_a_terminal_rank_0_has_one_of_the_same_width(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "tty = [sys.stdout.isatty(), sys.stderr.isatty()]\n"
        "print(rank, tty, os.get_terminal_size(2).columns if tty[1] else '', end='\\r\\n')\n"
        "if rank == '0': sys.exit(os.system('test -t 1'))\n"
    )
    shown = _on_terminal([*COMMAND, "-np", "2", "--no-fork", script], launcher.folder, columns=70)
    assert "0 [True, True] 66" in shown
    assert "1 [False, False]" in shown
    assert "\x1b[36m[0]\x1b[0m" in shown


def test_the_table_of_times_comes_last(launcher: Launcher) -> None:
    script = launcher.script(
        "from helper_for_tests import enter_init\n"
        "import os, json\n"
        "store = enter_init()\n"
        "store.set('report/' + os.environ['RANK'], json.dumps({'seconds': 4.0, 'data': 0.4,\n"
        "    'communication': 0.6, 'samples': 8000, 'steps': 250}).encode())\n"
        "store.close()\n"
    )
    done = launcher.run("-np", "2", "--no-fork", script)
    assert done.returncode == 0, done.stderr
    assert "trained on 16,000 samples in 4.0 s: 4,000 samples/s on 2 ranks" in done.stdout


def test_a_job_file(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys; print(sys.argv[1:], os.environ['A'], os.environ['B'])"
    )
    (launcher.folder / "farandole.yaml").write_text(
        f"command: {script} --epochs 3\nranks: 2\nfork: false\nenv:\n  A: '1'\n  B: '2'\n"
    )
    done = launcher.run("--env", "B=3", "-v", "farandole.yaml", "--lr", "0.1")
    assert "2 ranks executed" in done.stderr
    assert done.stdout.count("['--epochs', '3', '--lr', '0.1'] 1 3") in (1, 2)


def test_background_processes_of_a_good_job_are_ended(launcher: Launcher) -> None:
    script = launcher.script(
        "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    )
    done = launcher.run("-np", "2", "--no-fork", script)
    assert done.returncode == 0
    assert not launcher.running()


def test_standard_error_alone_on_a_terminal_stays_apart(launcher: Launcher) -> None:
    script = launcher.script(
        "import sys\nprint('out', sys.stdout.isatty())\n"
        "print('err', sys.stderr.isatty(), file=sys.stderr)\n"
    )
    ours, theirs = pty.openpty()
    process = launcher.start("-np", "2", "--no-fork", script, stderr=theirs)
    os.close(theirs)
    out, _ = process.communicate(timeout=60)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert out.splitlines() == [b"[0-1] out False"]
    assert sorted(shown.splitlines()) == [b"[0] err True", b"[1] err False"]


def test_rank_0_hears_of_a_new_width(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([signal.SIGWINCH])\n"
        "print('columns', os.get_terminal_size(1).columns, flush=True)\n"
    )
    ours, theirs = pty.openpty()
    process = launcher.start("--no-fork", script, stdout=theirs, stderr=theirs)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(ours, 4096)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    os.close(theirs)
    process.send_signal(signal.SIGWINCH)
    assert process.wait(timeout=30) == 0
    assert b"columns 50" in os.read(ours, 4096)
    os.close(ours)


def test_closed_standard_streams_are_nobodys(launcher: Launcher) -> None:
    script = launcher.script(
        "import os\nprint('lost')\nopen('seen' + os.environ['RANK'], 'w').write('ran')\n"
    )
    for options in ([], ["--no-fork"]):
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" <&- >&-', "sh", *COMMAND, "-np", "2", *options, script],
            cwd=launcher.folder, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        for rank in "01":
            seen = launcher.folder / f"seen{rank}"
            assert seen.read_text() == "ran"
            seen.unlink()


def test_output_that_cannot_be_written_is_said(launcher: Launcher) -> None:
    script = launcher.script("print('much')\nimport time\ntime.sleep(0.2)\n")
    (launcher.folder / "logs").mkdir()
    (launcher.folder / "logs" / "rank-0.log").symlink_to("/dev/full")
    done = launcher.run("--no-fork", "--output-dir", "logs", script)
    assert (done.returncode, done.stdout) == (0, "much\n")
    assert "farandole: logs has become unwritable (No space left on device)" in done.stderr

    with open("/dev/full", "wb") as full:
        done = launcher.run("--no-fork", script, stdout=full)
    assert done.returncode == 141
    assert "standard output cannot be written to: No space left" in done.stderr


def _on_terminal(command: list[str], folder: Path, columns: int) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            chunk = os.read(ours, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert process.wait(timeout=10) == 0, shown
    return shown.decode()
