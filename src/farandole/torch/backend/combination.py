"""What torch's reduce operations mean here: how elements travel, and how they are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.dtypes import Carrier, Scale
from farandole.comm.engines.base import Reduction
from farandole.comm.ops import Op
from farandole.core.errors import UnsupportedError

ReduceOp = Any
"""torch's ``ReduceOp``, or a member of its enumeration."""

_Kind: Any = dist.ReduceOp.RedOpType

_AS_IT_IS = Scale()

_OPS = {
    _Kind.SUM: Op.SUM,
    _Kind.AVG: Op.AVERAGE,
    _Kind.PREMUL_SUM: Op.SUM,
    _Kind.MIN: Op.MIN,
    _Kind.MAX: Op.MAX,
    _Kind.PRODUCT: Op.PRODUCT,
}

_BITWISE = {
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class Combination:
    """How one dtype is reduced by one operation."""

    carrier: Carrier
    reduction: Reduction
    before: Scale = _AS_IT_IS
    """Applied to what each rank brings."""
    after: Scale = _AS_IT_IS
    """Applied to the result."""
    combine: Callable[[Tensor], Tensor] | None = None
    """When set, no engine reduces this: each rank combines all ranks' rows itself."""

    def load(self, flat: Tensor) -> Tensor:
        """``flat`` as it travels; may share its memory."""
        return self.carrier.load(flat, self.before)

    def unload(self, buffer: Tensor) -> Tensor:
        """The result in ``buffer``, in the tensor's own dtype; may share its memory."""
        return self.carrier.unload(buffer, self.after)


def combination(op: ReduceOp, dtype: torch.dtype, size: int) -> Combination:
    """How ``size`` ranks reduce ``dtype`` by ``op``.

    ``UsageError`` where it means nothing, ``UnsupportedError`` for a factor that is a tensor.
    """
    kind: Any = getattr(op, "op", op)
    if kind in _BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise UnsupportedError(
                f"ReduceOp.{kind.name} combines bits, and {dtype} is no integer or bool. View the "
                "tensor as integers of the same width, as in tensor.view(torch.int32)."
            )
        return Combination(Carrier(dtype, dtype), Reduction.SUM, combine=_rows(_BITWISE[kind]))
    carrier = dtypes.carrier_of(dtype, _OPS[kind])
    return Combination(
        carrier,
        _OPS[kind].reduction,
        before=Scale(_factor(op)) if kind == _Kind.PREMUL_SUM else _AS_IT_IS,
        after=Scale(divisor=size) if kind == _Kind.AVG else _AS_IT_IS,
        combine=_product(carrier) if carrier.gathered else None,
    )


def _factor(op: ReduceOp) -> float:
    factor = getattr(op, "factor", None)
    if not isinstance(factor, float):
        raise UnsupportedError(
            "PREMUL_SUM works with a factor that is a number, which torch must let us read (2.13 "
            "does). Multiply the tensor before, and use ReduceOp.SUM."
        )
    return factor


def _rows(pair: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def combine(rows: Tensor) -> Tensor:
        each: Sequence[Tensor] = rows.unbind()
        return reduce(pair, each)

    return combine


def _product(carrier: Carrier) -> Callable[[Tensor], Tensor]:
    def combine(rows: Tensor) -> Tensor:
        values = rows.view(carrier.source)
        return dtypes.product(values).view(carrier.dtype)

    return combine
