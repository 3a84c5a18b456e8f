"""Adasum: an allreduce that adds what differs and averages what agrees.

Maleki, Musuvathi, Mytkowicz, Saarikivi et al., "Scaling Distributed Training with Adaptive
Summation", MLSys 2021. Two gradients a and b combine to::

    (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

which is their sum where they are orthogonal and their average where they are parallel. The ranks
combine as a binary tree: 0 with 1, 2 with 3, then those results with each other, and so on.

Nobody ever holds two whole tensors (the paper's algorithm 1, recursive vector halving): partners
swap halves, so that each has one half of both; the scalar products are summed over the ranks that
hold parts of the same two tensors; each combines its part, and goes on with a partner twice as far
away and half as much data. At the end the parts are gathered. A rank sends about twice its tensor
in all, whatever their number.

Each tensor of a list has scalar products of its own, in float64. float16 and bfloat16 travel as
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, TensorRequest
from farandole.comm.engines.base import Engine, Work
from farandole.comm.header import Header
from farandole.comm.ops import Op
from farandole.core.errors import UnsupportedError, UsageError

_TRAVELS_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


@dataclass
class _Batch:
    """Tensors of one dtype, one after the other in a flat buffer."""

    indices: list[int]
    lengths: list[int]
    buffer: Tensor


@dataclass(frozen=True)
class Part:
    """The elements ``begin`` to ``end`` of a buffer."""

    begin: int
    end: int

    def halves(self) -> tuple[Part, Part]:
        """Its first and its second half."""
        middle = self.begin + (self.end - self.begin) // 2
        return Part(self.begin, middle), Part(middle, self.end)


def final_part(rank: int, size: int, length: int) -> Part:
    """What ``rank`` of ``size`` is left with of a buffer of ``length`` after all halvings."""
    part, distance = Part(0, length), 1
    while distance < size:
        part = part.halves()[rank // distance % 2]
        distance *= 2
    return part


def require_pairs(size: int) -> None:
    """``UnsupportedError`` when ``size`` ranks do not make pairs, and pairs of pairs."""
    if size & (size - 1):
        raise UnsupportedError(
            "Adasum combines the ranks in pairs, and pairs of pairs: their number must be a power "
            f"of two, and is {size}. Use Average, or another number of ranks."
        )


class AdasumRequest(TensorRequest[list[Tensor]]):
    """Combines each tensor over the ranks, a power of two of them; see the module.

    ``inplace`` writes the results into the given tensors and returns those.
    """

    operation = "allreduce"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        prescale: float,
        postscale: float,
        rank: int,
        size: int,
        name: str | None,
        grouped: bool,
        inplace: bool,
    ) -> None:
        super().__init__(tensors, name=name, grouped=grouped)
        require_pairs(size)
        for tensor in self.tensors:
            if tensor.dtype not in _TRAVELS_AS:
                raise UsageError(
                    f"Adasum combines float16, bfloat16, float32 and float64; this tensor is "
                    f"{tensor.dtype}. Use Sum or Average, or convert the tensor first."
                )
        if inplace:
            request.require_writable(self.tensors, self.operation)
        self._given = tuple(tensors)
        self._prescale = float(prescale)
        self._postscale = float(postscale)
        self._rank = rank
        self._size = size
        self._inplace = inplace
        self._batches: list[_Batch] = []

    def header(self) -> Header:
        """See :class:`Request`."""
        return self.describe(op=Op.ADASUM.label, scales=(self._prescale, self._postscale))

    def load(self) -> None:
        """See :class:`Request`."""
        for indices in request.by_dtype(self.tensors):
            pieces = [request.flat(self.tensors[index]) for index in indices]
            flat = torch.cat(pieces)
            buffer = flat.to(_TRAVELS_AS[flat.dtype])
            if self._prescale != 1.0:
                buffer.mul_(self._prescale)
            self._batches.append(_Batch(indices, [piece.numel() for piece in pieces], buffer))

    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[list[Tensor]]:
        """See :class:`TensorRequest`.

        Each halving needs the one before, so on a CPU this waits for all but the last transfer; on
        a GPU it only queues them.
        """
        works: list[Work] = []
        gathered: list[Tensor] = []
        for batch in self._batches:
            mine = self._combine(engine, batch)
            parts = self._final_parts(batch)
            output = batch.buffer.new_empty(batch.buffer.numel())
            works.append(engine.allgather(output, mine, [part.end - part.begin for part in parts]))
            gathered.append(output)

        def finish() -> list[Tensor]:
            return self._finish(gathered)

        return Flight(finish, works, [batch.buffer for batch in self._batches], gathered)

    def _final_parts(self, batch: _Batch) -> list[Part]:
        length = batch.buffer.numel()
        return [final_part(rank, self._size, length) for rank in range(self._size)]

    def _combine(self, engine: Engine, batch: _Batch) -> Tensor:
        """This rank's final part of the result."""
        values, part, distance = batch.buffer, Part(0, batch.buffer.numel()), 1
        while distance < self._size:
            is_right = self._rank // distance % 2
            partner = self._rank - distance if is_right else self._rank + distance
            halves = part.halves()
            mine, theirs = halves[is_right], halves[1 - is_right]
            own = values[mine.begin - part.begin : mine.end - part.begin]
            away = values[theirs.begin - part.begin : theirs.end - part.begin]
            received = torch.empty_like(own)
            self._swap(engine, partner, received, away)
            left, right = (received, own) if is_right else (own, received)
            distance *= 2
            values = self._merge(engine, batch, mine, (left, right), distance)
            part = mine
        return values

    def _swap(self, engine: Engine, partner: int, received: Tensor, away: Tensor) -> None:
        coming, going = [0] * self._size, [0] * self._size
        coming[partner], going[partner] = received.numel(), away.numel()
        engine.alltoall(received, away, coming, going).wait()

    def _merge(
        self, engine: Engine, batch: _Batch, part: Part, pair: tuple[Tensor, Tensor], group: int
    ) -> Tensor:
        """The two tensors' ``part`` combined; ``group`` ranks side by side hold all of both."""
        slices = self._slices(batch, part)
        partial = torch.zeros(
            len(batch.lengths), 3, dtype=torch.float64, device=batch.buffer.device
        )
        for place, where in slices.items():
            left, right = (each[where].to(torch.float64) for each in pair)
            partial[place, 0] = left.dot(right)
            partial[place, 1] = left.dot(left)
            partial[place, 2] = right.dot(right)
        products = self._sum_over(engine, partial, group)
        ratio = products[:, :1] / (2 * products[:, 1:])
        # A tensor of zeros adds nothing, whatever it is multiplied by.
        factors = torch.where(products[:, 1:] == 0, torch.ones_like(ratio), 1 - ratio)
        merged = torch.empty_like(pair[0])
        for place, where in slices.items():
            # In float64: a factor may be too large for float32 where its tensor is tiny.
            left, right = (each[where].to(torch.float64) for each in pair)
            merged[where] = left.mul_(factors[place, 0]).add_(right.mul_(factors[place, 1]))
        return merged

    def _sum_over(self, engine: Engine, partial: Tensor, group: int) -> Tensor:
        """``partial`` summed over this rank's ``group``, in one order on all of them."""
        everybody = partial.new_empty(self._size * partial.numel())
        counts = [partial.numel()] * self._size
        engine.allgather(everybody, partial.view(-1), counts).wait()
        first = self._rank // group * group
        rows = everybody.view(self._size, *partial.shape)
        return rows[first : first + group].sum(0)

    def _slices(self, batch: _Batch, part: Part) -> dict[int, slice]:
        """Where in ``part`` each tensor lies that has elements there, by its place."""
        slices, start = {}, 0
        for place, length in enumerate(batch.lengths):
            begin, end = max(start, part.begin), min(start + length, part.end)
            if begin < end:
                slices[place] = slice(begin - part.begin, end - part.begin)
            start += length
        return slices

    def _finish(self, gathered: Sequence[Tensor]) -> list[Tensor]:
        results = list(self.tensors)
        for batch, output in zip(self._batches, gathered, strict=True):
            parts = self._final_parts(batch)
            whole = torch.empty_like(output)
            start = 0
            for part in parts:
                length = part.end - part.begin
                whole[part.begin : part.end] = output[start : start + length]
                start += length
            if self._postscale != 1.0:
                whole.mul_(self._postscale)
            pieces = torch.split(whole, batch.lengths)
            for index, piece in zip(batch.indices, pieces, strict=True):
                source = self.tensors[index]
                target = source if self._inplace else torch.empty_like(source)
                results[index] = target.copy_(piece.view(source.shape))
        return list(self._given) if self._inplace else results
