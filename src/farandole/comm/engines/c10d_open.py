"""The ``torch`` engine: chooses among torch.distributed's backends by where the tensors are."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from farandole.comm.engines.base import Engine, Seat
from farandole.comm.engines.gloo import open_gloo
from farandole.comm.engines.nccl import open_nccl
from farandole.comm.engines.staged import CudaLane, StagedEngine
from farandole.core.errors import UsageError


def open_torch(seat: Seat) -> Engine:
    """Open the channel of ``seat``; returns when every rank has opened its end.

    CPU tensors go by Gloo. CUDA tensors go by NCCL, or through host memory by Gloo where ranks
    share a GPU or this torch was built without NCCL. All ranks choose alike.

    Raises ``UsageError`` for tensors of other devices, and what the backend's opening raises.
    """
    if seat.device.type == "cpu":
        return open_gloo(seat)
    if seat.device.type != "cuda":
        raise UsageError(
            f"The engine 'torch' carries CPU and CUDA tensors, not {seat.device.type!r} tensors. "
            "Move them to the CPU first."
        )
    if dist.is_nccl_available() and not share_a_gpu(seat):
        return open_nccl(seat)
    inner = open_gloo(dataclasses.replace(seat, device=torch.device("cpu")))
    return StagedEngine(seat, inner, CudaLane(seat.device))


def share_a_gpu(seat: Seat) -> bool:
    """Whether two ranks of the channel sit on one GPU: every rank tells the others which is its."""
    prefix = f"engine/torch/{seat.channel}/gpu/"
    uuid = torch.cuda.get_device_properties(seat.device).uuid
    seat.store.set(f"{prefix}{seat.rank}", f"{uuid}".encode())
    gpus = [seat.store.get(f"{prefix}{rank}", seat.deadline) for rank in range(seat.size)]
    return len(set(gpus)) < len(gpus)
