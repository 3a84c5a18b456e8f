"""Times collectives: what each rank does. See ``farandole.bench.compare`` for the side that asks.

For each operation and size every system is checked first, then timed in rounds. In a round each
system has one turn, in an order that is rotated from round to round: a barrier, then the operation
as often as fits into some milliseconds. The slowest rank's time counts.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from farandole.bench.figures import slowest
from farandole.bench.seats import Seats
from farandole.bench.systems import Call, System, make, mpi_name
from farandole.comm.engines.base import Engine
from farandole.core.errors import FarandoleBug

TURN = 0.004
"""Seconds that a turn lasts about; one operation, where that takes longer."""

MOST_CALLS = 200
TRIAL = 8
"""Calls from which is estimated how many fit into a turn."""

PATTERN = 7
"""Elements repeat after so many, with small whole numbers: sums are exact in any order."""


def measure(seats: Seats, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each round, by operation, size and system.

    ``options``: ``systems``, ``operations``, ``sizes`` (bytes), ``rounds``, and ``budget``, the
    seconds that one size of one operation may take about: rounds are left out where more would be
    needed, but for 3.
    """
    fence = seats.open("torch")
    systems = {name: make(name, seats) for name in options["systems"]}
    seconds = {
        operation: {
            str(size): _time_all(seats, fence, systems, operation, size, options)
            for size in options["sizes"]
        }
        for operation in options["operations"]
    }
    return {
        "seconds": seconds,
        "torch": torch.__version__,
        "mpi": mpi_name() if "mpi" in systems else None,
    }


def _time_all(
    seats: Seats,
    fence: Engine,
    systems: dict[str, System],
    operation: str,
    size: int,
    options: dict[str, Any],
) -> dict[str, list[float]]:
    calls = {}
    for name, system in systems.items():
        output, source = _tensors(system, operation, size, seats.size)
        calls[name] = system.prepare(operation, output, source)
        if name != "copy":
            _check(name, operation, calls[name], output, source, seats)
    once = _try_out(seats, fence, calls, [1] * len(calls))
    once = _try_out(seats, fence, calls, [1 if seconds > TURN else TRIAL for seconds in once])
    repeats = [max(1, min(MOST_CALLS, math.ceil(TURN / seconds))) for seconds in once]
    needed = sum(count * seconds for count, seconds in zip(repeats, once, strict=True))
    rounds = max(3, min(options["rounds"], int(options["budget"] / needed)))
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for index in [*range(first, len(names)), *range(first)]:
            name = names[index]
            taken[name].append(_turn(fence, calls[name], repeats[index]))
    worst = slowest(seats.gather(list(taken.values())))
    return dict(zip(names, worst, strict=True))


def _try_out(
    seats: Seats, fence: Engine, calls: dict[str, Call], repeats: list[int]
) -> list[float]:
    """Seconds that one call of each takes about, the same on all ranks."""
    mine = [_turn(fence, call, count) for call, count in zip(calls.values(), repeats, strict=True)]
    return [max(each) for each in zip(*seats.gather(mine), strict=True)]


def _turn(fence: Engine, call: Call, repeats: int) -> float:
    """Seconds of one call, all ranks beginning together.

    Ranks leave a barrier of the fence up to a millisecond apart. For short calls one that does
    not count brings them closer together.
    """
    fence.barrier().wait()
    if repeats > 1:
        call()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def _tensors(system: System, operation: str, size: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Output and source; the larger of them has ``size`` bytes, or the next multiple for all."""
    part = max(1, size // 4 // ranks)
    lengths = {
        "allgather": (part * ranks, part),
        "reducescatter": (part, part * ranks),
        "alltoall": (part * ranks, part * ranks),
    }
    if operation not in lengths:
        both = system.allocate(max(1, size // 4))
        return both, both
    output, source = lengths[operation]
    return system.allocate(output), system.allocate(source)


def _check(
    name: str, operation: str, call: Call, output: Tensor, source: Tensor, seats: Seats
) -> None:
    """A fast wrong answer is no result."""
    ranks, rank = range(seats.size), seats.rank
    source.copy_(_pattern(rank, source.numel()))
    every = [_pattern(each, source.numel()) for each in ranks]
    call()
    total = torch.stack(every).sum(0)
    expected = {
        "allreduce": lambda: total,
        "allgather": lambda: torch.cat(every),
        "reducescatter": lambda: total.chunk(seats.size)[rank],
        "broadcast": lambda: every[0],
        "alltoall": lambda: torch.cat([each.chunk(seats.size)[rank] for each in every]),
    }[operation]()
    if not torch.equal(output, expected):
        raise FarandoleBug(f"The {operation} of {name!r} gives a wrong result.")
    output.zero_()  # sums of zeros stay what they are, however often they are summed
    source.zero_()


def _pattern(rank: int, length: int) -> Tensor:
    return (torch.arange(length) % PATTERN + rank).to(torch.float32)
