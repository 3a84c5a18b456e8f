"""The contract of a codec: how a tensor travels in another form than it has.

Whoever reduces what a codec made sums the encoded forms, so a codec is (about) linear. It is alike
on all ranks, and the shape of what it makes depends on the shape of its input alone.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Codec(Protocol):
    """Turns a dense floating-point tensor into another one that travels, and back."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and a context for :meth:`decompress`."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """What was compressed, with the shape and the dtype it had."""
        ...
