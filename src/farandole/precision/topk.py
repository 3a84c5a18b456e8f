"""Only the largest numbers of a gradient travel, each with its place.

As in Lin et al., "Deep Gradient Compression" (ICLR 2018), without its corrections of momentum:
a fixed share of each gradient, chosen by magnitude, goes to all ranks; the rest is this rank's
error. What a rank receives grows with the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.codec import Exchange, Layout, Memory
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.precision.feedback import FeedbackCodec, FeedbackExchange, zero_where

SMALLEST = 1024
"""Elements. Smaller gradients are summed exactly."""
_INT32 = 2**31


@dataclass(frozen=True)
class TopK(FeedbackCodec):
    """See the module. Small gradients and those of one dimension are summed exactly."""

    ratio: float

    def __str__(self) -> str:
        return f"topk(ratio={self.ratio})"

    def encodes(self, shape: Sequence[int]) -> bool:
        """See :class:`FeedbackCodec`."""
        return sum(length > 1 for length in shape) > 1 and math.prod(shape) >= SMALLEST

    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """See :class:`FeedbackCodec`."""
        return TopKExchange(self, layout, memory, self.ratio)


class TopKExchange(FeedbackExchange):
    """One allgather of values and places, beside the sum of what is not encoded."""

    def __init__(self, codec: TopK, layout: Layout, memory: Memory, ratio: float) -> None:
        super().__init__(codec, layout, memory)
        self._counts = [math.ceil(ratio * block.numel) for block in self.blocks]
        self._places = torch.int32 if layout.length < _INT32 else torch.int64

    def steps(self, buffer: Tensor, engine: Engine) -> Iterator[Work]:
        """See :class:`FeedbackExchange`."""
        rest = self.rest.take(buffer)
        exact = engine.allreduce(rest, Reduction.SUM)
        self.add_to_errors(buffer)
        values, places = self._take_largest()
        sent = torch.cat([values.view(torch.uint8), places.view(torch.uint8)])
        size = engine.seat.size
        received = sent.new_empty(size * sent.numel())
        yield engine.allgather(received, sent, [sent.numel()] * size)
        summed = torch.zeros_like(buffer, dtype=values.dtype)
        rows = received.view(size, -1)
        all_values = _read(rows[:, : values.nbytes], values.dtype)
        all_places = _read(rows[:, values.nbytes :], self._places)
        for theirs, where in zip(all_values, all_places, strict=True):
            # The places of one rank are different ones, so the order of additions is fixed.
            summed.index_add_(0, where.long(), theirs)
        for gradient, result in zip(self.gradients(buffer), self.gradients(summed), strict=True):
            gradient.copy_(result)
        yield exact
        self.rest.put(buffer, rest)

    def _take_largest(self) -> tuple[Tensor, Tensor]:
        """The numbers to send, which the errors then lack, and their places in the buffer."""
        values, places = [], []
        for block, error, count in zip(self.blocks, self.errors, self._counts, strict=True):
            chosen = error.abs().topk(count, sorted=False).indices
            values.append(error[chosen])
            places.append((chosen + block.offset).to(self._places))
            error[chosen] = 0
            zero_where(error, ~error.isfinite())
        return torch.cat(values), torch.cat(places)


def _read(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied, since numbers of 8 bytes may not begin anywhere in memory."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
