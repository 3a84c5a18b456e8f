"""What ``farandole submit`` costs of its own: the command from its start to its end.

    python bench/submit.py [--rounds 9] [--json]

``render`` is ``farandole submit --dry-run``, which prints what would be created. ``submit`` is
``farandole submit --detach``: the checks beforehand, and all objects of a job, against the API
server of the tests, which runs in this process, on this machine, and checks what it is sent
against Kubernetes' schemas: its time is not taken off. Both begin with a Python that has imported
nothing. Both turn about; one of each comes first and does not count. *Our own* is the processor's
time of the command, in which the server has no part. ``--json`` prints one line at the end:
``{"seconds": {"render": median, "render, our own": median, "submit": …}}``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
        print(f"{name:16} {statistics.median(times):.2f} s ({least:.2f} to {most:.2f})")
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
        seconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name in COMMANDS:
                wall, own = _seconds(name, project, variables)
                seconds.setdefault(name, []).append(wall)
                seconds.setdefault(f"{name}, our own", []).append(own)
    finally:
        server.close()
    return seconds


def _seconds(name: str, project: Path, variables: Mapping[str, str]) -> tuple[float, float]:
    """From its start to its end, and of the processor."""
    words = [sys.executable, "-m", "farandole.cli.main", *COMMANDS[name]]
    began, used = time.perf_counter(), _used()
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
    return took, _used() - used


def _used() -> float:
    """Seconds of the processor that the commands so far have taken."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
