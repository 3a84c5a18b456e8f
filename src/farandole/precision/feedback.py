"""What the codecs with error feedback have in common.

What a codec does not send of a gradient is not lost: it stays on the rank as its *error*, and is
added to what the rank sends the next time (Seide et al., Interspeech 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD", ICML 2019). So over the steps everything is sent: the sum of what
came out of the exchange differs from the sum of what went in by the errors of now alone, which
stay as small as those of a few steps.

An error that is no number (a gradient overflowed, and ``GradScaler`` skips the step) is forgotten,
or it would spoil every later step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from farandole.comm.codec import Block, Exchange, Layout, Memory
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.comm.engines.relay import Relay


class FeedbackCodec(ABC):
    """Encodes the gradients that are worth it; the others are summed exactly.

    A kind of :class:`~farandole.comm.codec.ExchangeCodec`.
    """

    @abstractmethod
    def encodes(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape, outermost dimension in memory first, is worth it."""

    @abstractmethod
    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """See :class:`~farandole.comm.codec.ExchangeCodec`."""


class FeedbackExchange(ABC):
    """An :class:`~farandole.comm.codec.Exchange` with error feedback."""

    across_hosts = False
    alignment = 1
    """Elements. Each block's error begins at a multiple, after zeros that stay zeros."""

    def __init__(self, codec: FeedbackCodec, layout: Layout, memory: Memory) -> None:
        self.codec = codec
        self.memory = memory
        self._layout = layout
        self.blocks = [block for block in layout.blocks if codec.encodes(block.shape)]
        self.rest = Rest(layout.length, self.blocks)
        self._error: Tensor | None = None
        self.errors: list[Tensor] = []
        """Of each block, flat. While a sum is in flight: what this rank wants to send in all."""
        self._parts: dict[int, list[tuple[int, Exchange]]] = {}

    def sum(self, buffer: Tensor, engine: Engine) -> Work:
        """See :class:`~farandole.comm.codec.Exchange`."""
        if not self.blocks:
            return engine.allreduce(buffer, Reduction.SUM)
        return Relay(self.steps(buffer, engine))

    @abstractmethod
    def steps(self, buffer: Tensor, engine: Engine) -> Iterator[Work]:
        """The stages of :meth:`sum`, when there are blocks to encode."""

    def parts(self, count: int) -> Sequence[tuple[int, Exchange]]:
        """See :class:`~farandole.comm.codec.Exchange`."""
        if count not in self._parts:
            self._parts[count] = [
                (each.length, self.codec.exchange(each, self.memory))
                for each in self._layout.cut(count)
            ]
        return self._parts[count]

    def gradients(self, buffer: Tensor) -> list[Tensor]:
        """Each block's part of ``buffer``, flat."""
        return [buffer[block.offset : block.offset + block.numel] for block in self.blocks]

    def all_errors(self, buffer: Tensor) -> Tensor:
        """All :attr:`errors` in one; zeros before the first ``buffer``."""
        if self._error is None:
            with lasting():
                self._error = self._allocate(buffer)
        return self._error

    def add_to_errors(self, buffer: Tensor) -> Tensor:
        """What to send: the errors and the gradients in ``buffer``; :meth:`all_errors`."""
        whole = self.all_errors(buffer)
        torch._foreach_add_(self.errors, self.gradients(buffer))
        return whole

    def _allocate(self, buffer: Tensor) -> Tensor:
        step = self.alignment
        lengths = [-(-block.numel // step) * step for block in self.blocks]
        dtype = torch.promote_types(buffer.dtype, torch.float32)
        whole = torch.zeros(sum(lengths), dtype=dtype, device=buffer.device)
        pieces = whole.split_with_sizes(lengths)
        self.errors = [
            piece[: block.numel] for block, piece in zip(self.blocks, pieces, strict=True)
        ]
        for block, error in zip(self.blocks, self.errors, strict=True):
            self.memory.keep(block.name, error)
        return whole


class Rest:
    """The parts of a flat buffer of ``length`` elements that no block is in; summed exactly."""

    def __init__(self, length: int, blocks: Sequence[Block]) -> None:
        self._ranges: list[tuple[int, int]] = []
        end = 0
        for block in blocks:
            if block.offset > end:
                self._ranges.append((end, block.offset))
            end = block.offset + block.numel
        if length > end:
            self._ranges.append((end, length))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(end - start for start, end in self._ranges)

    def take(self, buffer: Tensor) -> Tensor:
        """What is in those parts, one after the other."""
        return torch.cat([buffer[:0], *(buffer[start:end] for start, end in self._ranges)])

    def put(self, buffer: Tensor, values: Tensor) -> None:
        """Write back what :meth:`take` gave."""
        lengths = [end - start for start, end in self._ranges]
        for (start, end), piece in zip(self._ranges, values.split_with_sizes(lengths), strict=True):
            buffer[start:end].copy_(piece)


def lasting() -> AbstractContextManager[None]:
    """What is made in here may be changed anywhere; an engine's thread may be in inference mode."""
    return torch.inference_mode(False)


def zero_where(values: Tensor, broken: Tensor) -> None:
    """Zeros in ``values`` where ``broken``, which is broadcast to it, is true."""
    # On a GPU looking would stop the host for longer than writing takes.
    if values.device.type != "cpu" or bool(broken.any()):
        values.masked_fill_(broken, 0)
