"""The arguments of ``DistributedOptimizer``, checked and in a form that pickles."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from farandole.comm.collectives.adasum import require_pairs
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import UsageError
from farandole.torch import compression as compressions
from farandole.torch.compression import Compressing
from farandole.torch.process_sets import ProcessSet


@dataclass(frozen=True)
class Options:
    """The arguments; names and families in the order of the parameters, so that they pickle."""

    op: Op
    passes_per_step: int
    predivide: float
    sparse_as_dense: bool
    compression: Compressing
    process_set: ProcessSet
    names: tuple[str, ...] | None
    families: tuple[int | None, ...]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter, group after group."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def default_names(optimizer: Optimizer) -> Iterator[str]:
    """Names by place, for parameters that were given none."""
    for number, group in enumerate(optimizer.param_groups):
        for place in range(len(group["params"])):
            yield f"parameter {place} of group {number}"


def check_op(op: Op, group: Group | None) -> Op:
    """``op``, if gradients can be reduced with it among the ranks of ``group``."""
    if op not in (Op.AVERAGE, Op.SUM, Op.ADASUM):
        raise UsageError(
            f"DistributedOptimizer reduces with op=Average, op=Sum or op=Adasum, not {op!r}."
        )
    if op == Op.ADASUM and group is not None:
        require_pairs(group.size)
    return Op(op)


def check_passes(passes: int) -> int:
    """``backward_passes_per_step``, if it is a number of passes."""
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step must be > 0; it is {passes!r}.")
    return passes


def check_predivide(factor: float, op: Op) -> float:
    """``gradient_predivide_factor``, if it can be one."""
    if factor != 1.0 and op != Op.AVERAGE:
        raise UsageError("gradient_predivide_factor works with op=Average only.")
    if not factor > 0:
        raise UsageError(f"gradient_predivide_factor must be > 0; it is {factor!r}.")
    return float(factor)


def check_compression(compression: Compressing, op: Op) -> Compressing:
    """``compression``, if it is one, and one that ``op`` can be used with."""
    compressions.check(compression)
    if op == Op.ADASUM and not compressions.is_simple(compression):
        raise UsageError(
            f"op=Adasum does not sum, so Compression.{compressions.name_of(compression)} is "
            "nothing for it. Use Compression.none, fp16 or bf16, or another op."
        )
    return compression


def check_names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> tuple[str, ...] | None:
    """The parameters' names in their order; ``None`` when none were given."""
    if named_parameters is None:
        return None
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(twice)}"
        )
    by_id = {id(parameter): name for name, parameter in pairs}
    unnamed = [
        f"{default} {tuple(each.shape)}"
        for default, each in zip(default_names(optimizer), parameters_of(optimizer), strict=True)
        if id(each) not in by_id
    ]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(unnamed)}. Name every parameter of the optimizer, or none."
        )
    return tuple(by_id[id(each)] for each in parameters_of(optimizer))


def check_groups(
    groups: int | Sequence[Sequence[Tensor]] | None, num_groups: int
) -> int | Sequence[Sequence[Tensor]]:
    """``groups``, which ``num_groups`` is the old name of."""
    if num_groups:
        warnings.warn("num_groups is the old name of groups.", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    usable = (isinstance(groups, int) and groups >= 0) or (
        isinstance(groups, (list, tuple))
        and all(
            isinstance(group, (list, tuple)) and all(isinstance(each, Tensor) for each in group)
            for group in groups
        )
    )
    if not usable:
        raise UsageError("groups should be a non-negative integer or a list of list of tensors.")
    return groups


def families(
    optimizer: Optimizer, groups: int | Sequence[Sequence[Tensor]]
) -> tuple[int | None, ...]:
    """The number of the group that each parameter belongs to, in their order."""
    parameters = parameters_of(optimizer)
    if isinstance(groups, int):
        count = min(groups, len(parameters))
        return tuple(
            place * count // len(parameters) if count else None for place in range(len(parameters))
        )
    family_of: dict[int, int] = {}
    for family, members in enumerate(groups):
        for each in members:
            if id(each) in family_of:
                raise UsageError("A parameter is in more than one of the groups.")
            family_of[id(each)] = family
    if not family_of.keys() <= {id(each) for each in parameters}:
        raise UsageError("groups holds a tensor that is not a parameter of the optimizer.")
    return tuple(family_of.get(id(each)) for each in parameters)
