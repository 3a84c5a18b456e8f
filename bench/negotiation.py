"""How long ranks take to agree on named tensors, and what an idle process costs.

    python bench/negotiation.py [--rounds 200] [--json]

Two ranks on this machine submit the same 1, 10 or 100 named tensors of 1,000 floats, each rank in
an order of its own, which they have agreed on before. The figure is the time from the last call
that submits one, on the rank that is later, to the moment when the later rank hands the last
buffer to Gloo (ten tensors travel in one); beside it, to the moment when both have all results.
*Waiting*: each rank then waits for its handles. *Busy*: each rank computes in Python for 10 ms
first, so that the threads that agree must get their turn between its bytecodes. Medians over the
rounds, in milliseconds.

The *bare hop* is what nothing can be faster than: a thread of one rank sends 100 bytes, and a
thread of the other that waits for them has them, without a word of ours in between, while the main
threads wait or compute. An agreement takes one or two of them.

The idle process has formed its group and sleeps; its use of the processor is that of all its
threads. ``--json`` prints the figures as one line at the end.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import threading
import time
from random import Random
from typing import Any

import torch

import farandole.torch as hvd
from farandole.comm import group as groups
from farandole.comm.ops import Op
from farandole.comm.order import brisk
from farandole.testing.ranks import run_processes

COUNTS = (1, 10, 100)
ELEMENTS = 1000
WARM_UP = 10
BUSY_SECONDS = 0.01
IDLE_SECONDS = 5.0
HOPS = 300

Moments = tuple[float, float, float]
"""The last submission began, the last buffer was handed over, all results were there."""


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
                handles = []
                for number in order:
                    submitted = time.perf_counter()
                    name = f"{count}.{number}"
                    handles.append(group.allreduce_async(tensors[number], op=Op.SUM, name=name))
                if mode == "busy":
                    compute(BUSY_SECONDS)
                for handle in handles:
                    handle.wait()
                moments.append((submitted, watch.last, time.perf_counter()))
    hvd.shutdown()
    return found


def bare_hops(rounds: int) -> dict[str, float]:
    """Half of the median round trip between a thread of each of two ranks, in seconds."""
    hvd.init()
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(hvd.broadcast(torch.tensor(listener.getsockname()[1]), 0, name="port"))
    found: dict[str, float] = {}
    for mode in ("waiting", "busy"):
        if hvd.rank() == 0:
            end, _ = listener.accept()
        else:
            end = socket.create_connection(("127.0.0.1", port))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips: list[float] = []
        thread = threading.Thread(target=play, args=(end, hvd.rank() == 0, rounds, trips))
        usual = sys.getswitchinterval()
        sys.setswitchinterval(brisk.BRISK)
        thread.start()
        while mode == "busy" and thread.is_alive():
            compute(BUSY_SECONDS / 10)
        thread.join()
        sys.setswitchinterval(usual)
        end.close()
        found[mode] = statistics.median(trips) / 2 if trips else 0.0
    listener.close()
    hvd.shutdown()
    return found


def play(end: socket.socket, serves: bool, rounds: int, trips: list[float]) -> None:
    """Send a ball to and fro; the one who serves keeps the time."""
    for _ in range(rounds):
        begin = time.perf_counter()
        if serves:
            end.sendall(b"." * 100)
            end.recv(4096)
            trips.append(time.perf_counter() - begin)
            time.sleep(0.001)
        else:
            end.sendall(end.recv(4096))


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
    hops, _ = run_processes(2, lambda _: bare_hops(HOPS))
    figures["bare hop"] = {mode: round(1e3 * seconds, 3) for mode, seconds in hops.items()}
    for mode, hop in figures["bare hop"].items():
        print(f"{'bare hop ' + mode:20}{hop:>14.3f}")
    percent = 100 * max(run_processes(2, idle))
    figures["idle"] = {"percent of a core": round(percent, 3)}
    print(f"{'idle process':20}{percent:>13.2f}%   of a core")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
