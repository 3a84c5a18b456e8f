"""Many collectives of all kinds, some in flight together, leave everything as it was."""

from __future__ import annotations

import functools
import gc
import os
import random
from collections.abc import Callable

import pytest
import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.testing.ranks import run_processes, take_seat

RANKS = 4
LONGEST = 1_200_000
"""Elements of the longest tensor: more than one chunk."""

SLACK = 24 << 20
"""Bytes by which a process may grow, since its allocator keeps some of what was freed."""

Begun = tuple[Work, Callable[[], bool]]


def state() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    kilobytes = {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem")}
    return {
        **kilobytes,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": sum(1 for _ in open("/proc/self/maps", encoding="ascii")),
        "named": len(os.listdir("/dev/shm")),
    }


def begin(engine: Engine, dice: random.Random) -> Begun:
    """Begin what ``dice``, which fall alike on all ranks, say."""
    rank, size = engine.seat.rank, engine.seat.size
    length = int(LONGEST ** dice.random()) if dice.random() < 0.97 else LONGEST
    shared = dice.random() < 0.3
    dtype = dice.choice((torch.float32, torch.float64, torch.int64, torch.uint8))

    def new(count: int, value: int = 0) -> torch.Tensor:
        made = engine.buffer(count, dtype) if shared else torch.empty(count, dtype=dtype)
        return made.fill_(value)

    verb = dice.choice(("allreduce", "reducescatter", "allgather", "broadcast", "alltoall", ""))
    ranks = torch.arange(size).to(dtype)
    if verb == "allreduce":
        buffer = new(length, rank)
        work = engine.allreduce(buffer, Reduction.SUM)
        return work, lambda: bool((buffer == 6).all())
    if verb == "broadcast":
        root = dice.randrange(size)
        buffer = new(length, rank)
        return engine.broadcast(buffer, root), lambda: bool((buffer == root).all())
    counts = [dice.randrange(length // size + 1) for _ in range(size)]
    total = sum(counts)
    expected = ranks.repeat_interleave(torch.tensor(counts))
    if verb == "reducescatter":
        output = new(counts[rank])
        work = engine.reducescatter(output, new(total, rank), counts, Reduction.MAX)
        return work, lambda: bool((output == size - 1).all())
    if verb == "allgather":
        output = new(total)
        work = engine.allgather(output, new(counts[rank], rank), counts)
        return work, lambda: torch.equal(output, expected)
    if verb == "alltoall":
        output = new(total)
        work = engine.alltoall(
            output, new(counts[rank] * size, rank), counts, [counts[rank]] * size
        )
        return work, lambda: torch.equal(output, expected)
    return engine.barrier(), lambda: True


def soak(count: int, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """``count`` collectives after a tenth as many that are not counted."""
    engine = registry.opener("shm")(take_seat())
    several_chunks = torch.zeros(20 << 20, dtype=torch.uint8)  # touch all of every slot
    gathered = several_chunks.repeat(RANKS)
    engine.allgather(gathered, several_chunks, [several_chunks.numel()] * RANKS).wait()
    del several_chunks, gathered
    dice = random.Random(7)
    open_: list[Begun] = []

    def finish(leave: int) -> None:
        while len(open_) > leave:
            work, check = open_.pop(dice.randrange(len(open_)))
            assert work.wait(20.0)
            assert check()

    def go(times: int) -> None:
        for _ in range(times):
            open_.append(begin(engine, dice))
            finish(dice.choice((0, 0, 1, 4)))
        finish(0)
        engine.barrier().wait()

    go(count // 10)
    before = state()
    go(count)
    after = state()
    engine.close()
    return before, after


@pytest.mark.parametrize(
    "count", [1000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_nothing_grows(count: int) -> None:
    for before, after in run_processes(RANKS, functools.partial(soak, count), timeout=500.0):
        for what, size in after.items():
            slack = {"R": SLACK, "m": 16}.get(what[0], 0)  # memory; mappings, which are its arenas
            assert size <= before[what] + slack, f"{what}: {before} before, {after} after"


def test_nothing_is_left_in_the_system() -> None:
    """Named shared memory, and the memory itself, are gone with the processes."""

    def be(rank: int) -> None:
        engine = registry.opener("shm")(take_seat())
        engine.buffer(1_000_000, torch.float32).fill_(1.0)
        engine.allreduce(torch.ones(100_000), Reduction.SUM).wait()
        os._exit(0)  # no handler, no close

    before = set(os.listdir("/dev/shm"))
    with pytest.raises(Exception, match="rank 0"):
        run_processes(2, be)
    assert set(os.listdir("/dev/shm")) == before
