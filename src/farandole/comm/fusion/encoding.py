"""A bucket as it travels when a codec encodes it: the encoded gradients, then the tail as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farandole.comm.codec import Codec
from farandole.comm.engines.base import REDUCIBLE
from farandole.core.errors import UsageTypeError


class Encoding:
    """Between a bucket's buffer and what an engine reduces for it. Keeps one pass's context."""

    def __init__(self, codec: Codec, buffer: Tensor, payload: int) -> None:
        self._codec = codec
        self._payload = payload
        self.use(buffer)
        self._shape = torch.Size()
        self._context: Any = None
        self._sent: Tensor | None = None

    def use(self, buffer: Tensor) -> None:
        """Encode what is in ``buffer`` from now on."""
        self._gradients = buffer[: self._payload]
        self._tail = buffer[self._payload :]

    def encode(self) -> Tensor:
        """A flat tensor for an engine; the buffer may be written again only by :meth:`decode`."""
        encoded, self._context = self._codec.compress(self._gradients)
        if not encoded.dtype.is_floating_point or encoded.dtype not in REDUCIBLE:
            raise UsageTypeError(
                f"compression made a {encoded.dtype} tensor of a {self._gradients.dtype} one. What "
                "travels must be float16, bfloat16, float32 or float64."
            )
        self._shape = encoded.shape
        self._sent = torch.cat([encoded.reshape(-1), self._tail.to(encoded.dtype)])
        return self._sent

    def decode(self) -> None:
        """Put what came back into the buffer."""
        sent, self._sent = self._sent, None
        assert sent is not None
        length = sent.numel() - self._tail.numel()
        encoded = sent[:length].view(self._shape)
        self._gradients.copy_(self._codec.decompress(encoded, self._context))
        self._tail.copy_(sent[length:])
        self._context = None
