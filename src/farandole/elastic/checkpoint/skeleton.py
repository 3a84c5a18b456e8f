"""A nested state taken apart: its tensors by name, and the rest, which is small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """Stands in a skeleton where a tensor was."""

    name: str


def take_apart(state: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """The skeleton of ``state`` (dictionaries, lists and tuples kept, a :class:`Leaf` for each
    tensor) and the tensors by the path that leads to them.

    A tensor that stands in two places is in both under the name of the first.

    Example::

        take_apart({"w": tensor, "epoch": 3})
        # ({"w": Leaf("w"), "epoch": 3}, {"w": tensor})
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = names.setdefault(id(value), path)
            tensors[name] = value
            return Leaf(name)
        return rebuild(value, lambda key, each: walk(each, f"{path}.{key}" if path else str(key)))

    return walk(state, prefix), tensors


def put_together(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of :func:`take_apart`."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    return rebuild(skeleton, lambda _, each: put_together(each, tensors))


def rebuild(value: Any, of: Callable[[Any, Any], Any]) -> Any:
    """A container like ``value`` with ``of(key, element)`` for its elements; else ``value``."""
    if isinstance(value, dict):
        made = {key: of(key, each) for key, each in value.items()}
        # An OrderedDict stays one: load_state_dict() of some modules tells them apart.
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, tuple):
        items = [of(place, each) for place, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [of(place, each) for place, each in enumerate(value)]
    return value


def _like(value: Any, made: dict[Any, Any]) -> Any:
    same = value.copy()
    same.update(made)
    return same
