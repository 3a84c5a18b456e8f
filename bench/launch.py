"""From command to first allreduce done: ``farandole run`` against ``torchrun``.

    python bench/launch.py [--rounds 9] [--json]

Both start the same small script, which makes its group and sums one tensor over all ranks on the
CPU; theirs with ``torch.distributed`` and Gloo. The time ends when the last rank has its result.
The two take turns, and who goes first alternates, so that both meet the same noise of the machine.
A ratio is the median over the rounds of our time over theirs. ``--json`` prints one line at the
end: ``{"ratios": {"2 ranks": …, "4 ranks": …}, …}``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (2, 4)
LIMIT = 120.0
"""Seconds; a launch that takes longer has failed."""

DONE = """
import os, time
mark = os.path.join(os.environ["LAUNCH_BENCH"], os.environ["RANK"])
with open(mark + ".part", "w") as file:
    file.write(str(time.monotonic()))
os.rename(mark + ".part", mark)
"""

OURS = f"""
import torch
import farandole.torch as hvd

hvd.init()
total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
{DONE}
assert total.tolist() == [hvd.size()] * 4
hvd.shutdown()
"""

THEIRS = f"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4)
dist.all_reduce(total)
{DONE}
assert total.tolist() == [dist.get_world_size()] * 4
dist.destroy_process_group()
"""


def command(system: str, size: int, script: Path) -> list[str]:
    """The shortest command that a user would type."""
    folder = Path(sys.executable).parent
    if system == "farandole":
        return [str(folder / "farandole"), "run", "-np", str(size), str(script)]
    return [str(folder / "torchrun"), "--standalone", f"--nproc-per-node={size}", str(script)]


def measure(system: str, size: int, folder: Path) -> float:
    """Seconds from the command to the last rank's result."""
    script = folder / f"with_{system}.py"
    marks = folder / "marks"
    marks.mkdir()
    environ = {**os.environ, "LAUNCH_BENCH": str(marks), "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed, both are compiled already
    began = time.monotonic()
    done = subprocess.run(
        command(system, size, script),
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{system} failed on {size} ranks:\n{done.stdout}{done.stderr}")
    ends = [float(mark.read_text()) for mark in marks.iterdir()]
    assert len(ends) == size
    shutil.rmtree(marks)
    return max(ends) - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="launches of each, per size")
    parser.add_argument("--json", action="store_true", help="print the figures as one line")
    options = parser.parse_args()
    figures: dict[str, dict[str, object]] = {"ratios": {}, "farandole": {}, "torchrun": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "with_farandole.py").write_text(OURS)
        (folder / "with_torchrun.py").write_text(THEIRS)
        print(f"{'':8}  {'farandole':>10}  {'torchrun':>10}  {'ratio':>6}   (seconds, medians)")
        for size in SIZES:
            times: dict[str, list[float]] = {"farandole": [], "torchrun": []}
            for system in times:
                measure(system, size, folder)  # files come into the system's cache
            for number in range(options.rounds):
                for system in sorted(times, reverse=bool(number % 2)):
                    times[system].append(measure(system, size, folder))
            pairs = zip(times["farandole"], times["torchrun"], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            medians = {system: statistics.median(each) for system, each in times.items()}
            label = f"{size} ranks"
            figures["ratios"][label] = round(ratio, 3)
            for system, seconds in medians.items():
                figures[system][label] = round(seconds, 3)
            columns = "  ".join(f"{seconds:10.2f}" for seconds in medians.values())
            print(f"{label:8}  {columns}  {ratio:6.2f}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
