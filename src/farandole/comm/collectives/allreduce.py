"""Allreduce: every rank gets the elementwise sum, average, minimum, maximum or product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, Share, Space, TensorRequest
from farandole.comm.dtypes import Carrier, Scale
from farandole.comm.engines.base import Engine, Work
from farandole.comm.header import Header
from farandole.comm.ops import Op

SHARED_BYTES = 256 * 1024
"""Larger buffers travel alone: copying them costs more than an operation of their own."""


@dataclass(slots=True)
class _Batch:
    """Tensors of one dtype, fused."""

    carrier: Carrier
    indices: list[int]
    buffer: Tensor
    target: Tensor | None
    """The only result, when the buffer is its memory."""


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
        self._berth: Tensor | None = None
        self._batches: list[_Batch] = []

    def header(self) -> Header:
        """See :class:`Request`."""
        scales = (self._prescale.factor, self._postscale.factor)
        return self.describe(op=self._op.label, scales=scales)

    def space(self) -> Space | None:
        """See :class:`Request`."""
        dtype = self.tensors[0].dtype
        carrier = dtypes.carrier_of(dtype, self._op)
        if carrier.gathered or any(tensor.dtype != dtype for tensor in self.tensors[1:]):
            return None
        length = carrier.width * sum([tensor.numel() for tensor in self.tensors])
        small = length * carrier.dtype.itemsize <= SHARED_BYTES
        return Space(carrier.dtype, length) if small else None

    def take_berth(self, buffer: Tensor) -> None:
        """See :class:`Request`."""
        self._berth = buffer

    def load(self) -> None:
        """See :class:`Request`."""
        self._batches = [self._load_batch(each) for each in request.by_dtype(self.tensors)]

    def _load_batch(self, indices: list[int]) -> _Batch:
        sources = [self.tensors[index] for index in indices]
        carrier = dtypes.carrier_of(sources[0].dtype, self._op)
        target = self._only_target(sources, carrier)
        if target is not None:
            # Unscaled: the scale is neutral then.
            return _Batch(
                carrier, indices, carrier.load(request.flat(target), self._prescale), target
            )
        pieces = [carrier.load(request.flat(source), self._prescale) for source in sources]
        if self._berth is None:
            return _Batch(carrier, indices, request.joined(pieces), None)
        torch.cat(pieces, out=self._berth)
        return _Batch(carrier, indices, self._berth, None)

    def _only_target(self, sources: list[Tensor], carrier: Carrier) -> Tensor | None:
        """The result, if the data may travel in its memory; it holds the source then."""
        if (
            self._berth is not None
            or len(sources) > 1
            or not carrier.keeps_bytes
            or carrier.flips_top_bit
            or carrier.gathered
            or not self._prescale.neutral
            or not request.is_plain(sources[0])
        ):
            return None
        if self._inplace:
            return sources[0]
        return sources[0].clone(memory_format=torch.contiguous_format)

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
            if batch.target is None:
                batch.buffer = reduced
            else:
                batch.buffer.copy_(reduced)
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
        results = list(self._given)
        for batch in self._batches:
            made = self._unload(batch)
            if not self._inplace:
                for index, result in zip(batch.indices, made, strict=True):
                    results[index] = result
        return results

    def _unload(self, batch: _Batch) -> list[Tensor]:
        sources = [self.tensors[index] for index in batch.indices]
        lengths = [source.numel() for source in sources]
        buffer = batch.buffer
        if batch.carrier.gathered:
            buffer = _multiply(buffer, batch.carrier, sum(lengths))
        values = batch.carrier.unload(buffer, self._postscale)
        if batch.target is not None:
            if values.data_ptr() != batch.target.data_ptr():
                batch.target.copy_(values.view(batch.target.shape))
            return [batch.target]
        targets = sources if self._inplace else [torch.empty_like(source) for source in sources]
        for target, piece in zip(targets, _cut(values, lengths), strict=True):
            target.copy_(piece.view(target.shape))
        return targets


def _gather(engine: Engine, batch: _Batch) -> Work:
    source = dtypes.as_bytes(batch.buffer)
    size = engine.seat.size
    batch.buffer = batch.buffer.new_empty(size * batch.buffer.numel())
    return engine.allgather(dtypes.as_bytes(batch.buffer), source, [source.numel()] * size)


def _multiply(gathered: Tensor, carrier: Carrier, length: int) -> Tensor:
    values = gathered.view(carrier.source)
    size = values.numel() // length if length else 1
    return dtypes.product(values.view(size, length)).view(carrier.dtype)


def _cut(values: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return [values] if len(lengths) == 1 else torch.split(values, lengths)
