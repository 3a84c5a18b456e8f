"""A forked worker cannot be told from a fresh ``python script.py``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher

from farandole.launch import host

PROBE = Path(__file__).with_name("probe.py")
OURS = {"100"}
"""The descriptor of the pipe for the failure report."""


@pytest.mark.parametrize(
    ("form", "threads"),
    [
        ("script", None),
        ("module", "2"),
        pytest.param("script", "2", marks=pytest.mark.slow),
        pytest.param("path with a folder", None, marks=pytest.mark.slow),
    ],
)
def test_a_program_sees_what_a_fresh_python_shows(
    launcher: Launcher, form: str, threads: str | None
) -> None:
    (launcher.folder / "package").mkdir()
    shutil.copy(PROBE, launcher.folder / "package" / "probe.py")
    shutil.copy(PROBE, launcher.folder / "probe.py")
    arguments = {
        "script": ["probe.py", "a", "-b", "--", "c d"],
        "module": ["-m", "package.probe", "a", "-b"],
        "path with a folder": ["package/probe.py"],
    }[form]
    (launcher.folder / "input").write_text("line\r\nline\n")
    options = [] if threads is None else ["--env", f"OMP_NUM_THREADS={threads}"]
    with open(launcher.folder / "input") as stdin:
        done = launcher.run("-v", *options, *arguments, stdin=stdin)
    assert "forked" in done.stderr
    ours = json.loads(done.stdout)
    with open(launcher.folder / "input") as stdin:
        fresh = json.loads(
            subprocess.run(
                [sys.executable, *arguments],
                cwd=launcher.folder,
                env=ours["environ"],
                stdin=stdin,
                capture_output=True,
                check=True,
            ).stdout
        )
    ours["descriptors"] = [fd for fd in ours["descriptors"] if fd not in OURS]
    assert _plain(ours) == _plain(fresh)


def _plain(seen: Any) -> Any:
    return json.loads(re.sub(r" at 0x[0-9a-f]+", "", json.dumps(seen)))


ENDINGS = {
    "returns": "print('done')",
    "raises": "def f():\n    1 / 0\nf()",
    "raises from": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('no') from e"
    ),
    "exits": "import sys; sys.exit(4)",
    "exits with text": "import sys; sys.exit('the end')",
    "exits hard": "import os; print('lost?', flush=True); os._exit(5)",
    "interrupt": "raise KeyboardInterrupt",
    "syntax": "x = = 1",
    "warns": "import warnings\ndef f():\n    warnings.warn('old')\nf()",
    "atexit": "import atexit; atexit.register(print, 'bye'); raise ValueError('x')",
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    ),
    "own hook": (
        "import sys\n"
        "sys.excepthook = lambda kind, error, frames: print('hook', kind, frames.tb_lineno)\n"
        "raise OSError('x')"
    ),
    "group": "raise BaseException('x')",
    "closed": "import sys; sys.stdout.close()",
    "import fails": "import no_such_module",
    "thread raises": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='T').start()",
    "encoding": "# coding: latin-1\nprint(ascii('\\xe9'))",
}


SAMPLE = {"returns", "raises from", "exits with text", "interrupt", "warns"}


@pytest.mark.parametrize(
    "way", [way if way in SAMPLE else pytest.param(way, marks=pytest.mark.slow) for way in ENDINGS]
)
def test_a_program_ends_as_in_a_fresh_python(launcher: Launcher, way: str) -> None:
    script = launcher.script(ENDINGS[way])
    done = launcher.run("-v", script)
    forked, _, stderr = done.stderr.partition("\n")
    assert "forked" in forked
    fresh = subprocess.run(
        [sys.executable, script],
        cwd=launcher.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == fresh.stdout
    own, _, _ = stderr.partition("farandole: rank 0")
    assert own == fresh.stderr
    expected = 128 - fresh.returncode if fresh.returncode < 0 else fresh.returncode
    assert done.returncode == expected


def test_random_states_differ_between_ranks_and_runs(launcher: Launcher) -> None:
    script = launcher.script(
        "import json, multiprocessing, random, uuid\n"
        "import numpy, torch\n"
        "print(json.dumps([torch.rand(1).item(), numpy.random.rand(), random.random(),\n"
        "    torch.initial_seed(), str(uuid.uuid4()),\n"
        "    multiprocessing.current_process().authkey.hex()]))\n"
    )
    draws: list[list[Any]] = []
    for _ in range(2):
        done = launcher.run("-np", "2", script)
        draws += [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(draws) == 4
    for kind in zip(*draws, strict=True):
        assert len(set(kind)) == 4


@pytest.mark.slow
def test_data_loaders_work_in_every_start_method(launcher: Launcher) -> None:
    script = launcher.script(
        "import sys, torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.tensor(i * i)\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1,\n"
        "            multiprocessing_context=method)\n"
        "        print(method, sum(int(batch.sum()) for batch in loader))\n"
    )
    done = launcher.run("-np", "2", script)
    assert done.returncode == 0, done.stderr
    for method in ("fork", "spawn", "forkserver"):
        assert done.stdout.count(f"{method} 140") in (1, 2)  # 1: both ranks in one line


def test_what_could_tell_the_difference_is_not_forked(launcher: Launcher) -> None:
    (launcher.folder / "queue.py").write_text("MINE = True\n")
    done = launcher.run("-v", launcher.script("import queue; print(queue.MINE)"))
    assert done.stdout == "True\n"
    assert "its own queue.py" in done.stderr
    (launcher.folder / "queue.py").unlink()

    traced = launcher.folder / "traced"
    traced.mkdir()
    (traced / "sitecustomize.py").write_text("import sys; sys.setprofile(lambda *_: None)\n")
    environ = {"PYTHONPATH": str(traced)}
    done = launcher.run("-v", launcher.script("print('done')"), env=environ)
    assert done.stdout == "done\n"
    assert "profiler" in done.stderr

    done = launcher.run("-v", "--", "echo", "done")
    assert done.stdout == "done\n"


def test_python_of_this_environment_is_recognised(launcher: Launcher) -> None:
    script = launcher.script("import sys; print(sys.argv)")
    done = launcher.run("-v", sys.executable, script, "a")
    assert "forked" in done.stderr
    assert done.stdout == f"['{script}', 'a']\n"
    done = launcher.run("-v", "--", sys.executable, "-u", script)
    assert "executed" in done.stderr
    assert done.returncode == 0


def test_each_rank_has_its_share_of_the_cores(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    )
    share = str(max(1, host.usable_cores() // 2))
    assert launcher.run("-np", "2", script).stdout.split()[1:3] == [share, share]
    done = launcher.run("-np", "2", "--env", "OMP_NUM_THREADS=2", script)
    assert done.stdout.split()[1:3] == ["2", "2"]
