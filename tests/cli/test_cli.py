"""The command line: what it says, how fast, and with what exit code."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner

from farandole.cli.commands import cli

MAIN = [sys.executable, "-c", "from farandole.cli.main import main; main()"]


def _farandole(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )


def test_help_names_the_commands_and_is_quick() -> None:
    times = []
    for _ in range(5):
        began = time.monotonic()
        done = _farandole("--help")
        times.append(time.monotonic() - began)
    assert "run " in done.stdout
    assert "doctor" in done.stdout
    assert min(times) < 0.3


def test_the_options_of_run() -> None:
    text = " ".join(CliRunner().invoke(cli, ["run", "--help"]).output.split())
    for option in (
        "-np", "-m", "--env", "--output-dir", "--start-timeout", "--grace", "--no-fork",
        "--dry-run", "--verbose",
    ):  # fmt: skip
        assert option in text
    assert "number of GPUs, or 1" in text


def test_version() -> None:
    assert _farandole("--version").stdout.startswith("farandole 0.")


def test_mistakes_are_told_with_exit_code_2(tmp_path: Path) -> None:
    for arguments, said in (
        (["run", "absent.py"], "no file absent.py"),
        (["run", "-np", "0", "x.py"], "0 is not in the range"),
        (["run", "--env", "X", "x.py"], "--env NAME=VALUE"),
        (["run", "absent.yaml"], "No such file"),
        (["walk"], "No such command"),
        (["run"], "Missing argument"),
    ):
        done = _farandole(*arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_dry_run_shows_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    done = _farandole(
        "run", "-np", "3", "--env", "A=1", "--dry-run", "train.py", "--lr", "1", cwd=tmp_path
    )
    assert done.returncode == 0
    assert "started\n" not in done.stdout
    assert "python train.py --lr 1" in done.stdout
    assert "FARANDOLE_SIZE=3" in done.stdout
    assert "A=1" in done.stdout
    assert "FARANDOLE_SECRET=hidden" in done.stdout
