"""How long ranks take to agree on named tensors, and what an idle process costs.

    python bench/negotiation.py [--rounds 200] [--json]

Two ranks on this machine submit the same 1, 10 or 100 named tensors of 1,000 floats, each rank in
an order of its own, which they have agreed on before. The figure is the time from the last
submission of the rank that is later to the moment when the later rank hands the last buffer to
Gloo (ten tensors travel in one); beside it, to the moment when both have all results. *Waiting*:
each rank then waits for its handles. *Busy*: each rank computes in Python for 10 ms first, so that
the threads that agree must get their turn between its bytecodes. Medians over the rounds, in
milliseconds.

The idle process has formed its group and sleeps; its use of the processor is that of all its
threads. ``--json`` prints the figures as one line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from random import Random
from typing import Any

import torch

import farandole.torch as hvd
from farandole.comm import group as groups
from farandole.comm.ops import Op
from farandole.testing.ranks import run_processes

COUNTS = (1, 10, 100)
ELEMENTS = 1000
WARM_UP = 10
BUSY_SECONDS = 0.01
IDLE_SECONDS = 5.0

Moments = tuple[float, float, float]
"""The last submission, the last buffer handed over, all results there."""


class Stopwatch:
    """Notes when the engine gets a buffer."""

    def __init__(self, engine: Any) -> None:
        self.last = 0.0
        self._begin = engine.allreduce
        engine.allreduce = self._note

    def _note(self, *arguments: Any) -> Any:
        self.last = time.perf_counter()
        return self._begin(*arguments)


def compute(seconds: float) -> int:
    """Pure Python for so long."""
    end, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for number in range(100):
            total += number * number
    return total


def measure(rounds: int) -> dict[str, list[Moments]]:
    """All rounds of one rank."""
    hvd.init()
    group = groups.root().current
    watch = Stopwatch(group.engine("named", torch.device("cpu")))
    random = Random(group.rank)
    found: dict[str, list[Moments]] = {}
    for count in COUNTS:
        tensors = [torch.full((ELEMENTS,), float(number)) for number in range(count)]
        for mode in ("waiting", "busy"):
            moments = found[f"{count} tensor{'s' if count > 1 else ''} {mode}"] = []
            for _ in range(WARM_UP + rounds):
                group.barrier()
                order = random.sample(range(count), count)
                handles = [
                    group.allreduce_async(tensors[number], op=Op.SUM, name=f"{count}.{number}")
                    for number in order
                ]
                submitted = time.perf_counter()
                if mode == "busy":
                    compute(BUSY_SECONDS)
                for handle in handles:
                    handle.wait()
                moments.append((submitted, watch.last, time.perf_counter()))
    hvd.shutdown()
    return found


def idle(_: int) -> float:
    """The part of one processor that an idle rank uses."""
    hvd.init()
    hvd.allreduce(torch.ones(1), name="first")
    begin = time.process_time()
    time.sleep(IDLE_SECONDS)
    used = time.process_time() - begin
    hvd.barrier()
    hvd.shutdown()
    return used / IDLE_SECONDS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    first, second = run_processes(2, lambda _: measure(options.rounds), timeout=1800)
    figures: dict[str, dict[str, float]] = {"milliseconds": {}, "milliseconds to results": {}}
    print(f"{'':20}{'to the start':>14}{'to all results':>16}   (ms, medians)")
    for what in first:
        starts, ends = [], []
        for one, other in list(zip(first[what], second[what], strict=True))[WARM_UP:]:
            submitted, begun, done = map(max, zip(one, other, strict=True))
            starts.append(1e3 * (begun - submitted))
            ends.append(1e3 * (done - submitted))
        start, end = statistics.median(starts), statistics.median(ends)
        figures["milliseconds"][what] = round(start, 3)
        figures["milliseconds to results"][what] = round(end, 3)
        print(f"{what:20}{start:>14.3f}{end:>16.3f}")
    percent = 100 * max(run_processes(2, idle))
    figures["idle"] = {"percent of a core": round(percent, 3)}
    print(f"{'idle process':20}{percent:>13.2f}%   of a core")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
