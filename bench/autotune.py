"""Autotuning from a bad start against the best of the settings that a user would try by hand.

    python bench/autotune.py [--model NAME] [--rounds 4] [--json]

Two ranks of one thread each, on CPU, and a model of ``bench/step.py``. First it is trained with
autotuning, from buckets of 64 KiB and for at most 200 steps. Then, in turn and in several rounds,
each of the settings by hand and the one that autotuning has chosen are in force for a few steps. A
step begins on both ranks at once and takes as long as on the slowest; a setting's time is the
median of its steps. ``--json`` prints the figures as one line at the end; the ratio is the chosen
setting's time over that of the best one by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import farandole.torch as hvd
from farandole.bench.models import MODELS, make_model, make_optimizer, make_step
from step import RANKS, slowest, timed

MIB = 1024 * 1024
START = {"bucket_bytes": 64 * 1024, "first_bucket_bytes": 64 * 1024}
BY_HAND = [
    {"bucket_bytes": bucket, "first_bucket_bytes": min(bucket, MIB)}
    for bucket in (64 * 1024, 256 * 1024, MIB, 4 * MIB, 25 * MIB, 100 * MIB)
]
MOST_STEPS = 200
STEPS, WARM_UP = 6, 2
"""Of a setting in a round."""


def put_in_force(setting: dict[str, int], **more: str) -> None:
    """Settings are read when the ranks meet: let them meet anew."""
    hvd.shutdown()
    os.environ.update({f"FARANDOLE_{name.upper()}": str(each) for name, each in setting.items()})
    os.environ.update(more)
    hvd.init()


def tune(kind: Any, log: Path) -> tuple[dict[str, int], int]:
    """What autotuning chooses, and after how many steps."""
    put_in_force(START, FARANDOLE_AUTOTUNE="1", FARANDOLE_AUTOTUNE_LOG=str(log))
    model = make_model(kind)
    step = make_step(
        model, hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    )
    for number in range(1, MOST_STEPS + 1):
        step(kind.batch())
        dist.barrier()  # rank 0 writes the log, both read it
        last = json.loads(log.read_text().splitlines()[-1])
        if "chosen" in last:
            os.environ["FARANDOLE_AUTOTUNE"] = "0"
            return last["chosen"], number
    raise SystemExit(f"nothing was chosen in {MOST_STEPS} steps: {log.read_text()}")


def compare(kind: Any, settings: list[dict[str, int]], rounds: int) -> list[float]:
    """The seconds of a step with each of the settings."""
    model = make_model(kind)
    step = make_step(
        model, hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    )
    seconds: list[list[float]] = [[] for _ in settings]
    for number in range(rounds):
        order = list(range(len(settings)))
        for place in order[number % 2 :] + order[: number % 2]:
            put_in_force(settings[place])
            taken = [timed(step, kind.batch()) for _ in range(WARM_UP + STEPS)]
            seconds[place] += taken[WARM_UP:]
    return [statistics.median(one) for one in slowest(seconds)]


def work(name: str, rounds: int, folder: str) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    kind = MODELS[name]
    chosen, steps = tune(kind, Path(folder, "log"))
    seconds = compare(kind, [*BY_HAND, chosen], rounds)
    if hvd.rank() == 0:
        result = {"chosen": chosen, "steps": steps, "seconds": seconds}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    hvd.shutdown()


def run(name: str, rounds: int) -> dict[str, Any]:
    """Start the ranks and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        farandole = Path(sys.executable).with_name("farandole")
        worker = [__file__, "--worker", folder, "--model", name, "--rounds", str(rounds)]
        subprocess.run(
            [farandole, "run", "-np", str(RANKS), *worker],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=True,
        )
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return result


def report(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Print the figures and return those that count."""
    *by_hand, tuned = result["seconds"]
    best = min(by_hand)
    print(f"{name}, {RANKS} ranks: milliseconds of a step")
    for setting, seconds in zip(BY_HAND, by_hand, strict=True):
        print(f"  {1000 * seconds:7.1f}  {setting}")
    print(f"  {1000 * tuned:7.1f}  {result['chosen']}, chosen after {result['steps']} steps")
    print(f"  chosen over the best by hand: {tuned / best:.3f}, the start: {by_hand[0] / best:.3f}")
    return {
        "ratios": {f"{name} autotune": round(tuned / best, 4)},
        "start": round(by_hand[0] / best, 4),
        "steps": result["steps"],
        "chosen": result["chosen"],
        "seconds": [round(each, 5) for each in result["seconds"]],
    }


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.model, arguments.rounds, arguments.worker)
        return
    figures = report(arguments.model, run(arguments.model, arguments.rounds))
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
