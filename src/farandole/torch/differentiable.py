"""The collectives as autograd functions, with Horovod's gradients.

=============  =====================================================================
collective     gradient with respect to the input
=============  =====================================================================
allreduce      the same allreduce of the output's gradient (Sum and Average)
allgather      the average over the ranks of the output's gradient, this rank's rows
broadcast      the average over the ranks of the output's gradient on the root, else 0
alltoall       the rows of the output's gradient, sent back
reducescatter  the gathered output's gradients; with Sum times the number of ranks
=============  =====================================================================

Backward passes that contain these must run alike on all ranks. Gradients travel as the forward
collectives do, with their headers compared, so ranks that differ are told so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import UsageError

Scales = tuple[float, float]
"""Factors before and after the reduction."""


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records what happens to ``tensors`` now."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def record(function: Any, *args: Any) -> Any:
    """What ``function``, one of the classes below, gives for ``args``, recorded by autograd."""
    return function.apply(*args)


# A rank may record a collective that another one does not record (``torch.no_grad()``), so the
# forward passes exchange exactly what the plain collectives do.


class Allreduce(torch.autograd.Function):
    """Recorded with ``group, op, scales, name, grouped, *tensors``."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        op: Op,
        scales: Scales,
        name: str | None,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """See the class."""
        ctx.how = (group, op, scales)
        before, after = scales
        if grouped:
            return tuple(
                group.grouped_allreduce(tensors, op=op, prescale=before, postscale=after, name=name)
            )
        (tensor,) = tensors
        return (group.allreduce(tensor, op=op, prescale=before, postscale=after, name=name),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See the module."""
        group, op, scales = ctx.how
        if op not in (Op.SUM, Op.AVERAGE):
            raise UsageError(
                f"allreduce with op={op.label} has no gradient. Use Sum or Average, or "
                "tensor.detach() where no gradient is meant to flow."
            )
        reduced = record(Allreduce, group, op, scales, None, len(gradients) > 1, *gradients)
        return (None, None, None, None, None, *reduced)


def _average(group: Group, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    averaged: tuple[Tensor, ...] = record(
        Allreduce, group, Op.AVERAGE, (1.0, 1.0), None, True, *gradients
    )
    return averaged


class Allgather(torch.autograd.Function):
    """Recorded with ``group, name, grouped, *tensors``."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, name: str | None, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """See the class."""
        ctx.group = group
        if grouped:
            gathered = group.grouped_allgather(tensors, name=name)
        else:
            gathered = [group.allgather(tensors[0], name=name)]
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See the module."""
        group: Group = ctx.group
        averaged = _average(group, gradients)
        rows = group.allgather(torch.tensor([ctx.rows], device="cpu"))
        starts = rows[: group.rank].sum(0).tolist()
        mine = (
            gradient[start : start + length]
            for gradient, start, length in zip(averaged, starts, ctx.rows, strict=True)
        )
        return (None, None, None, *mine)


class Broadcast(torch.autograd.Function):
    """Recorded with ``group, root, name, tensor``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, group: Group, root: int, name: str | None, tensor: Tensor
    ) -> Tensor:
        """See the class."""
        ctx.how = (group, root)  # type: ignore[attr-defined]
        return group.broadcast(tensor, root=root, name=name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """See the module."""
        group, root = ctx.how
        (averaged,) = _average(group, [gradient])
        return None, None, None, averaged if group.rank == root else torch.zeros_like(averaged)


class Alltoall(torch.autograd.Function):
    """Recorded with ``group, splits, name, tensor``; gives rows, and how many from each rank."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, splits: list[int] | None, name: str | None, tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        received, counts = group.alltoall(tensor, splits, name=name)
        ctx.mark_non_differentiable(counts)
        ctx.group, ctx.counts, ctx.rows = group, counts, tensor.shape[0]
        return received, counts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """See the module."""
        returned, _ = record(Alltoall, ctx.group, ctx.counts, None, gradient)
        # Splits may leave rows at the end at home; those have no part in the result.
        rest = ctx.rows - returned.shape[0]
        if rest:
            returned = torch.cat([returned, returned.new_zeros(rest, *returned.shape[1:])])
        return None, None, None, returned


class Reducescatter(torch.autograd.Function):
    """Recorded with ``group, op, scales, name, grouped, *tensors``."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        op: Op,
        scales: Scales,
        name: str | None,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """See the class."""
        ctx.how = (group, op, scales)
        before, after = scales
        if grouped:
            return tuple(
                group.grouped_reducescatter(
                    tensors, op=op, prescale=before, postscale=after, name=name
                )
            )
        (tensor,) = tensors
        return (group.reducescatter(tensor, op=op, prescale=before, postscale=after, name=name),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See the module."""
        group, op, (before, after) = ctx.how
        factor = before * after * (group.size if op is Op.SUM else 1)
        gathered = record(Allgather, group, None, True, *(each * factor for each in gradients))
        return (None, None, None, None, None, *gathered)
