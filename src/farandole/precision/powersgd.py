"""PowerSGD: a gradient as the product of two thin matrices (Vogels et al., NeurIPS 2019).

A gradient M of n rows and m columns, with what was not sent before, is approximated with rank r by
one step of subspace iteration::

    P = sum over the ranks of M Q'      n x r, travels
    P = orthonormal basis of P
    Q = sum over the ranks of P' M      r x m, travels
    result = P Q                        error of a rank: M - P (P' M)

Both sums are linear, so all ranks together approximate the sum of their gradients, and what travels
does not grow with their number. Q of one step is where the next one begins (the paper's warm
start), which makes one iteration a step enough.

The basis is made by Householder's QR, not by Gram and Schmidt's method as in the paper: it is
orthonormal whatever P is, also for a gradient of lower rank or of zeros alone. Q lies in memory row
after row since products of a large matrix and a thin one are several times slower with the thin
one's other order; so each of them takes about as long as reading M.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.codec import Block, Exchange, Layout, Memory
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.precision.feedback import FeedbackCodec, FeedbackExchange, lasting, zero_where

WORTH = 2
"""Encode only what becomes smaller by this factor at least."""


@dataclass(frozen=True)
class PowerSGD(FeedbackCodec):
    """See the module. A matrix has the outermost dimension as rows, all others as columns."""

    rank: int

    def __str__(self) -> str:
        return f"powersgd(rank={self.rank})"

    def encodes(self, shape: Sequence[int]) -> bool:
        """See :class:`FeedbackCodec`."""
        rows, columns = _matrix(shape)
        return WORTH * self.rank * (rows + columns) <= rows * columns

    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """See :class:`FeedbackCodec`."""
        return PowerSGDExchange(self, layout, memory, self.rank)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = next((length for length in shape if length > 1), 1)
    return rows, math.prod(shape) // rows


class PowerSGDExchange(FeedbackExchange):
    """Two sums; what is not encoded travels with the first."""

    def __init__(self, codec: PowerSGD, layout: Layout, memory: Memory, rank: int) -> None:
        super().__init__(codec, layout, memory)
        self._shapes = [_matrix(block.shape) for block in self.blocks]
        self._rank = rank

    def steps(self, buffer: Tensor, engine: Engine) -> Iterator[Work]:
        """See :class:`FeedbackExchange`."""
        rest = self.rest.take(buffer)
        errors = self.all_errors(buffer)
        matrices = self._as_matrices(self.errors)
        gradients = self._as_matrices(self.gradients(buffer))
        starts = [self._start(block, errors) for block in self.blocks]

        first = errors.new_empty(self._length(0) + rest.numel())
        bases = self._thin(first, 0)
        for matrix, gradient, start, basis in zip(matrices, gradients, starts, bases, strict=True):
            matrix.add_(gradient)  # here, and not all at once, since it is in the cache then
            torch.mm(matrix, start.t(), out=basis)
        first[self._length(0) :].copy_(rest)
        yield engine.allreduce(first, Reduction.SUM)
        self.rest.put(buffer, first[self._length(0) :])
        bases = orthonormal(bases)

        second = errors.new_empty(self._length(1))
        weights = self._thin(second, 1)
        for matrix, basis, weight in zip(matrices, bases, weights, strict=True):
            torch.mm(basis.t(), matrix, out=weight)
            matrix.addmm_(basis, weight, alpha=-1)
        yield engine.allreduce(second, Reduction.SUM)
        for gradient, basis, weight, start in zip(gradients, bases, weights, starts, strict=True):
            if gradient.dtype == basis.dtype:
                torch.mm(basis, weight, out=gradient)
            else:
                gradient.copy_(basis @ weight)
            start.copy_(weight)
        self._forget_if_broken(second)

    def _as_matrices(self, flat: Sequence[Tensor]) -> list[Tensor]:
        return [each.view(shape) for each, shape in zip(flat, self._shapes, strict=True)]

    def _length(self, side: int) -> int:
        return self._rank * sum(shape[side] for shape in self._shapes)

    def _thin(self, flat: Tensor, side: int) -> list[Tensor]:
        """The P of each block (side 0), or the Q (side 1), in ``flat``."""
        lengths = [self._rank * shape[side] for shape in self._shapes]
        pieces = flat[: sum(lengths)].split_with_sizes(lengths)
        return [each.view((-1, self._rank) if side == 0 else (self._rank, -1)) for each in pieces]

    def _start(self, block: Block, like: Tensor) -> Tensor:
        """Where the iteration begins: at the last Q, at first anywhere, alike on all ranks."""
        start = self.memory.shared.get(block.name)
        if start is None:
            with lasting():
                start = self.memory.shared[block.name] = self._any_start(block).to(like)
        return start

    def _any_start(self, block: Block) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(block.name.encode()).digest()[:4], "big")
        columns = _matrix(block.shape)[1]
        return torch.randn(
            self._rank, columns, generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
        )

    def _forget_if_broken(self, weights: Tensor) -> None:
        """After a gradient that was no number: nothing stays of it, on any rank."""
        broken = ~weights.isfinite().all()
        for error in self.errors:
            zero_where(error, broken)
        for block in self.blocks:
            zero_where(self.memory.shared[block.name], broken)


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """A basis of each one's columns, as orthonormal columns; equal shapes are done at once."""
    places: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(matrix.shape, []).append(place)
    bases = list(matrices)
    for alike in places.values():
        stacked = torch.linalg.qr(torch.stack([matrices[place] for place in alike])).Q
        for place, basis in zip(alike, stacked.unbind(), strict=True):
            bases[place] = basis
    return bases
