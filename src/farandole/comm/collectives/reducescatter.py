"""Reducescatter: reduce as allreduce does, and leave each rank its share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, TensorRequest
from farandole.comm.dtypes import Carrier, Scale
from farandole.comm.engines.base import Engine
from farandole.comm.header import Header
from farandole.comm.ops import Op
from farandole.core.errors import UnsupportedError, UsageError


def share_rows(rows: int, size: int) -> list[int]:
    """``rows`` dealt to ``size`` ranks as evenly as possible, the remainder to the lowest ranks.

    Example::

        share_rows(7, 3)   # [3, 2, 2]
    """
    each, left = divmod(rows, size)
    return [each + (rank < left) for rank in range(size)]


@dataclass
class _Batch:
    """Tensors of one dtype, fused: the rows of rank 0 of each of them, then those of rank 1, …"""

    carrier: Carrier
    indices: list[int]
    counts: list[int]
    source: Tensor


class ReducescatterRequest(TensorRequest[list[Tensor]]):
    """Reduces each tensor and returns this rank's rows of it, as a list in the order given."""

    operation = "reducescatter"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        op: Op,
        prescale: float,
        postscale: float,
        rank: int,
        size: int,
        name: str | None,
        grouped: bool,
    ) -> None:
        super().__init__(tensors, name=name, grouped=grouped)
        if op == Op.ADASUM:
            raise UnsupportedError(
                "Reducescatter currently only supports AVERAGE and SUM, and MIN, MAX and PRODUCT: "
                "not ADASUM. Use allreduce, and take this rank's rows of the result."
            )
        for tensor in self.tensors:
            if tensor.dim() == 0:
                raise UsageError(
                    "reducescatter deals out rows, and a tensor without dimensions has none. "
                    "Use allreduce, or tensor.reshape(1)."
                )
            if dtypes.carrier_of(tensor.dtype, op).gathered:
                raise UsageError(
                    f"reducescatter does not multiply {tensor.dtype}. Use allreduce with "
                    "op=Product and take this rank's rows of the result."
                )
            dtypes.require_scalable(tensor.dtype, prescale, postscale)
        self._op = op
        self._prescale = Scale(float(prescale))
        self._postscale = Scale(float(postscale), size if op == Op.AVERAGE else 1)
        self._rank = rank
        self._shares = [share_rows(tensor.shape[0], size) for tensor in self.tensors]
        self._batches: list[_Batch] = []

    def header(self) -> Header:
        """See :class:`Request`."""
        scales = (self._prescale.factor, self._postscale.factor)
        return self.describe(op=self._op.label, scales=scales)

    def load(self) -> None:
        """See :class:`Request`."""
        self._batches = [self._load_batch(each) for each in request.by_dtype(self.tensors)]

    def _load_batch(self, indices: list[int]) -> _Batch:
        carrier = dtypes.carrier_of(self.tensors[indices[0]].dtype, self._op)
        rows_of = [torch.split(self.tensors[index], self._shares[index]) for index in indices]
        shares = list(zip(*rows_of, strict=True))
        counts = [carrier.width * sum(rows.numel() for rows in share) for share in shares]
        if len(indices) == 1:
            pieces = [self.tensors[indices[0]]]
        else:
            pieces = [rows for share in shares for rows in share]
        source = request.joined(
            [carrier.load(request.flat(piece), self._prescale) for piece in pieces]
        )
        return _Batch(carrier, indices, counts, source)

    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[list[Tensor]]:
        """See :class:`TensorRequest`."""
        outputs = [batch.source.new_empty(batch.counts[self._rank]) for batch in self._batches]
        works = [
            engine.reducescatter(output, batch.source, batch.counts, self._op.reduction)
            for output, batch in zip(outputs, self._batches, strict=True)
        ]
        buffers = [batch.source for batch in self._batches]
        return Flight(lambda: self._finish(outputs), works, buffers, outputs)

    def _finish(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        results = [self.tensors[0]] * len(self.tensors)
        for batch, output in zip(self._batches, outputs, strict=True):
            values = batch.carrier.unload(output, self._postscale)
            shapes = [
                (self._shares[index][self._rank], *self.tensors[index].shape[1:])
                for index in batch.indices
            ]
            pieces = torch.split(values, [torch.Size(shape).numel() for shape in shapes])
            for index, shape, piece in zip(batch.indices, shapes, pieces, strict=True):
                own = piece if len(pieces) == 1 else piece.clone()
                results[index] = own.view(shape).detach()
        return results
