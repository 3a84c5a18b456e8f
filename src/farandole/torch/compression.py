"""Smaller gradients on the wire, at the cost of precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """How a tensor travels. Subclass it for a compression of your own.

    Both methods are static, and alike on all ranks. ``compress`` gets a dense floating-point
    tensor of any shape and returns a dense floating-point tensor, of a shape that depends on that
    of the input alone, and whatever ``decompress`` needs to know. What travels is summed, so
    ``decompress`` of a sum must be the sum of what was compressed (about).

    Example::

        class Halved(hvd.Compression.none):
            @staticmethod
            def compress(tensor):
                return tensor.to(torch.float16), tensor.dtype

            @staticmethod
            def decompress(tensor, ctx):
                return tensor.to(ctx)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels for ``tensor``, and a context for :meth:`decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What was compressed, with the shape and the dtype it had."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves everything as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """``tensor`` itself."""
        return tensor


class _Cast(Compressor):
    """Travels as another floating-point dtype; what is no floating-point number, as it is."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """``tensor`` as :attr:`dtype`, and its own dtype."""
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """``tensor`` as the dtype ``ctx``."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Half the bytes of float32, 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Half the bytes of float32, 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The ways in which tensors may travel, for the ``compression`` arguments.

    ``none``
        As they are.
    ``fp16``
        Floating-point tensors as float16. Gradients are divided by the number of ranks first, so
        that the sum overflows where the average would.
    ``bf16``
        Floating-point tensors as bfloat16: less precise than fp16, but nothing overflows.

    Example::

        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=hvd.Compression.fp16
        )
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
