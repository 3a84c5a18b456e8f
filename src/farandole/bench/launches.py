"""From command to first allreduce done: ``farandole run`` against ``torchrun``.

Both start the same small script, which makes its group and sums one tensor over all ranks on the
CPU; theirs with ``torch.distributed`` and Gloo. The time ends when the last rank has its result.
The two take turns, and who goes first alternates.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from farandole.bench.figures import Series
from farandole.core.config import environment
from farandole.core.errors import JobFailed

LIMIT = 120.0
"""Seconds; a launch that takes longer has failed."""

SYSTEMS = ("farandole", "torchrun")

_DONE = """
import os, sys, time
mark = os.path.join(sys.argv[1], str(rank))
with open(mark + ".part", "w") as file:
    file.write(str(time.monotonic()))
os.rename(mark + ".part", mark)
"""

_SCRIPTS = {
    "farandole": f"""
import torch
import farandole.torch as hvd

hvd.init()
total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
rank = hvd.rank()
{_DONE}
assert total.tolist() == [hvd.size()] * 4
hvd.shutdown()
""",
    "torchrun": f"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4)
dist.all_reduce(total)
rank = dist.get_rank()
{_DONE}
assert total.tolist() == [dist.get_world_size()] * 4
dist.destroy_process_group()
""",
}


def measure(ranks: int, rounds: int) -> dict[str, Series]:
    """Seconds of ``rounds`` launches of ``ranks`` ranks, by system.

    Raises ``JobFailed`` when one does not work.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for system in SYSTEMS:
            (folder / f"with_{system}.py").write_text(_SCRIPTS[system])
            _launch(system, ranks, folder)  # files come into the machine's cache
        taken: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for number in range(rounds):
            for system in sorted(SYSTEMS, reverse=bool(number % 2)):
                taken[system].append(_launch(system, ranks, folder))
    return dict(taken)


def _command(system: str, ranks: int, script: Path) -> list[str]:
    """The shortest command that a user would type."""
    folder = Path(sys.executable).parent
    if system == "farandole":
        return [str(folder / "farandole"), "run", "-np", str(ranks), str(script)]
    return [str(folder / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", str(script)]


def _launch(system: str, ranks: int, folder: Path) -> float:
    """Seconds from the command to the last rank's result."""
    with tempfile.TemporaryDirectory(dir=folder) as marks:
        environ = {**environment(), "OMP_NUM_THREADS": "1"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed, both are compiled already
        began = time.monotonic()
        done = subprocess.run(
            [*_command(system, ranks, folder / f"with_{system}.py"), marks],
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode != 0:
            raise JobFailed(f"{system} failed on {ranks} ranks:\n{done.stdout}{done.stderr}")
        ends = [float(mark.read_text()) for mark in Path(marks).iterdir()]
    assert len(ends) == ranks
    return max(ends) - began
