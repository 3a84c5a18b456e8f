"""Starts the ranks of a benchmark, each with one thread, and returns what they measured.

Where MPI is to be measured, ``mpiexec`` starts the ranks, else they are children of this process.
Either way they meet in a store that this process lends them, and rank 0 leaves the result in a
file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farandole.core.config import environment
from farandole.core.errors import JobFailed, MissingExtraError
from farandole.core.secret import Secret
from farandole.core.store import StoreServer

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PAUSE = 0.02
"""Seconds between two looks at the ranks."""


def mpi_is_installed() -> bool:
    """Whether ranks can be started by ``mpiexec`` and speak MPI."""
    return importlib.util.find_spec("mpi4py") is not None and _mpiexec() is not None


def run(
    benchmark: str, ranks: int, options: dict[str, Any], *, mpi: bool = False, limit: float
) -> Any:
    """Run ``farandole.bench.ranks``'s ``benchmark`` on ``ranks`` processes of this machine.

    Raises ``JobFailed``, with what the ranks have said, when one fails or ``limit`` seconds have
    passed; nothing is left running. ``MissingExtraError`` when MPI is not installed.
    """
    if mpi and not mpi_is_installed():
        raise MissingExtraError(
            "Measuring MPI needs mpi4py and an MPI: pip install mpi4py mpich (or leave out mpi)."
        )
    secret = Secret.new()
    server = StoreServer(secret)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "request.json").write_text(
                json.dumps({"benchmark": benchmark, "options": options})
            )
            variables = {
                **environment(),
                **dict.fromkeys(_THREADS, "1"),
                "FARANDOLE_SIZE": str(ranks),
                "FARANDOLE_LOCAL_SIZE": str(ranks),
                "FARANDOLE_STORE": str(server.address),
                "FARANDOLE_SECRET": secret.hex(),
            }
            _run_all(_commands(folder, ranks, mpi=mpi), variables, folder, limit)
            return json.loads((folder / "result.json").read_text())
    finally:
        server.close()


def _mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _commands(folder: Path, ranks: int, *, mpi: bool) -> list[list[str]]:
    each = [
        ["env", f"FARANDOLE_RANK={rank}", f"FARANDOLE_LOCAL_RANK={rank}",
         sys.executable, "-m", "farandole.bench.ranks", str(folder)]
        for rank in range(ranks)
    ]  # fmt: skip
    if not mpi:
        return each
    joined = [str(_mpiexec())]
    for command in each:
        joined += [":"] * (command is not each[0]) + ["-n", "1", *command]
    return [joined]


def _run_all(
    commands: Sequence[Sequence[str]], variables: dict[str, str], folder: Path, limit: float
) -> None:
    """Run ``commands`` to their end; one that fails, or the limit, ends all."""
    said = folder / "output"
    with said.open("w") as output:
        processes = [
            subprocess.Popen(
                command, env=variables, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        try:
            problem = _wait(processes, time.monotonic() + limit)
        finally:
            for process in processes:
                _end(process)
    if problem:
        text = said.read_text().strip()
        raise JobFailed(f"The benchmark's ranks {problem}. They said:\n{text[-4000:]}")


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float) -> str:
    """Wait for all; what went wrong, if something did."""
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            return "failed"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > end:
            return "did not end in time"
        time.sleep(_PAUSE)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what a command has started: its session has no other processes."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()
