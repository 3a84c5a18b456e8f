"""Which engine a channel gets when no setting names one.

=========================================  ===================================================
the channel's ranks                        engine
=========================================  ===================================================
share one host                             ``shm`` for CPU tensors where all can, else ``torch``
are alone on their hosts                   ``torch``
several hosts, one of them with several    ``hierarchical``, from that size up from which it
                                           was faster than flat when both were measured
=========================================  ===================================================

All ranks must choose alike, so rank 0 decides what is not plain from what all know, and tells the
others through the channel's store. Measuring takes about :data:`MOST_SECONDS` when a job first
opens a channel between certain ranks of certain hosts; rank 0 keeps the figures in a file
(``engines.figures``), and as long as they are there nothing is measured.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from farandole.comm.engines import figures as kept
from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.comm.engines.c10d_open import open_torch, share_a_gpu
from farandole.comm.engines.figures import Figures
from farandole.comm.engines.hierarchical.engine import HierarchicalEngine, Limits
from farandole.comm.engines.hierarchical.layout import Layout, layout_of
from farandole.comm.engines.hierarchical.opening import open_stages
from farandole.comm.engines.one_host import open_one_host
from farandole.core.errors import DeadlineError

SIZES = (32 * 1024, 256 * 1024, 2 * 1024 * 1024, 8 * 1024 * 1024)
"""Bytes of the buffers that are measured, as far as there is time."""

TRIES = 2
"""The shorter of so many tries counts, after one that does not."""

MOST_SECONDS = 0.3
"""No further size is measured when it is likely to end later."""

_log = logging.getLogger("farandole.engines")


def open_chosen(seat: Seat) -> Engine:
    """Open the channel of ``seat`` with the engine that suits it.

    Raises what opening that engine raises.
    """
    layout = layout_of(seat.rank, seat.hosts)
    if len(layout.hosts) == 1:
        return open_one_host(seat)
    if all(len(ranks) == 1 for ranks in layout.hosts) or _needs_host_memory(seat):
        return open_torch(seat)
    decision = _ask(seat, "limits", lambda: _decide(seat))
    if decision is None:
        engine = open_stages(seat, layout, Limits())
        decision = _settle(engine, layout)
        engine.limits = decision
    elif decision == Limits(None, None):
        return open_torch(seat)
    else:
        engine = open_stages(seat, layout, decision)
    _log.info("The channel %r goes by stages: %s.", seat.channel, decision)
    return engine


def _needs_host_memory(seat: Seat) -> bool:
    return seat.device.type == "cuda" and (not dist.is_nccl_available() or share_a_gpu(seat))


def _ask(seat: Seat, what: str, decide: Callable[[], Limits | None]) -> Limits | None:
    """What rank 0 decides; ``None``: to measure."""
    key = f"engine/choice/{seat.channel}/{what}"
    if seat.rank == 0:
        decision = decide()
        seat.store.set(key, json.dumps(decision and asdict(decision)).encode())
        return decision
    said = json.loads(seat.store.get(key, seat.deadline))
    return None if said is None else Limits(**said)


def _decide(seat: Seat) -> Limits | None:
    if None not in (seat.reduce_by_stages, seat.move_by_stages):
        return _limits(seat, None)
    found = kept.load().get(_key(seat))
    return None if found is None else _limits(seat, found.pays_from)


def _limits(seat: Seat, pays_from: int | None) -> Limits:
    """What follows if stages pay from so many bytes on."""
    choose = {True: 0, False: None, None: pays_from}
    return Limits(choose[seat.reduce_by_stages], choose[seat.move_by_stages])


def _key(seat: Seat) -> str:
    return kept.key_of(seat.hosts, seat.device.type, torch.__version__)


def _settle(engine: HierarchicalEngine, layout: Layout) -> Limits:
    """Measure, keep the figures, decide: rank 0 does for all."""
    seat = engine.seat
    try:
        found = measure(engine, layout)
        if seat.rank == 0:
            kept.keep(_key(seat), found)
        decision = _ask(seat, "measured", lambda: _limits(seat, found.pays_from))
    except BaseException:
        engine.close()
        raise
    assert decision is not None
    return decision


def measure(engine: HierarchicalEngine, layout: Layout) -> Figures:
    """Time allreduces by stages and flat, as this rank sees them; rank 0 says when to stop."""
    begin = time.monotonic()
    found: dict[str, list[float]] = {"stages": [], "flat": []}
    sizes: list[int] = []
    for size in SIZES:
        if sizes and not _time_is_left(engine, begin, sizes[-1], size, found):
            break
        buffer = torch.zeros(size // 4, device=engine.seat.device)
        for way, limits in (("stages", Limits()), ("flat", Limits(None, None))):
            engine.limits = limits
            tries = [_time(engine, buffer) for _ in range(TRIES + 1)]
            found[way].append(min(tries[1:]))
        sizes.append(size)
    return Figures(
        kept.layout_text([len(ranks) for ranks in layout.hosts], engine.seat.device.type),
        tuple(sizes),
        tuple(found["stages"]),
        tuple(found["flat"]),
        cut_short=len(sizes) < len(SIZES),
    )


def _time_is_left(
    engine: HierarchicalEngine, begin: float, last: int, size: int, found: dict[str, list[float]]
) -> bool:
    each = sum(times[-1] for times in found.values()) * size / last
    ends = time.monotonic() - begin + (TRIES + 1) * each
    said = torch.tensor([float(ends < MOST_SECONDS)], device=engine.seat.device)
    _await(engine, engine.broadcast(said, 0))
    return bool(said.item())


def _time(engine: HierarchicalEngine, buffer: torch.Tensor) -> float:
    _await(engine, engine.barrier())
    begin = time.perf_counter()
    _await(engine, engine.allreduce(buffer, Reduction.SUM))
    return time.perf_counter() - begin


def _await(engine: HierarchicalEngine, work: Work) -> None:
    remaining = engine.seat.deadline.remaining()
    if not work.wait(remaining):
        raise DeadlineError(
            f"The first operations of the channel {engine.seat.channel!r} did not complete in time."
        )
    if engine.seat.device.type == "cuda":
        torch.cuda.current_stream(engine.seat.device).synchronize()
