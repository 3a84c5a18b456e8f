"""Train step on two ranks: Farandole's optimizer against DistributedDataParallel at its best.

    python bench/step.py [--pairs 100] [--runs 3] [--json]

Two models, two ranks of one thread each, on CPU: a 6-layer transformer of 9 M parameters and a
ResNet-18 for images of 32 pixels. Each rank holds three copies of the model, one that Farandole
trains, one that DistributedDataParallel trains and one that trains without communication, in one
process and on the same batches. They take steps in turn, in rotated order, so that each triple of
steps meets the same noise of the machine. A step takes as long as on its slowest rank.

DistributedDataParallel's settings (``gradient_as_bucket_view``, ``static_graph``,
``bucket_cap_mb``) are chosen for it by a calibration at the start of each run, and it does not
broadcast buffers, as Farandole does not; Farandole runs as it comes. A ratio is the median, over
the pairs of a run, of our step over theirs; of the runs, the median counts. ``--json`` prints the
figures as one line at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd

RANKS = 2
WARM_UP = 5
CALIBRATION_ROUNDS = 7
SYSTEMS = ("farandole", "ddp", "local")


class Block(nn.Module):
    """A pre-norm transformer layer of width ``dim``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_bld: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to the same."""
        b, length, d = x_bld.shape
        qkv = self.qkv(self.norm1(x_bld)).view(b, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bld = x_bld + self.out(mixed.transpose(1, 2).reshape(b, length, d))
        return x_bld + self.down(functional.gelu(self.up(self.norm2(x_bld))))


class Transformer(nn.Module):
    """A causal language model: 6 layers, width 320, 2,000 tokens."""

    tokens, length, dim = 2000, 64, 320

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.tokens, self.dim)
        self.place = nn.Parameter(0.02 * torch.randn(self.length, self.dim))
        self.blocks = nn.Sequential(*(Block(self.dim, heads=5) for _ in range(6)))
        self.norm = nn.LayerNorm(self.dim)
        self.head = nn.Linear(self.dim, self.tokens)

    def forward(self, tokens_bl: torch.Tensor) -> torch.Tensor:
        """``(batch, length)`` tokens to ``(batch, tokens, length)`` scores."""
        hidden = self.blocks(self.embed(tokens_bl) + self.place)
        return self.head(self.norm(hidden)).transpose(1, 2)

    @classmethod
    def batch(cls) -> tuple[torch.Tensor, torch.Tensor]:
        """Two random texts and their continuations."""
        tokens = torch.randint(cls.tokens, (2, cls.length + 1))
        return tokens[:, :-1], tokens[:, 1:]


class Residual(nn.Module):
    """Two 3 x 3 convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, inputs, height, width)`` to ``(batch, outputs, height/stride, ...)``."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.around(x))


class ResNet18(nn.Sequential):
    """ResNet-18 with the stem for images of 32 pixels and 10 classes."""

    def __init__(self) -> None:
        widths = (64, 64, 128, 256, 512)
        layers = [
            block
            for number, (inputs, outputs) in enumerate(itertools.pairwise(widths))
            for block in (
                Residual(inputs, outputs, stride=1 if number == 0 else 2),
                Residual(outputs, outputs, stride=1),
            )
        ]
        super().__init__(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *layers,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    @classmethod
    def batch(cls) -> tuple[torch.Tensor, torch.Tensor]:
        """Eight random images and labels."""
        return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


MODELS: dict[str, Any] = {"transformer": Transformer, "resnet18": ResNet18}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, for each of the systems."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], None]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """What is measured: one step of training on a batch."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


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


def make_model(kind: Any) -> nn.Module:
    """A new model, with the same parameters each time."""
    torch.manual_seed(0)
    return kind()


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
    return {"ddp settings": settings, **dict(zip(SYSTEMS, map(list, columns), strict=True))}


def check_equal(ours: nn.Module, theirs: nn.Module) -> None:
    """Both have taken the same steps on the same batches: a fast wrong answer is no result."""
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def work(pairs: int, output: str) -> None:
    """What each rank does in one run."""
    # Its successor in newer versions of torch does not exist in older ones.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    result = {name: measure(name, pairs) for name in MODELS}
    if hvd.rank() == 0:
        Path(output).write_text(json.dumps(result))
    dist.destroy_process_group()
    hvd.shutdown()


def run_once(pairs: int) -> dict[str, Any]:
    """Start the two ranks and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        farandole = Path(sys.executable).with_name("farandole")
        worker = [__file__, "--worker", str(output), "--pairs", str(pairs)]
        subprocess.run(
            [farandole, "run", "-np", str(RANKS), *worker],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=True,
        )
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def summarize(run: dict[str, Any]) -> dict[str, float]:
    """The figures of one model in one run."""
    medians = {system: statistics.median(run[system]) for system in SYSTEMS}
    pairs = zip(run["farandole"], run["ddp"], strict=True)
    return {
        **medians,
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "ratio of medians": medians["farandole"] / medians["ddp"],
    }


def report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Print a table of all runs and return the figures that count."""
    print(f"{'model':<12}{'run':>4}{'farandole':>12}{'DDP':>10}{'local':>10}", end="")
    print(f"{'ratio':>8}{'of medians':>12}  DDP's settings")
    figures: dict[str, Any] = {"ratios": {}, "seconds": {}}
    for name in MODELS:
        rows = [summarize(run[name]) for run in runs]
        for number, row in enumerate(rows):
            ms = [f"{1000 * row[system]:.0f} ms" for system in SYSTEMS]
            settings = runs[number][name]["ddp settings"]
            print(f"{name:<12}{number + 1:>4}{ms[0]:>12}{ms[1]:>10}{ms[2]:>10}", end="")
            print(f"{row['ratio']:>8.3f}{row['ratio of medians']:>12.3f}  ", end="")
            print(", ".join(f"{key}={value}" for key, value in settings.items()))
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        figures["ratios"][name] = round(middle["ratio"], 4)
        figures["seconds"][name] = {system: round(middle[system], 5) for system in SYSTEMS}
    for name, ratio in figures["ratios"].items():
        print(f"{name}: our step takes {ratio:.3f} of DistributedDataParallel's")
    return figures


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="steps of each system in a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.pairs, arguments.worker)
        return
    figures = report([run_once(arguments.pairs) for _ in range(arguments.runs)])
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
