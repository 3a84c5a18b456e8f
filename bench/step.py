"""Train step on two ranks: Farandole's optimizer against DistributedDataParallel at its best.

    python bench/step.py [--model NAME] [--pairs 200] [--runs 1] [--json]

Two models, two ranks of one thread each, on CPU: a 6-layer transformer of 9 M parameters and a
ResNet-18 for images of 32 pixels. Each rank holds three copies of the model, one that Farandole
trains, one that DistributedDataParallel trains and one that trains without communication, in one
process and on the same batches. They take steps in turn, in rotated order, so that each triple of
steps meets the same noise of the machine. A step begins on both ranks at once and takes as long as
on the slowest.

DistributedDataParallel's settings (``gradient_as_bucket_view``, ``static_graph``,
``bucket_cap_mb``) are chosen for it by a calibration at the start of each run, and it does not
broadcast buffers, as Farandole does not; Farandole runs as it comes.

Two ratios come out, ours over theirs, from the triples of all runs:

* of the *step*: the median of paired steps;
* of the *visible communication*, which is a step's time less that of the same step without
  communication: the median of ours over the median of theirs, with the 90 % interval of a bootstrap
  over the triples. Where theirs is under a tenth of their step there is nothing to judge.

The *floor* is what nobody who collects gradients in buckets can be faster than on these cores: each
gradient scaled into a buffer of the engine's, and that buffer summed, with nothing else about it.

``--json`` prints the figures as one line at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from farandole.bench.models import MODELS, Batch, Step, make_model, make_optimizer, make_step
from farandole.comm import group as groups
from farandole.comm.engines.base import Reduction

RANKS = 2
WARM_UP = 5
CALIBRATION_ROUNDS = 7
SYSTEMS = ("farandole", "ddp", "local")
RESAMPLES = 2000
LEAST_SHARE = 0.1
"""Of DistributedDataParallel's step, below which its communication says nothing."""


def timed(step: Step, batch: Batch) -> float:
    """Seconds of one step of this rank, begun together with the other."""
    dist.barrier()
    began = time.perf_counter()
    step(batch)
    return time.perf_counter() - began


def slowest(seconds: list[list[float]]) -> list[list[float]]:
    """Of each measurement, that of the slowest rank."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def floor(model: nn.Module, rounds: int) -> float:
    """Seconds to scale the gradients of ``model`` into one buffer and to sum it."""
    engine = groups.root().current.engine("named", torch.device("cpu"))
    gradients = [torch.randn_like(each).view(-1) for each in model.parameters()]
    whole = engine.buffer(sum(each.numel() for each in gradients), torch.float32)
    places = whole.split([each.numel() for each in gradients])
    half = torch.tensor(0.5)
    seconds = []
    for _ in range(WARM_UP + rounds):
        dist.barrier()
        began = time.perf_counter()
        for gradient, place in zip(gradients, places, strict=True):
            torch.mul(gradient, half, out=place)
        engine.allreduce(whole, Reduction.SUM).wait()
        seconds.append([time.perf_counter() - began])
    return statistics.median(each for (each,) in slowest(seconds[WARM_UP:]))


def choose_ddp_settings(kind: Any) -> dict[str, Any]:
    """The fastest of DistributedDataParallel's settings for this model on this machine, now."""
    settings = [
        {
            "broadcast_buffers": False,
            "gradient_as_bucket_view": view,
            "static_graph": static,
            "bucket_cap_mb": cap,
        }
        for view in (False, True)
        for static in (False, True)
        for cap in (5, 25, 100)
    ]
    steps = []
    for one in settings:
        model = DistributedDataParallel(make_model(kind), **one)
        steps.append(make_step(model, make_optimizer(model)))
    batch = kind.batch()
    for step in steps * 2:
        step(batch)
    rounds = [[timed(step, batch) for step in steps] for _ in range(CALIBRATION_ROUNDS)]
    medians = [statistics.median(one) for one in zip(*slowest(rounds), strict=True)]
    return settings[medians.index(min(medians))]


def measure(name: str, pairs: int) -> dict[str, Any]:
    """One run of one model: the seconds of each step of each system."""
    kind = MODELS[name]
    settings = choose_ddp_settings(kind)
    models = {system: make_model(kind) for system in SYSTEMS}
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(models["farandole"]), models["farandole"].named_parameters()
    )
    ddp = DistributedDataParallel(models["ddp"], **settings)
    steps = {
        "farandole": make_step(models["farandole"], optimizer),
        "ddp": make_step(ddp, make_optimizer(ddp)),
        "local": make_step(models["local"], make_optimizer(models["local"])),
    }
    orders = list(itertools.permutations(SYSTEMS))
    torch.manual_seed(1 + hvd.rank())
    seconds: list[list[float]] = []
    for pair in range(WARM_UP + pairs):
        batch = kind.batch()
        taken = {system: timed(steps[system], batch) for system in orders[pair % len(orders)]}
        seconds.append([taken[system] for system in SYSTEMS])
    check_equal(models["farandole"], models["ddp"])
    columns = zip(*slowest(seconds[WARM_UP:]), strict=True)
    return {
        "ddp settings": settings,
        "floor": floor(models["local"], pairs // 4),
        **dict(zip(SYSTEMS, map(list, columns), strict=True)),
    }


def check_equal(ours: nn.Module, theirs: nn.Module) -> None:
    """Both have taken the same steps on the same batches: a fast wrong answer is no result."""
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def work(names: list[str], pairs: int, output: str) -> None:
    """What each rank does in one run."""
    # Its successor in newer versions of torch does not exist in older ones.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    result = {name: measure(name, pairs) for name in names}
    if hvd.rank() == 0:
        Path(output).write_text(json.dumps(result))
    dist.destroy_process_group()
    hvd.shutdown()


def run_once(names: list[str], pairs: int) -> dict[str, Any]:
    """Start the two ranks and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        farandole = Path(sys.executable).with_name("farandole")
        worker = [__file__, "--worker", str(output), "--pairs", str(pairs)]
        for name in names:
            worker += ["--model", name]
        subprocess.run(
            [farandole, "run", "-np", str(RANKS), *worker],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=True,
        )
        result: dict[str, Any] = json.loads(output.read_text())
        return result


@dataclass(frozen=True)
class Figures:
    """What the triples of one model say; seconds, and ratios of ours over theirs."""

    seconds: dict[str, float]
    step: float
    visible: dict[str, float]
    """Of each system's communication."""
    ratio: float
    """Of the visible communication."""
    interval: tuple[float, float]
    """Of that ratio, 90 %."""
    triples: int

    @property
    def share(self) -> float:
        """Of the visible communication in DistributedDataParallel's step."""
        return self.visible["ddp"] / self.seconds["ddp"]


def summarize(runs: list[dict[str, Any]]) -> Figures:
    """The figures of one model, from all triples of its runs."""
    columns = {system: [s for run in runs for s in run[system]] for system in SYSTEMS}
    triples = list(zip(*columns.values(), strict=True))
    extra = [(ours - local, theirs - local) for ours, theirs, local in triples]
    chance = random.Random(0)
    ratios = sorted(_visible(chance.choices(extra, k=len(extra)))[2] for _ in range(RESAMPLES))
    ours, theirs, ratio = _visible(extra)
    return Figures(
        seconds={system: statistics.median(column) for system, column in columns.items()},
        step=statistics.median(mine / other for mine, other, _ in triples),
        visible={"farandole": ours, "ddp": theirs},
        ratio=ratio,
        interval=(ratios[RESAMPLES // 20], ratios[-RESAMPLES // 20]),
        triples=len(triples),
    )


def _visible(extra: list[tuple[float, float]]) -> tuple[float, float, float]:
    ours, theirs = (statistics.median(column) for column in zip(*extra, strict=True))
    return ours, theirs, ours / theirs if theirs > 0 else math.inf


def report(names: list[str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the figures of all runs and return those that count."""
    found: dict[str, Any] = {"ratios": {}, "seconds": {}, "visible": {}}
    for name in names:
        one = summarize([run[name] for run in runs])
        low, high = one.interval
        print(f"{name}: {one.triples} triples of steps on {RANKS} ranks, medians")
        for run in runs:
            settings = run[name]["ddp settings"]
            shown = ", ".join(f"{key}={value}" for key, value in settings.items())
            print(f"  DDP with {shown}")
        for system in SYSTEMS:
            extra = one.visible.get(system)
            said = "" if extra is None else f", of it {1000 * extra:.1f} ms of communication"
            print(f"  {system:<10}{1000 * one.seconds[system]:7.1f} ms{said}")
        least = statistics.median(run[name]["floor"] for run in runs)
        print(
            f"  {'floor':<10}{1000 * least:7.1f} ms: the gradients scaled into a buffer and summed"
        )
        print(f"  step, ours over DDP's: {one.step:.3f}")
        print(f"  visible communication, ours over DDP's: {one.ratio:.3f} ({low:.3f}–{high:.3f})")
        found["ratios"][name] = round(one.step, 4)
        if one.share >= LEAST_SHARE:
            found["ratios"][f"{name} visible communication"] = round(one.ratio, 4)
        else:
            print(f"  not to be judged: it is {one.share:.0%} of DDP's step")
        found["seconds"][name] = {key: round(each, 5) for key, each in one.seconds.items()}
        found["visible"][name] = {
            **{key: round(each, 5) for key, each in one.visible.items()},
            "floor": round(least, 5),
            "interval": [round(low, 4), round(high, 4)],
        }
    return found


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=MODELS, help="one of the models")
    parser.add_argument("--pairs", type=int, default=200, help="steps of each system in a run")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.model or list(MODELS)
    if arguments.worker:
        work(names, arguments.pairs, arguments.worker)
        return
    figures = report(names, [run_once(names, arguments.pairs) for _ in range(arguments.runs)])
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
