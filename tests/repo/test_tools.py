"""The Makefile and the benchmarks, as far as they can be tried without their work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "check", "bench"])
def test_each_target_sets_itself_up_first(target: str, tmp_path: Path) -> None:
    planned = run("make", "--dry-run", target, f"VENV={tmp_path / 'venv'}", "TORCH=torch").stdout
    steps = [
        planned.index(step)
        for step in ("-m venv", "install --quiet 'torch'", "install --quiet --editable")
    ]
    assert steps == sorted(steps)


def test_a_python_that_cannot_do_it_is_named(tmp_path: Path) -> None:
    done = run("make", "test", "PYTHON=false", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "Farandole needs Python 3.10 or later" in done.stdout


def test_ci_runs_check_and_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-2:] == ["make check", "make test"]


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.name)
def test_each_benchmark_explains_itself(script: Path) -> None:
    done = run(sys.executable, str(script), "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
