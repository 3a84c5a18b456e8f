"""Allreduce: every rank gets the elementwise sum, average, minimum, maximum or product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, Share, TensorRequest
from farandole.comm.dtypes import Carrier, Scale
from farandole.comm.engines.base import Engine, Work
from farandole.comm.header import Header
from farandole.comm.ops import Op

SHARED_BYTES = 256 * 1024
"""Larger buffers travel alone: copying them costs more than an operation of their own."""


@dataclass
class _Batch:
    """Tensors of one dtype, fused."""

    carrier: Carrier
    targets: list[Tensor]
    buffer: Tensor
    in_target: bool
    """The buffer is the memory of the only target."""


class AllreduceRequest(TensorRequest[list[Tensor]]):
    """Reduces each tensor over the ranks; the result is a list in the order given.

    ``inplace`` writes the results into the given tensors and returns those.
    """

    operation = "allreduce"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        op: Op,
        prescale: float,
        postscale: float,
        size: int,
        name: str | None,
        grouped: bool,
        inplace: bool,
    ) -> None:
        super().__init__(tensors, name=name, grouped=grouped)
        for tensor in self.tensors:
            dtypes.carrier_of(tensor.dtype, op)
            dtypes.require_scalable(tensor.dtype, prescale, postscale)
        if inplace:
            request.require_writable(self.tensors, self.operation)
        self._given = tuple(tensors)
        self._op = op
        self._prescale = Scale(float(prescale))
        self._postscale = Scale(float(postscale), size if op == Op.AVERAGE else 1)
        self._inplace = inplace
        self._targets: list[Tensor] = []
        self._batches: list[_Batch] = []

    def header(self) -> Header:
        """See :class:`Request`."""
        scales = (self._prescale.factor, self._postscale.factor)
        return self.describe(op=self._op.label, scales=scales)

    def load(self) -> None:
        """See :class:`Request`."""
        self._targets = [self.tensors[0]] * len(self.tensors)
        for indices in request.by_dtype(self.tensors):
            sources = [self.tensors[index] for index in indices]
            batch = self._load_batch(sources)
            self._batches.append(batch)
            for index, target in zip(indices, batch.targets, strict=True):
                self._targets[index] = target

    def _load_batch(self, sources: list[Tensor]) -> _Batch:
        carrier = dtypes.carrier_of(sources[0].dtype, self._op)
        in_target = (
            len(sources) == 1
            and request.is_plain(sources[0])
            and carrier.keeps_bytes
            and not carrier.flips_top_bit
            and not carrier.gathered
            and self._prescale.neutral
        )
        if self._inplace:
            targets = sources
        elif in_target:
            targets = sources = [sources[0].clone(memory_format=torch.contiguous_format)]
        else:
            targets = [torch.empty_like(source) for source in sources]
        pieces = [carrier.load(request.flat(source), self._prescale) for source in sources]
        return _Batch(carrier, targets, request.joined(pieces), in_target)

    def leave_out(self, absent: int) -> None:
        """See :class:`Request`. An average is then one over those who take part."""
        if self._op == Op.AVERAGE:
            divisor = self._postscale.divisor - absent
            self._postscale = Scale(self._postscale.factor, divisor)

    def share(self) -> Share[list[Tensor]] | None:
        """See :class:`Request`."""
        batch = self._batches[0]
        alone = len(self._batches) > 1 or batch.carrier.gathered
        if alone or batch.buffer.nbytes > SHARED_BYTES:
            return None
        key = (self.device, batch.buffer.dtype, self._op.reduction)

        def finish(reduced: Tensor) -> list[Tensor]:
            if batch.in_target:
                batch.buffer.copy_(reduced)
            else:
                batch.buffer = reduced
            return self._finish()

        return Share(key, batch.buffer, finish)

    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[list[Tensor]]:
        """See :class:`TensorRequest`."""
        works: list[Work] = []
        buffers = [batch.buffer for batch in self._batches]
        gathered: list[Tensor] = []
        for batch in self._batches:
            if batch.carrier.gathered:
                works.append(_gather(engine, batch))
                gathered.append(batch.buffer)
            else:
                works.append(engine.allreduce(batch.buffer, self._op.reduction))
        return Flight(self._finish, works, buffers, gathered)

    def _finish(self) -> list[Tensor]:
        for batch in self._batches:
            self._unload(batch)
        return list(self._given) if self._inplace else self._targets

    def _unload(self, batch: _Batch) -> None:
        buffer = batch.buffer
        if batch.carrier.gathered:
            buffer = _multiply(buffer, batch)
        if batch.in_target and self._postscale.neutral:
            return
        values = batch.carrier.unload(buffer, self._postscale)
        if batch.in_target and values.data_ptr() == batch.targets[0].data_ptr():
            return
        start = 0
        for target in batch.targets:
            target.copy_(values[start : start + target.numel()].view(target.shape))
            start += target.numel()


def _gather(engine: Engine, batch: _Batch) -> Work:
    source = dtypes.as_bytes(batch.buffer)
    size = engine.seat.size
    batch.buffer = batch.buffer.new_empty(size * batch.buffer.numel())
    return engine.allgather(dtypes.as_bytes(batch.buffer), source, [source.numel()] * size)


def _multiply(gathered: Tensor, batch: _Batch) -> Tensor:
    values = gathered.view(batch.carrier.source)
    each = sum(target.numel() for target in batch.targets)
    size = values.numel() // each if each else 1
    return dtypes.product(values.view(size, each)).view(batch.carrier.dtype)
