"""Between the tensors that torch's operations take and the flat ones that engines move.

Elements travel in row-major order, whatever a tensor's strides. A contiguous tensor is moved in
place; any other one is copied before and after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.core.errors import UsageError


def single(tensors: Sequence[Tensor]) -> Tensor:
    """The one tensor of a list that torch made for several devices a rank, which are history."""
    if len(tensors) != 1:
        raise UsageError(f"The operation takes one tensor a rank, got {len(tensors)}.")
    return tensors[0]


def flat(tensor: Tensor) -> Tensor:
    """The elements of ``tensor``; shares its memory if that is contiguous."""
    return tensor.detach().contiguous().view(-1)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all ``tensors``, one after the other."""
    return flat(tensors[0]) if len(tensors) == 1 else torch.cat([flat(each) for each in tensors])


def target(tensors: Sequence[Tensor]) -> Tensor:
    """Where the elements of all ``tensors`` can be received: to be given to :func:`deal`."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return tensors[0].detach().new_empty(sum(each.numel() for each in tensors))


def deal(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write flat ``values`` into ``tensors``, where they are not there already."""
    for piece, tensor in zip(
        values.split_with_sizes([each.numel() for each in tensors]), tensors, strict=True
    ):
        if not (tensor.is_contiguous() and piece.data_ptr() == tensor.data_ptr()):
            tensor.detach().copy_(piece.view(tensor.shape))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """``tensors`` in groups of one dtype, in the order of their first."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def equal_parts(whole: Tensor, part: Tensor, size: int) -> list[int]:
    """The elements of each of ``size`` parts; ``UsageError`` unless ``part`` is one of them."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UsageError(
            f"A tensor of {whole.numel()} elements ({whole.dtype}) does not consist of {size} "
            f"parts of {part.numel()} ({part.dtype}), one a rank."
        )
    return [part.numel()] * size


def rows(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """The elements in each of the ``splits`` of the first dimension; equal ones if empty."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise UsageError(f"{length} rows cannot be dealt equally to {size} ranks: pass splits.")
        splits = [length // size] * size
    if len(splits) != size or sum(splits) != length:
        raise UsageError(
            f"The splits {list(splits)} are not {size} numbers, one a rank, that add up to the "
            f"{length} rows of the tensor."
        )
    width = tensor.numel() // length if length else 0
    return [split * width for split in splits]


def nothing() -> None:
    """For an operation that leaves nothing to be done."""
