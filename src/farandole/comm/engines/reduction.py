"""Reducing on the spot, in the order of the ranks: what an engine does where no library does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from farandole.comm.engines.base import Reduction

_COMBINE: dict[Reduction, Callable[[torch.Tensor, torch.Tensor], object]] = {
    Reduction.SUM: lambda total, part: total.add_(part),
    Reduction.PRODUCT: lambda total, part: total.mul_(part),
    Reduction.MIN: lambda total, part: torch.minimum(total, part, out=total),
    Reduction.MAX: lambda total, part: torch.maximum(total, part, out=total),
}


def reduce_in_order(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """Reduce equally long ``parts`` into a new tensor of their dtype, first to last."""
    total = parts[0].clone()
    combine = _COMBINE[reduction]
    for part in parts[1:]:
        combine(total, part)
    return total
