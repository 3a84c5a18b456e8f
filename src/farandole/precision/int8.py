"""Gradients as integers of 8 bits, each 256 with a scale of their own.

Quantised by blocks as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR
2022), summed as in ZeRO++ (Wang et al., 2023): every rank sends every other its share of the
blocks, sums the shares it gets in float32, and sends the quantised sum to all. So a number is
quantised twice, and no sum of integers can overflow. About a quarter of float32's bytes travel.

A block travels as 260 bytes: its scale (a 127th of its largest magnitude, float32), then its
numbers. A block with a number that is none comes out as nothing but NaN, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.codec import Exchange, Layout, Memory
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.precision.feedback import FeedbackCodec, FeedbackExchange, zero_where

BLOCK = 256
"""Numbers that share a scale."""
_LARGEST = 127
_SCALE = 4
"""Bytes of a scale."""
RECORD = _SCALE + BLOCK
"""Bytes of a block as it travels."""


def quantize(rows: Tensor) -> Tensor:
    """``(rows, BLOCK)`` floating-point numbers as ``(rows, RECORD)`` bytes."""
    scales = rows.abs().amax(dim=1).to(torch.float32) / _LARGEST
    records = rows.new_empty(len(rows), RECORD, dtype=torch.uint8)
    records[:, :_SCALE] = scales.view(torch.uint8).view(len(rows), _SCALE)
    divisors = scales.masked_fill(scales == 0, 1).unsqueeze(1)
    whole = (rows / divisors).round_().clamp_(-_LARGEST, _LARGEST)
    records[:, _SCALE:].view(torch.int8).copy_(whole)
    return records


def dequantize(records: Tensor) -> Tensor:
    """``(rows, RECORD)`` bytes as ``(rows, BLOCK)`` numbers, float32."""
    return records[:, _SCALE:].view(torch.int8).to(torch.float32).mul_(scales_of(records))


def scales_of(records: Tensor) -> Tensor:
    """The scale of each row, as a column; float32."""
    return records[:, :_SCALE].reshape(-1).view(torch.float32).unsqueeze(1)


def total(records: Tensor, size: int) -> Tensor:
    """The sum of what ``size`` ranks have sent, one after the other; float32."""
    first, *others = records.view(size, -1, RECORD)
    summed = dequantize(first)
    for each in others:
        summed.add_(dequantize(each))
    return summed


def shares(rows: int, size: int) -> list[int]:
    """How many of ``rows`` each of ``size`` ranks sums."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


@dataclass(frozen=True)
class Int8(FeedbackCodec):
    """See the module. Gradients of one dimension (biases, norms) are summed exactly."""

    def __str__(self) -> str:
        return "int8"

    def encodes(self, shape: Sequence[int]) -> bool:
        """See :class:`FeedbackCodec`."""
        return sum(length > 1 for length in shape) > 1

    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """See :class:`FeedbackCodec`."""
        return Int8Exchange(self, layout, memory)


class Int8Exchange(FeedbackExchange):
    """The errors of both quantisations stay with who made them."""

    alignment = BLOCK

    def steps(self, buffer: Tensor, engine: Engine) -> Iterator[Work]:
        """See :class:`FeedbackExchange`."""
        rest = self.rest.take(buffer)
        exact = engine.allreduce(rest, Reduction.SUM)
        size, rank = engine.seat.size, engine.seat.rank
        rows = self.add_to_errors(buffer).view(-1, BLOCK)
        share = shares(len(rows), size)
        counts = [each * RECORD for each in share]

        sent = quantize(rows)
        _take_off(rows, sent)
        received = sent.new_empty(size * counts[rank])
        yield engine.alltoall(received, sent.view(-1), [counts[rank]] * size, counts)
        summed = total(received, size)
        returned = quantize(summed)
        _take_off(summed, returned)
        rows.split_with_sizes(share)[rank].add_(summed)
        yield engine.allgather(sent.view(-1), returned.view(-1), counts)
        values = dequantize(sent).view(-1)
        lengths = [-(-block.numel // BLOCK) * BLOCK for block in self.blocks]
        for block, gradient, piece in zip(
            self.blocks, self.gradients(buffer), values.split_with_sizes(lengths), strict=True
        ):
            gradient.copy_(piece[: block.numel])
        yield exact
        self.rest.put(buffer, rest)


def _take_off(rows: Tensor, records: Tensor) -> None:
    """From what was to be sent, what was; nothing stays of rows that are no numbers."""
    rows.sub_(dequantize(records))
    zero_where(rows, ~scales_of(records).isfinite())
