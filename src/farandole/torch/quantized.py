"""Allreduce of floating-point tensors as 8-bit integers, on the named path.

As :mod:`farandole.precision.int8` does it, without errors to remember: an alltoall of quantised
shares, a sum, and an allgather of the quantised sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import UsageError
from farandole.precision import int8
from farandole.torch.differentiable import Allreduce, Scales, record


def allreduce(
    group: Group, op: Op, scales: Scales, name: str | None, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The sum or average of each of ``tensors``, floating-point and on one device.

    Autograd's gradient is that of an exact allreduce, and travels as it is.
    """
    if op not in (Op.SUM, Op.AVERAGE):
        raise UsageError(f"Compression.int8 adds up: it works with op=Sum or Average, not {op!r}.")
    return list(record(QuantizedAllreduce, group, op, scales, name, *tensors))


class QuantizedAllreduce(torch.autograd.Function):
    """Recorded with ``group, op, scales, name, *tensors``."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, op: Op, scales: Scales, name: str | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """See the module."""
        ctx.how = (group, op, scales)
        before, after = scales
        records = int8.quantize(_as_rows(tensors).mul_(before))
        share = int8.shares(len(records), group.size)
        received, _ = group.alltoall(records, share, name=name)
        summed = int8.total(received, group.size)
        gathered = int8.dequantize(group.allgather(int8.quantize(summed), name=name))
        gathered.mul_(after / group.size if op is Op.AVERAGE else after)
        return tuple(_from_rows(gathered, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See the module."""
        group, op, scales = ctx.how
        reduced = record(Allreduce, group, op, scales, None, len(gradients) > 1, *gradients)
        return (None, None, None, None, *reduced)


def _rows_of(tensor: Tensor) -> int:
    return -(-tensor.numel() // int8.BLOCK)


def _as_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of :data:`int8.BLOCK` numbers, float32; each tensor begins a row."""
    rows = tensors[0].new_zeros(sum(map(_rows_of, tensors)), int8.BLOCK, dtype=torch.float32)
    for part, tensor in zip(rows.split_with_sizes([*map(_rows_of, tensors)]), tensors, strict=True):
        part.view(-1)[: tensor.numel()] = tensor.detach().reshape(-1)
    return rows


def _from_rows(rows: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = rows.split_with_sizes([*map(_rows_of, tensors)])
    return [
        part.reshape(-1)[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
