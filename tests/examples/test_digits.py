"""The example is what the README says: five lines, and at least 97 % right."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SINGLE = ROOT / "examples" / "torch" / "digits_single.py"
MANY = ROOT / "examples" / "torch" / "digits.py"


def code(script: Path) -> list[str]:
    """The lines below the docstring that are not blank."""
    body = script.read_text().split('"""\n', 1)[1]
    return [line for line in body.splitlines() if line.strip()]


def changed_lines() -> list[str]:
    """The lines of digits.py that are new or other than in its single-process twin."""
    diff = list(difflib.ndiff(code(SINGLE), code(MANY)))
    removed = [line for line in diff if line.startswith("- ")]
    added = [line[2:].strip() for line in diff if line.startswith("+ ")]
    assert len(removed) <= len(added)
    return added


def test_at_most_five_lines_differ() -> None:
    assert 1 <= len(changed_lines()) <= 5


def test_the_readme_shows_each_of_them() -> None:
    readme = (ROOT / "README.md").read_text()
    for number, line in enumerate(changed_lines(), start=1):
        assert f"{line}  # {number}\n" in readme


def train(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    accuracies = re.findall(r"test accuracy (\d+\.\d) %", done.stdout)
    assert len(accuracies) == 1, done.stdout
    assert float(accuracies[0]) >= 97.0
    assert "of 360 test images right" in done.stdout
    return done.stdout


def test_two_ranks_train_it_and_say_where_the_time_went() -> None:
    farandole = str(Path(sys.executable).with_name("farandole"))
    output = train(farandole, "run", "-np", "2", str(MANY))
    assert re.search(r"samples/s on 2 ranks", output)
    assert re.search(r"^rank +computing +communicating +waiting for data$", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SINGLE, MANY], ids=lambda path: path.stem)
def test_one_process_trains_it(script: Path) -> None:
    train(sys.executable, str(script))
