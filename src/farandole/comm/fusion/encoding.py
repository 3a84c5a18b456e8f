"""The exchange that a codec of the simple kind makes: encode, sum what was encoded, decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from farandole.comm.codec import Codec, Layout
from farandole.comm.engines.base import REDUCIBLE, Engine, Reduction, Work
from farandole.comm.engines.relay import Relay
from farandole.core.errors import UsageTypeError


class EncodedSum:
    """An :class:`~farandole.comm.codec.Exchange` without error feedback.

    Everything travels as one tensor: the encoded gradients, then what comes after them as it is.
    """

    across_hosts = False

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self._codec = codec
        self._layout = layout

    def sum(self, buffer: Tensor, engine: Engine) -> Work:
        """See :class:`~farandole.comm.codec.Exchange`."""
        return Relay(self._steps(buffer, engine))

    def parts(self, count: int) -> Sequence[tuple[int, EncodedSum]]:
        """See :class:`~farandole.comm.codec.Exchange`."""
        return [(each.length, EncodedSum(self._codec, each)) for each in self._layout.cut(count)]

    def _steps(self, buffer: Tensor, engine: Engine) -> Iterator[Work]:
        gradients, tail = buffer[: self._layout.payload], buffer[self._layout.payload :]
        encoded, context = self._codec.compress(gradients)
        if not encoded.dtype.is_floating_point or encoded.dtype not in REDUCIBLE:
            raise UsageTypeError(
                f"compression made a {encoded.dtype} tensor of a {gradients.dtype} one. What "
                "travels must be float16, bfloat16, float32 or float64."
            )
        sent = torch.cat([encoded.reshape(-1), tail.to(encoded.dtype)])
        yield engine.allreduce(sent, Reduction.SUM)
        length = encoded.numel()
        gradients.copy_(self._codec.decompress(sent[:length].view(encoded.shape), context))
        tail.copy_(sent[length:])
