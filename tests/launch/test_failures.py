"""Real processes that fail in every way: one clear message, the right exit code, nothing left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import COMMAND, Launcher, wait_until

WAYS = """
import os, subprocess, sys, time
rank, way, who = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])

def fail():
    raise ValueError("something is wrong")

if rank != who:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)   # a grandchild that hides
    if way != "ignoring":
        print("ready", flush=True)
        time.sleep(1000)
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
if way in ("raise", "ignoring"):
    fail()
elif way == "exit":
    sys.exit(3)
elif way == "text":
    sys.exit("no such data set")
elif way == "hard":
    os._exit(7)
elif way.isdigit():
    os.kill(os.getpid(), int(way))
"""


@pytest.mark.parametrize("how", ["fork", "exec"])
@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("raise", 1, "ValueError: something is wrong"),
        ("exit", 3, "exited with code 3"),
        ("text", 1, "no such data set"),
        ("hard", 7, "exited with code 7"),
        ("9", 137, "killed by signal 9 (SIGKILL)"),
        ("11", 139, "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_first_failure_ends_the_job(
    launcher: Launcher, way: str, code: int, said: str, how: str
) -> None:
    script = launcher.script(WAYS)
    options = ["--no-fork"] if how == "exec" else []
    done = launcher.run("-np", "3", *options, script, way, "1")
    assert done.returncode == code, done.stderr
    message = done.stderr[done.stderr.index("farandole: rank 1") :]
    assert said in message
    assert "(stopped: ranks 0, 2)" in message
    assert "farandole/launch" not in message
    assert "farandole/launch" not in done.stderr or way == "11"
    assert not launcher.running()


def test_workers_that_ignore_sigterm_are_gone_within_three_seconds(launcher: Launcher) -> None:
    script = launcher.script(WAYS)
    process = launcher.start("-np", "2", "--no-fork", script, "ignoring", "1")
    assert process.stderr is not None
    while b"Traceback" not in process.stderr.readline():
        pass
    began = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - began < 5.0  # 2 s, SIGKILL, and a crowded machine
    assert process.returncode == 1
    assert not launcher.running()


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_nothing_outlives_a_killed_launcher(launcher: Launcher, how: str) -> None:
    script = launcher.script(
        "import os, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(1000)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    options = ["--no-fork"] if how == "exec" else []
    process = launcher.start("-np", "2", *options, script)
    assert process.stdout is not None
    assert b"ready" in process.stdout.readline()
    process.kill()
    process.wait()
    assert wait_until(lambda: not launcher.running()), launcher.running()


def test_workers_die_with_a_killed_agent(launcher: Launcher) -> None:
    script = launcher.script("import os, time\nprint(os.getppid(), flush=True)\ntime.sleep(1000)\n")
    process = launcher.start("-np", "2", script)
    assert process.stdout is not None
    agent = int(process.stdout.readline().split()[1])
    os.kill(agent, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"agent" in err
    assert not launcher.running()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_users_signal_is_passed_on_and_named(
    launcher: Launcher, number: signal.Signals, code: int
) -> None:
    script = launcher.script(
        "import signal, sys, time\n"
        "def save(number, frame):\n"
        "    print('saved', number, flush=True)\n"
        "    sys.exit(0)\n"
        f"signal.signal({int(number)}, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    process = launcher.start("-np", "2", "--no-fork", script)
    assert process.stdout is not None
    _read_until(
        process, rb"\[0-1\] ready|\[1\] ready(.|\n)*\[0\] ready|\[0\] ready(.|\n)*\[1\] ready"
    )
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"saved %d" % number in out
    assert signal.Signals(number).name.encode() in err


def test_grace_ends_with_sigkill_and_a_second_signal_ends_it_at_once(launcher: Launcher) -> None:
    script = launcher.script(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('never', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1000)\n"
    )
    short = launcher.start("--no-fork", "--grace", "0.3", script)
    _read_until(short, rb"ready")
    short.terminate()
    short.communicate(timeout=30)
    assert short.returncode == 143

    long = launcher.start("--no-fork", "--grace", "1000", script)
    _read_until(long, rb"ready")
    long.terminate()
    _read_until(long, rb"never")
    long.terminate()
    _, err = long.communicate(timeout=30)
    assert long.returncode == 143
    assert b"rank 0 had to be killed" in err


def test_a_rank_that_ends_without_init_is_named(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, time\n"
        "from helper_for_tests import enter_init\n"
        "if os.environ['RANK'] != '1':\n"
        "    store = enter_init()\n"
        "    time.sleep(1000)\n"
    )
    done = launcher.run("-np", "3", "--no-fork", script)
    assert done.returncode == 1
    assert "rank 1 ended without calling init()" in done.stderr
    assert "ranks 0, 2" in done.stderr


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_rank_that_never_calls_init_is_named_with_its_stack(launcher: Launcher, how: str) -> None:
    script = launcher.script(
        "import os, time\n"
        "from helper_for_tests import enter_init\n"
        "def read_the_data():\n"
        "    time.sleep(1000)\n"
        "if os.environ['RANK'] == '0':\n"
        "    read_the_data()\n"
        "store = enter_init()\n"
        "time.sleep(1000)\n"
    )
    options = ["--no-fork"] if how == "exec" else []
    done = launcher.run("-np", "2", "--start-timeout", "0.5", *options, script)
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("farandole: rank 0 has not called init()") :]
    assert "within 0.5 s" in message
    assert "rank 1 waited" in message
    assert "in read_the_data" in message
    assert not list(launcher.folder.glob("core*"))


def test_a_victim_is_not_the_cause(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys, time\n"
        "from farandole.core.errors import PeerLost\n"
        "if os.environ['RANK'] == '0':\n"
        "    raise PeerLost('rank 1 was lost', ranks=[1])\n"
        "time.sleep(0.1)\n"
        "sys.exit(5)\n"
    )
    for options in ([], ["--no-fork"]):
        done = launcher.run("-np", "2", *options, script)
        assert done.returncode == 5, done.stderr
        assert "rank 1 exited with code 5 (failed because of it: rank 0)" in done.stderr


def test_what_cannot_be_started_is_said(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--", "no-such-command")
    assert done.returncode == 2
    assert "no-such-command" in done.stderr
    (launcher.folder / "broken").write_text("#!/no/such/interpreter\n")
    (launcher.folder / "broken").chmod(0o755)
    done = launcher.run("-np", "2", "--", "./broken")
    assert done.returncode == 127
    assert "No such file" in done.stderr


def test_no_shared_memory_is_left(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "segment = SharedMemory(create=True, size=4096)\n"
        "open(f'/dev/shm/torch_{os.getpid()}_1_0', 'w').close()\n"
        "print('segment', segment.name, os.getpid(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    process = launcher.start("-np", "2", "--no-fork", script)
    out = _read_until(process, rb"(segment(.|\n)*){2}")
    names = re.findall(rb"segment (\S+) (\d+)", out)
    process.kill()
    process.wait()
    assert wait_until(lambda: not launcher.running())
    for name, pid in names:
        assert not Path("/dev/shm", name.decode().lstrip("/")).exists()
        assert not Path(f"/dev/shm/torch_{pid.decode()}_1_0").exists()


def test_a_closed_output_ends_the_job(launcher: Launcher) -> None:
    script = launcher.script("while True: print('y')\n")
    process = launcher.start("-np", "2", "--no-fork", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 141


def test_a_signal_before_the_ranks_have_started_lets_none_begin(launcher: Launcher) -> None:
    (launcher.folder / "torch.py").write_text(
        "import time\nopen('importing', 'w').close()\ntime.sleep(1000)\n"
    )
    script = launcher.script("open('began', 'w').close()\n")
    process = launcher.start("-np", "2", script, env={"PYTHONPATH": str(launcher.folder)})
    assert wait_until((launcher.folder / "importing").exists, 30.0)
    assert wait_until(lambda: _catches(process.pid, signal.SIGINT), 30.0)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 5.0
    assert not launcher.running()
    assert not (launcher.folder / "began").exists()


def test_a_signal_that_was_ignored_from_the_start_stays_ignored(launcher: Launcher) -> None:
    script = launcher.script("print('ready', flush=True)\nprint(input(), flush=True)\n")
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *COMMAND]
    process = subprocess.Popen(
        [*command, "--no-fork", script], cwd=launcher.folder,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    _read_until(process, rb"ready\n")
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(b"went on", timeout=30)
    assert out == b"went on\n"
    assert process.returncode == 0


def test_ctrl_c_after_a_failure_hurries_and_hides_nothing(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '2':\n"
        "    sys.exit(3)\n"
        "while True: time.sleep(1000)\n"
    )
    process = launcher.start("-np", "3", "--no-fork", script)
    assert wait_until(lambda: len(list(launcher.folder.glob("ready*"))) == 3, 30.0)
    (launcher.folder / "go").touch()
    _read_until(process, rb"no")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert b"rank 2 exited with code 3 (stopped: ranks 0-1)" in err


def test_the_end_of_a_process_that_a_script_forks_is_not_its_own(launcher: Launcher) -> None:
    script = launcher.script(
        "import os\n"
        "if os.fork() == 0:\n"
        "    raise ValueError('in the child')\n"
        "print('child:', os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = launcher.run("-v", script)
    assert "forked" in done.stderr
    assert "ValueError: in the child" in done.stderr
    assert (done.returncode, done.stdout) == (0, "child: 1\n")


def test_an_exception_of_many_odd_characters_is_told_of(launcher: Launcher) -> None:
    script = launcher.script("raise ValueError('\\U0001f600\\0' * 5000)\n")
    done = launcher.run("-v", script)
    assert "forked" in done.stderr
    assert "farandole: rank 0 raised ValueError." in done.stderr
    assert done.returncode == 1


def test_who_writes_on_after_a_ranks_end_holds_nothing_up(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--", "sh", "-c", "yes & echo last words >&2; exit 3")
    assert done.returncode == 3
    assert "    last words\n" in done.stderr
    assert not launcher.running()


def test_ranks_run_once_where_not_all_of_them_can_be_forked(launcher: Launcher) -> None:
    (launcher.folder / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "real, calls = os.fork, []\n"
        "def fork():\n"
        "    calls.append(0)\n"
        "    if len(calls) == 2: raise BlockingIOError(errno.EAGAIN, 'No more processes')\n"
        "    return real()\n"
        "if any(word.endswith('prefork.py') for word in sys.orig_argv): os.fork = fork\n"
    )
    script = launcher.script("import os\nopen('ran', 'a').write(os.environ['RANK'])\n")
    done = launcher.run("-v", "-np", "2", script, env={"PYTHONPATH": str(launcher.folder)})
    assert "executed (fork failed: No more processes)" in done.stderr
    assert done.returncode == 0
    assert sorted((launcher.folder / "ran").read_text()) == ["0", "1"]


def test_more_ranks_than_descriptors_is_said(launcher: Launcher) -> None:
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 60; exec "$@"', "sh", *COMMAND, "-np", "30", "--", "true"],
        cwd=launcher.folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 127
    assert "could not be started: Too many open files" in done.stderr
    assert "Traceback" not in done.stderr


def _catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
    return bool(caught >> (number - 1) & 1)


def _read_until(process: subprocess.Popen[bytes], pattern: bytes) -> bytes:
    assert process.stdout is not None
    read = b""
    while not re.search(pattern, read):
        chunk = os.read(process.stdout.fileno(), 4096)
        assert chunk, read
        read += chunk
    return read
