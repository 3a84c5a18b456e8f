"""What ``farandole submit`` costs of its own: the command from its start to its end.

    python bench/submit.py [--rounds 9] [--json]

``render`` is ``farandole submit --dry-run``, which prints what would be created. ``submit`` is
``farandole submit --detach``: the checks beforehand, and all objects of a job, against the API
server of the tests, which runs in this process, on this machine, and checks what it is sent
against Kubernetes' schemas: its time is not taken off. Both begin with a Python that has imported
nothing. Both turn about; one of each comes first and does not count. ``--json`` prints one line at
the end: ``{"seconds": {"render": median, "submit": median}}``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "kubernetes"
LIMIT = 60.0
"""Seconds for one command."""

JOB = ("--image", "example/torch:1", "--nodes", "4", "--gpus", "8", "train.py", "--epochs", "90")
COMMANDS = {"render": ("submit", "--dry-run", *JOB), "submit": ("submit", "--detach", *JOB)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each command is run")
    parser.add_argument("--json", action="store_true", help="print the figures as one line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farandole-submit-") as folder:
        seconds = measure(Path(folder), options.rounds)
    for name, times in seconds.items():
        least, most = min(times), max(times)
        print(f"{name}: {statistics.median(times):.2f} s ({least:.2f} to {most:.2f})")
    if options.json:
        medians = {name: round(statistics.median(times), 4) for name, times in seconds.items()}
        print(json.dumps({"seconds": medians}))


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """The seconds of each command, round by round."""
    sys.path.insert(0, str(TESTS))
    from api_server import ApiServer

    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text("import farandole.torch as hvd\n")
    server = ApiServer()
    try:
        variables = {**os.environ, "KUBECONFIG": str(server.kubeconfig(folder))}
        for name in COMMANDS:
            _seconds(name, project, variables)
        seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            for name, times in seconds.items():
                times.append(_seconds(name, project, variables))
    finally:
        server.close()
    return seconds


def _seconds(name: str, project: Path, variables: Mapping[str, str]) -> float:
    words = [sys.executable, "-m", "farandole.cli.main", *COMMANDS[name]]
    began = time.perf_counter()
    done = subprocess.run(
        words,
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    took = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{name} failed: {done.stderr}")
    return took


if __name__ == "__main__":
    main()
