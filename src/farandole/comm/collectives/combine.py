"""The request for an allreduce, by its operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farandole.comm.collectives.adasum import AdasumRequest
from farandole.comm.collectives.allreduce import AllreduceRequest
from farandole.comm.collectives.request import TensorRequest
from farandole.comm.ops import Op


def allreduce_request(
    tensors: Sequence[Tensor],
    *,
    op: Op,
    prescale: float,
    postscale: float,
    rank: int,
    size: int,
    name: str | None,
    grouped: bool,
    inplace: bool,
) -> TensorRequest[list[Tensor]]:
    """What ``rank`` of ``size`` asks for; Adasum goes another way than what engines reduce."""
    if op == Op.ADASUM:
        return AdasumRequest(
            tensors,
            prescale=prescale,
            postscale=postscale,
            rank=rank,
            size=size,
            name=name,
            grouped=grouped,
            inplace=inplace,
        )
    return AllreduceRequest(
        tensors,
        op=op,
        prescale=prescale,
        postscale=postscale,
        size=size,
        name=name,
        grouped=grouped,
        inplace=inplace,
    )
