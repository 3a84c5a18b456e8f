"""How long gradients are under way between two hosts with a slow network, compressed and not.

    python bench/compression.py [--ranks 1 2] [--steps 8] [--unlimited] [--json]

Needs root: the hosts are two network namespaces of this machine, joined by a veth pair whose ends
tc's tbf limits to 1 Gbit/s each. On each host sits 1 rank, then 2, of one thread each. Each rank
holds a ResNet-18 for images of 32 pixels for every way to send its gradients (44.7 MB), and one
that trains without communication. They take steps in turn, in rotated order, so that all meet the
same noise of the machine; a step takes as long as on its slowest rank.

*Communication* is how long the gradients of a step take to become those of all ranks when nothing
else runs beside (``synchronize()`` on gradients that are there), encoding and decoding included.
*Seen* is what a step takes longer than the step without communication; a part of it is hidden under
the backward pass. *Sent* is what the veth's counters say a host has sent in a step. Figures are
medians over the turns. With ``--unlimited`` the cable has no limit: what is left then is arithmetic
and memory, which no compression can spare. All ranks must have the same weights in the end.
``--json`` prints one line at the end: ``speedups`` and ``seen speedups`` (uncompressed over
compressed), ``seconds``, ``megabytes``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import farandole.torch as hvd
from farandole.bench.models import ResNet18, make_model, make_optimizer
from farandole.core.clock import Deadline
from farandole.core.secret import Secret
from farandole.core.store import StoreServer
from farandole.torch.optimizer import Distributed
from hierarchy import BITS_PER_SECOND, CABLE, HOSTS, two_hosts

across = hvd.Compression.across_hosts
WAYS: dict[str, Any] = {
    "none": hvd.Compression.none,
    "fp16": across(hvd.Compression.fp16),
    "int8": across(hvd.Compression.int8),
    "topk(0.01)": across(hvd.Compression.topk(ratio=0.01)),
    "powersgd(4)": across(hvd.Compression.powersgd(rank=4)),
}
ALONE = "alone"
WARM_UP = 2
LIMIT = 170.0
"""Seconds for everything."""


class System:
    """A model and how it is trained."""

    def __init__(self, way: str) -> None:
        self.model = make_model(ResNet18)
        self.optimizer: torch.optim.Optimizer = make_optimizer(self.model)
        if way != ALONE:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, self.model.named_parameters(), compression=WAYS[way]
            )

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float, int]:
        """Seconds of a step, begun on all ranks together, and of its communication alone, and the
        bytes that this host sent."""
        hvd.barrier()
        sent, begin = _sent(), time.perf_counter()
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        hvd.barrier()
        sent = _sent() - sent
        return seconds, self._communicate(), sent

    def _communicate(self) -> float:
        if not isinstance(self.optimizer, Distributed):
            return 0.0
        gradients = [each.grad.clone() for each in self.model.parameters()]
        self.optimizer.zero_grad()
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        hvd.barrier()
        begin = time.perf_counter()
        self.optimizer.synchronize()
        seconds = time.perf_counter() - begin
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return seconds


def _sent() -> int:
    return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())


def be_rank(ways: list[str], steps: int) -> None:
    """What each process of the hosts does; rank 0 prints what all have found."""
    torch.set_num_threads(1)
    hvd.init()
    names = [ALONE, *ways]
    systems = {name: System(name) for name in names}
    torch.manual_seed(1 + hvd.rank())
    found: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(WARM_UP + steps):
        batch = ResNet18.batch()
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            figures = systems[name].step(batch)
            if turn >= WARM_UP:
                found[name].append(figures)
    for name in ways:
        check_equal(systems[name].model)
    slowest = hvd.allreduce(torch.tensor([found[name] for name in names]).double(), op=hvd.Max)
    if hvd.rank() == 0:
        print(json.dumps(dict(zip(names, slowest.tolist(), strict=True))))
    hvd.shutdown()


def check_equal(model: nn.Module) -> None:
    """All ranks hold the same bits: a fast wrong answer is no result."""
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    least = hvd.allreduce(weights, op=hvd.Min)
    most = hvd.allreduce(weights, op=hvd.Max)
    assert torch.equal(least, weights), "the ranks' weights differ"
    assert torch.equal(most, weights), "the ranks' weights differ"


def lead(options: argparse.Namespace, namespaces: list[str]) -> None:
    """In the first host: start all ranks, and print what they found."""
    figures: dict[str, dict[str, float]] = {
        "speedups": {}, "seen speedups": {}, "seconds": {}, "megabytes": {}
    }  # fmt: skip
    print(f"{'':26}{'step':>10}{'communication':>16}{'seen':>10}{'sent':>10}{'speed-ups':>14}")
    for ranks in options.ranks:
        report(figures, run(options, namespaces, ranks), ranks)
    if options.json:
        print(json.dumps(figures))


def run(options: argparse.Namespace, namespaces: list[str], ranks: int) -> dict[str, Any]:
    """Train with ``ranks`` ranks on each host."""
    secret = Secret.new()
    server = StoreServer(secret, HOSTS[0])
    processes = []
    try:
        for rank in range(len(HOSTS) * ranks):
            environ = {
                **os.environ,
                "FARANDOLE_RANK": str(rank),
                "FARANDOLE_SIZE": str(len(HOSTS) * ranks),
                "FARANDOLE_LOCAL_RANK": str(rank % ranks),
                "FARANDOLE_LOCAL_SIZE": str(ranks),
                "FARANDOLE_STORE": str(server.address),
                "FARANDOLE_SECRET": secret.hex(),
                "OMP_NUM_THREADS": "1",
            }
            command = [
                *("ip", "netns", "exec", namespaces[rank // ranks]), *_self(options), "--be",
            ]  # fmt: skip
            processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE))
        deadline = Deadline.after(LIMIT)
        said = [process.communicate(timeout=deadline.remaining())[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("A rank has failed.")
        result: dict[str, Any] = json.loads(said[0])
        return result
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.close()


def report(figures: dict[str, dict[str, float]], found: dict[str, Any], ranks: int) -> None:
    """Print a table of one layout."""
    alone = [row[0] for row in found[ALONE]]
    seconds, megabytes = figures["seconds"], figures["megabytes"]
    for name, rows in found.items():
        steps, communications, counts = zip(*rows, strict=True)
        key = f"{name} 2 x {ranks} ranks"
        seconds[key] = statistics.median(communications)
        seconds[f"{key} seen"] = statistics.median(
            with_it - without for with_it, without in zip(steps, alone, strict=True)
        )
        megabytes[key] = statistics.median(counts) / 1e6
        ratios = []
        for kind, suffix in (("speedups", ""), ("seen speedups", " seen")):
            least = seconds.get(f"none 2 x {ranks} ranks{suffix}")
            if name not in (ALONE, "none") and least is not None:
                ratio = figures[kind][key] = least / seconds[f"{key}{suffix}"]
                ratios.append(f"{ratio:.1f}")
        print(
            f"{f'2 x {ranks} ranks':12}{name:14}{1e3 * statistics.median(steps):>7.0f} ms"
            f"{1e3 * seconds[key]:>13.0f} ms{1e3 * seconds[f'{key} seen']:>7.0f} ms"
            f"{megabytes[key]:>7.1f} MB{' and '.join(ratios):>14}",
            flush=True,
        )


def _self(options: argparse.Namespace) -> list[str]:
    ways = ["--ways", *options.ways, "--steps", str(options.steps)]
    ranks = ["--ranks", *map(str, options.ranks), *(["--json"] if options.json else [])]
    return [sys.executable, __file__, *ranks, *ways]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of each host")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["none", "powersgd(4)"])
    parser.add_argument("--unlimited", action="store_true", help="a cable without a limit")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--be", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lead", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be_rank(options.ways, options.steps)
    elif options.lead:
        lead(options, options.lead)
    elif os.geteuid() != 0:
        raise SystemExit("Two hosts on one machine are network namespaces: this needs root.")
    else:
        with two_hosts(None if options.unlimited else BITS_PER_SECOND) as names:
            inside = ["ip", "netns", "exec", names[0], *_self(options), "--lead", *names]
            raise SystemExit(subprocess.run(inside, check=False).returncode)


if __name__ == "__main__":
    main()
