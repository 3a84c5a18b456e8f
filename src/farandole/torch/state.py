"""One rank's model and optimizer, given to all: what every rank starts from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farandole.comm.fusion import plan as plans
from farandole.comm.group import Group
from farandole.core.errors import MismatchError, UsageError, UsageTypeError
from farandole.torch.objects import broadcast_in
from farandole.torch.options import parameters_of
from farandole.torch.process_sets import ProcessSet, global_process_set, root_within

PIECE = 64 * 1024 * 1024
"""Bytes that travel in one message, at least one tensor."""


def broadcast_parameters(
    params: Mapping[str, Tensor] | Sequence[Tensor | tuple[str, Tensor]],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the tensors of ``params`` by those of rank ``root_rank``.

    ``params`` is a ``state_dict()``, a list of tensors, or a list of pairs of name and tensor.
    Names, shapes and dtypes (any) are equal on all ranks, else ``MismatchError`` says which are
    not. A generator, like ``model.named_parameters()``, raises ``UsageError``; so do values that
    are not tensors. ``root_rank`` is a global rank, also within ``process_set``.

    Example::

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    named = _named(params)
    group = process_set.group()
    if group.size == 1:
        return
    specs = [_spec(name, tensor) for name, tensor in named]
    mine = plans.Proposal(tuple(specs), (), 0, 0, {})
    answers = group.agree("parameters", mine.to_bytes(), "broadcast_parameters")
    lines = plans.differences([plans.Proposal.from_bytes(answer) for answer in answers])
    if lines:
        raise MismatchError(
            "\n".join(
                [
                    "broadcast_parameters got different parameters on the ranks:",
                    *(f"  {line}" for line in lines[: plans.SHOWN_DIFFERENCES]),
                    "Build the same model on every rank before its parameters are broadcast.",
                ]
            ),
            ranks=group.members,
        )
    give_tensors(group, [tensor for _, tensor in named], root_rank, "parameters")


def _named(
    params: Mapping[str, Tensor] | Sequence[Tensor | tuple[str, Tensor]],
) -> list[tuple[str, Tensor]]:
    pairs: Iterable[Any]
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, (list, tuple)):
        pairs = [
            each if isinstance(each, tuple) else (f"tensor {place}", each)
            for place, each in enumerate(params)
        ]
    else:
        raise UsageError(
            f"broadcast_parameters takes a state_dict() or a list, not {type(params).__name__}. "
            "Pass model.state_dict()."
        )
    named = []
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise UsageTypeError(
                f"broadcast_parameters: {name!r} is {type(tensor).__name__}, not a tensor. Leave "
                "it out, and give it to the ranks with broadcast_object()."
            )
        named.append((name, tensor))
    return named


def _spec(name: str, tensor: Tensor) -> plans.ParameterSpec:
    return plans.ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        stride=(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.element_size(),
        device=tensor.device.type,
    )


def give_tensors(group: Group, tensors: Sequence[Tensor], root_rank: int, name: str) -> None:
    """Overwrite ``tensors``, which are alike on all ranks, a piece at a time."""
    root = root_within(group, root_rank)
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        piece: list[Tensor] = []
        for tensor in members:
            if piece and sum(each.nbytes for each in piece) + tensor.nbytes > PIECE:
                group.grouped_broadcast(piece, root=root, name=name, inplace=True)
                piece = []
            piece.append(tensor)
        group.grouped_broadcast(piece, root=root, name=name, inplace=True)


@dataclass(frozen=True)
class _Hole:
    """A tensor's place in a state that travels without its tensors."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """Device type."""


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the state and the hyperparameters of rank ``root_rank``'s optimizer to all ranks.

    Nothing changes on the root. The others load the root's ``state_dict()``: also state that they
    do not have yet, or that the root does not have; no step is taken. Tensors travel as tensors,
    other values pickled. Works with every optimizer whose ``state_dict()`` is complete, and with
    one wrapped by ``DistributedOptimizer`` as with any other. ``model`` is not used.
    ``root_rank`` is a global rank, also within ``process_set``.

    Where the root's optimizer has no state, parameters without a gradient get one of zeros, since
    Horovod's scripts find one there.

    Raises ``MismatchError`` on every rank when the optimizers' classes or their numbers of
    parameters differ.

    Example::

        if hvd.rank() == 0:
            optimizer.load_state_dict(torch.load("optimizer.pt"))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(
            "broadcast_optimizer_state takes a torch.optim.Optimizer, not "
            f"{type(optimizer).__name__}."
        )
    group = process_set.group()
    _compare(group, optimizer)
    state = give_state(group, optimizer, root_rank, "optimizer state")
    if state is not None:
        optimizer.load_state_dict(state)
    else:
        state = optimizer.state_dict()
    if not state["state"] and not isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def give_state(
    group: Group, optimizer: Optimizer, root_rank: int, name: str
) -> dict[str, Any] | None:
    """The ``state_dict()`` of rank ``root_rank``'s optimizer, on all ranks but that one."""
    tensors: list[Tensor] = []
    outline: Any = None
    is_root = group.rank == root_within(group, root_rank)
    if is_root:
        outline = _without_tensors(optimizer.state_dict(), tensors)
    outline = broadcast_in(group, outline, root_rank, name)
    if not is_root:
        tensors = [
            torch.empty(hole.shape, dtype=hole.dtype, device=hole.device)
            for hole in _holes(outline)
        ]
    give_tensors(group, tensors, root_rank, name)
    if is_root:
        return None
    state: dict[str, Any] = _with_tensors(outline, tensors)
    return state


def _compare(group: Group, optimizer: Optimizer) -> None:
    sizes = [len(each["params"]) for each in optimizer.param_groups]
    mine = f"{type(optimizer).__name__} with {sizes} parameters in its groups"
    answers = group.agree("optimizer state", json.dumps(mine).encode(), "broadcast_optimizer_state")
    said = [json.loads(answer) for answer in answers]
    if len(set(said)) > 1:
        lines = [f"  rank {rank}: {each}" for rank, each in enumerate(said)]
        raise MismatchError(
            "\n".join(
                [
                    "broadcast_optimizer_state got different optimizers on the ranks:",
                    *lines,
                    "Build the same optimizer on every rank before its state is broadcast.",
                ]
            ),
            ranks=group.members,
        )


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Hole(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_without_tensors(each, tensors) for each in value)
    return value


def _holes(value: Any) -> list[_Hole]:
    if isinstance(value, _Hole):
        return [value]
    if isinstance(value, dict):
        return [hole for each in value.values() for hole in _holes(each)]
    if isinstance(value, (list, tuple)):
        return [hole for each in value for hole in _holes(each)]
    return []


def _with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Hole):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, tensors) for each in value)
    return value
