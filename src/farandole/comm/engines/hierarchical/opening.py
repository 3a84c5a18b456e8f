"""Opens the engines of a hierarchical channel."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from farandole.comm.engines.base import Engine, Seat
from farandole.comm.engines.c10d_open import open_torch, share_a_gpu
from farandole.comm.engines.hierarchical.engine import HierarchicalEngine, Limits
from farandole.comm.engines.hierarchical.layout import Layout, layout_of
from farandole.comm.engines.hierarchical.pieces import Ways
from farandole.comm.engines.one_host import open_one_host
from farandole.comm.engines.staged import CudaLane, StagedEngine

LOOPBACK = "127.0.0.1"


def open_hierarchical(seat: Seat) -> Engine:
    """Open the channel of ``seat``; returns when every rank has opened its end.

    Where there is one host only, or no host with two ranks, nothing is hierarchical: then this is
    the engine for one host, or the flat one.

    Raises what the openings of ``torch`` and ``shm`` raise.
    """
    layout = layout_of(seat.rank, seat.hosts)
    if len(layout.hosts) == 1:
        return open_one_host(seat)
    if all(len(ranks) == 1 for ranks in layout.hosts):
        return open_torch(seat)
    return open_staged_if_needed(seat, layout, Limits())


def open_staged_if_needed(seat: Seat, layout: Layout, limits: Limits) -> Engine:
    """The channel by stages; through host memory where ranks share a GPU."""
    if seat.device.type == "cuda" and not (dist.is_nccl_available() and not share_a_gpu(seat)):
        inner = dataclasses.replace(seat, device=torch.device("cpu"))
        return StagedEngine(seat, open_stages(inner, layout, limits), CudaLane(seat.device))
    return open_stages(seat, layout, limits)


def open_stages(seat: Seat, layout: Layout, limits: Limits) -> HierarchicalEngine:
    """The channel by stages, for several hosts of which at least one has several ranks."""
    opened: list[Engine] = []

    def keep(engine: Engine) -> Engine:
        opened.append(engine)
        return engine

    try:
        # The one that all ranks have part in comes first: it names those that do not come.
        flat = keep(open_torch(seat))
        local = len(layout.neighbours) > 1
        up = keep(open_one_host(_local_seat(seat, layout, "up"))) if local else None
        down = keep(open_one_host(_local_seat(seat, layout, "down"))) if local else None
        across = keep(open_torch(_lane_seat(seat, layout))) if layout.is_carrier else None
    except BaseException:
        for engine in opened:
            engine.close()
        raise
    return HierarchicalEngine(seat, flat, Ways(layout, up, across, down), limits)


def _local_seat(seat: Seat, layout: Layout, stage: str) -> Seat:
    """This rank's place among those of its host."""
    return dataclasses.replace(
        seat,
        rank=layout.local_rank,
        size=len(layout.neighbours),
        channel=f"{seat.channel}/{stage}/{layout.host}",
        hosts=tuple(seat.hosts[rank] for rank in layout.neighbours),
        address=LOOPBACK,
    )


def _lane_seat(seat: Seat, layout: Layout) -> Seat:
    """This carrier's place in its lane."""
    lane = layout.local_rank
    return dataclasses.replace(
        seat,
        rank=layout.host,
        size=len(layout.hosts),
        channel=f"{seat.channel}/across/{lane}",
        hosts=tuple(seat.hosts[ranks[lane]] for ranks in layout.hosts),
    )
