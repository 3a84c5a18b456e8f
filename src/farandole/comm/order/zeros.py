"""What a rank that has joined contributes to the requests of the others."""

from __future__ import annotations

from typing import Any

import torch

from farandole.comm.collectives.combine import allreduce_request
from farandole.comm.handle import Handle, Line
from farandole.comm.header import Header
from farandole.comm.ops import Op


def handle_for(header: Header, key: str, line: Line, device: torch.device | None) -> Handle[Any]:
    """A request of zeros that fits ``header``, an allreduce's; its result goes to nobody.

    ``device`` is where zeros on a CUDA device are made; ``None``: on the current one.
    """
    place = device if device is not None and device.type == header.device else header.device
    tensors = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=place)
        for shape, dtype in zip(header.shapes, header.dtypes, strict=True)
    ]
    before, after = header.scales
    request = allreduce_request(
        tensors,
        op=Op[(header.op or "").upper()],
        prescale=before,
        postscale=after,
        rank=line.members.index(line.control.rank),
        size=len(line.members),
        name=header.name,
        grouped=header.grouped,
        inplace=True,
    )
    request.load()
    return Handle(request, header, key, line)
