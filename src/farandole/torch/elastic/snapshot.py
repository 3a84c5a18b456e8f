"""Copies of trees of tensors: dictionaries, lists and tuples, as ``state_dict()`` gives them.

A commit copies into the memory of the copy before, which costs a third of new memory and leaves the
allocator alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def copied(tree: Any, before: Any = None) -> Any:
    """A copy of ``tree``, which reuses the tensors of ``before``, an earlier copy, where it can.

    ``before`` is of no more use after that. Keys and order stay as they are.

    Example::

        saved = copied(model.state_dict(), saved)
    """
    with torch.no_grad():
        return _copied(tree, before)


def _copied(tree: Any, before: Any) -> Any:
    if isinstance(tree, Tensor):
        return _copied_tensor(tree, before)
    if isinstance(tree, dict):
        known = before if isinstance(before, dict) else {}
        pairs = [(key, _copied(value, known.get(key))) for key, value in tree.items()]
        twin = copy.copy(tree)  # a dictionary of the same kind, with its attributes
        twin.clear()
        twin.update(pairs)
        return twin
    if type(tree) in (list, tuple):
        alike = isinstance(before, type(tree)) and len(before) == len(tree)
        known_items = before if alike else [None] * len(tree)
        return type(tree)(_copied(a, b) for a, b in zip(tree, known_items, strict=True))
    return copy.deepcopy(tree)


def _copied_tensor(tensor: Tensor, before: Any) -> Tensor:
    if (
        isinstance(before, Tensor)
        and before.layout == tensor.layout == torch.strided
        and before.shape == tensor.shape
        and before.dtype == tensor.dtype
        and before.device == tensor.device
    ):
        return before.copy_(tensor)
    return tensor.detach().clone()
