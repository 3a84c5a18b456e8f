"""How each dtype of torch travels, given that engines reduce only the few of ``REDUCIBLE``.

A :class:`Carrier` turns flat tensors of one dtype into flat buffers of a reducible one and back:

========================  ======================  ================================================
dtype                     travels as              why the result is right
========================  ======================  ================================================
``REDUCIBLE``             itself
bool                      uint8, same bytes       Min is *and*, Max is *or*, Product is *and*
int16, uint16             int32                   wraps to the same value when narrowed
uint32                    int64                   the same
uint64                    int64, same bytes       sums and products agree modulo 2**64; for Min and
                                                  Max the top bit is flipped, which keeps the order
complex                   pairs of reals          sums only
complex (Product)         gathered                each rank multiplies all contributions itself
float8                    float32                 rounded once, at the end
========================  ======================  ================================================

Scaling happens on the carried values, before they are narrowed. Integers scale in float64 and
truncate toward zero; float16 and bfloat16 scale in float32. An average without a scale factor
divides: integers exactly, floats with one rounding.

Operations that only move data carry bytes (:func:`as_bytes`), so any dtype goes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.engines.base import REDUCIBLE
from farandole.comm.ops import Op
from farandole.core.errors import UsageError

_TOP_BIT = -(2**63)

_WIDENED = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
_REAL_PART = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@dataclass(frozen=True)
class Scale:
    """A factor and a divisor to apply to every element."""

    factor: float = 1.0
    divisor: int = 1

    @property
    def neutral(self) -> bool:
        """Whether applying it changes nothing."""
        return self.factor == 1.0 and self.divisor == 1

    def apply(self, values: Tensor, *, unsigned: bool = False) -> Tensor:
        """A scaled copy of ``values``, in their dtype.

        ``unsigned``: the int64 ``values`` hold uint64 bits.
        """
        if values.dtype.is_floating_point:
            return values / self.divisor if self.factor == 1.0 else values * self._multiplier
        if unsigned:
            wide = values.view(torch.uint64).to(torch.float64)
            return (wide * self._multiplier).to(torch.uint64).view(torch.int64)
        if self.factor == 1.0:
            return torch.div(values, self.divisor, rounding_mode="trunc")
        return (values.to(torch.float64) * self._multiplier).trunc().to(values.dtype)

    def apply_(self, values: Tensor, *, unsigned: bool = False) -> Tensor:
        """Like :meth:`apply`, but free to overwrite ``values``."""
        if not values.dtype.is_floating_point:
            return self.apply(values, unsigned=unsigned)
        if self.factor == 1.0:
            return values.div_(self.divisor)
        return values.mul_(self._multiplier)

    @property
    def _multiplier(self) -> float:
        return self.factor / self.divisor


@dataclass(frozen=True)
class Carrier:
    """How tensors of :attr:`source` are reduced in buffers of :attr:`dtype`."""

    source: torch.dtype
    dtype: torch.dtype
    width: int = 1
    """Buffer elements per tensor element: 2 for complex, else 1."""
    flips_top_bit: bool = False
    gathered: bool = False
    """Engines cannot reduce this: move every contribution and combine them here."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether a buffer is the tensor's memory seen as another dtype, not converted values."""
        return self.source.itemsize == self.dtype.itemsize * self.width

    def load(self, flat: Tensor, scale: Scale) -> Tensor:
        """``flat`` (dtype ``source``), scaled, as a flat buffer; may share memory with ``flat``."""
        if self.dtype == self.source:
            buffer = flat
        else:
            buffer = flat.view(self.dtype) if self.keeps_bytes else flat.to(self.dtype)
        if not scale.neutral:
            buffer = scale.apply(buffer, unsigned=self._unsigned)
        return buffer ^ _TOP_BIT if self.flips_top_bit else buffer

    def unload(self, buffer: Tensor, scale: Scale) -> Tensor:
        """The scaled content of ``buffer`` as a flat tensor of ``source``.

        May share memory with ``buffer``, and may overwrite it.
        """
        if self.flips_top_bit:
            buffer = buffer ^ _TOP_BIT
        if not scale.neutral:
            buffer = scale.apply_(buffer, unsigned=self._unsigned)
        if self.dtype == self.source:
            return buffer
        return buffer.view(self.source) if self.keeps_bytes else buffer.to(self.source)

    @property
    def _unsigned(self) -> bool:
        return self.source == torch.uint64


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """As headers have it: ``float32``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def carrier_of(dtype: torch.dtype, op: Op) -> Carrier:
    """The carrier for reducing ``dtype`` with ``op``.

    Raises :class:`UsageError`, naming the dtype, where the combination means nothing.
    """
    if dtype in REDUCIBLE:
        return Carrier(dtype, dtype)
    if dtype in _WIDENED:
        return Carrier(dtype, _WIDENED[dtype])
    if dtype == torch.uint64:
        return Carrier(dtype, torch.int64, flips_top_bit=op in (Op.MIN, Op.MAX))
    if dtype == torch.bool:
        if op in (Op.SUM, Op.AVERAGE):
            raise UsageError(
                f"{op.label} of torch.bool has no meaning. Use Max (true where any rank is true), "
                "Min (true where all are), or convert the tensor to an integer dtype first."
            )
        return Carrier(dtype, torch.uint8)
    if dtype in _REAL_PART:
        if op in (Op.MIN, Op.MAX):
            raise UsageError(
                f"{op.label} of {dtype} has no meaning: complex numbers have no order. "
                "Reduce tensor.abs(), or the real and imaginary parts by themselves."
            )
        return Carrier(dtype, _REAL_PART[dtype], width=2, gathered=op == Op.PRODUCT)
    raise UsageError(
        f"A tensor of {dtype} cannot be reduced: it is a storage format without arithmetic. "
        "Convert it to a floating point or integer dtype first. "
        "(broadcast, allgather and alltoall take any dtype.)"
    )


def require_scalable(dtype: torch.dtype, *scales: float) -> None:
    """Raise :class:`UsageError` when ``scales`` other than 1 are asked of a bool tensor."""
    if dtype == torch.bool and any(scale != 1.0 for scale in scales):
        raise UsageError("A tensor of torch.bool cannot be scaled: leave prescale and postscale.")


def product(parts: Tensor) -> Tensor:
    """Multiply the rows of ``parts`` in their order."""
    if parts.dtype == torch.complex32:
        return parts.to(torch.complex64).prod(dim=0).to(parts.dtype)
    return parts.prod(dim=0)


def as_bytes(flat: Tensor) -> Tensor:
    """The memory of a flat tensor as a uint8 tensor that shares it."""
    return flat.view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The flat tensor of ``dtype`` whose bytes are ``data``; shares memory."""
    return data.view(dtype)
