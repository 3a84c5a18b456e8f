"""``horovod.run`` leaves nothing behind, however its program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import pathlib, sys
from farandole.horovod.runner import run

def wait():
    import pathlib, time
    pathlib.Path("running").touch()
    time.sleep(100)

try:
    run(wait, num_proc=1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def running(mark: str) -> list[str]:
    """The processes that carry a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark.encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def wait_until(condition: object, limit: float) -> bool:
    end = time.monotonic() + limit
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def mark() -> Iterator[str]:
    made = uuid.uuid4().hex
    yield made
    assert wait_until(lambda: not running(made), 10.0), running(made)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_program(tmp_path: Path, mark: str, number: signal.Signals) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path, env={**os.environ, "FARANDOLE_TEST_MARK": mark},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert wait_until((tmp_path / "running").exists, 60.0)
    assert len(running(mark)) > 2
    program.send_signal(number)
    out, _ = program.communicate(timeout=60)
    assert out == ("interrupted\n" if number == signal.SIGINT else "")
