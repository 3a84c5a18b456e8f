"""What the ranks agree on before gradients travel: the plan, and in trouble the step."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from farandole.comm.engines.base import Engine
from farandole.comm.fusion import plan as plans
from farandole.comm.fusion.reducer import Reducer
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import MismatchError, UsageError, describe_ranks

Key = tuple[list[int], torch.device | None, torch.dtype | None]
"""What a plan was made for: each parameter's ``id`` in order, and where and what they are."""

SHOWN_NAMES = 4


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a ``DistributedOptimizer`` was told; the same on all ranks."""

    label: str
    """What messages call it: ``SGD``, or ``SGD (optimizer 1)`` for a second one."""
    op: Op
    passes_per_step: int
    predivide: float
    sparse_as_dense: bool
    families: MutableMapping[Tensor, int] = field(default_factory=WeakIdKeyDictionary)
    """The number of the parameters' group that shares a bucket with each parameter."""

    def said(self) -> dict[str, str]:
        """What the ranks compare, by the names of the arguments."""
        return {
            "optimizer": self.label,
            "op": self.op.label,
            "backward_passes_per_step": str(self.passes_per_step),
            "gradient_predivide_factor": str(self.predivide),
        }


@dataclass(frozen=True)
class Agreed:
    """A plan, and for whom it holds."""

    group: Group
    terms: Terms
    key: Key
    parameters: tuple[Tensor, ...]
    reducer: Reducer
    places: dict[int, int]
    """``id(parameter)`` → its place in the plan."""

    def fits(self, group: Group, terms: Terms, members: Sequence[Tensor]) -> bool:
        """Whether it still holds."""
        return self.group is group and self.terms is terms and self.key == key_of(members)


def key_of(members: Sequence[Tensor]) -> Key:
    """See :data:`Key`; a model moves as a whole, so one of the parameters tells where it is."""
    first = members[0] if members else None
    where, what = (None, None) if first is None else (first.device, first.dtype)
    return [id(each) for each in members], where, what


def agree(
    group: Group,
    channel: str,
    terms: Terms,
    members: Sequence[Tensor],
    order: Sequence[int],
    name_of: Callable[[Tensor], str],
) -> Agreed:
    """Agree on a plan with the other ranks; blocks until all have come to this point.

    ``order`` is that in which the gradients became ready on this rank, as places in ``members``;
    rank 0's counts. ``MismatchError``, alike on every rank, names what differs.
    """
    devices = _label_devices(members)
    specs = [_spec(each, name_of(each), devices, terms) for each in members]
    mine = plans.Proposal(
        tuple(specs),
        tuple(order),
        group.settings.bucket_bytes,
        group.settings.first_bucket_bytes,
        terms.said(),
    )
    answers = group.agree(
        f"plan/{channel}", mine.to_bytes(), f"agreement on the parameters of {terms.label}"
    )
    proposals = [plans.Proposal.from_bytes(answer) for answer in answers]
    lines = plans.differences(proposals)
    if lines:
        raise MismatchError(_describe(terms.label, lines), ranks=group.members)
    # A group has one engine a path and type of device; further devices get paths of their own.
    engines = {
        label: (device, group.engine(f"planned/{channel}{_suffix(label)}", device))
        for device, label in devices.items()
    }
    return Agreed(
        group,
        terms,
        key_of(members),
        tuple(members),
        _reducer(proposals[0].plan(), engines, members, terms, group.size),
        {id(parameter): place for place, parameter in enumerate(members)},
    )


def _spec(
    parameter: Tensor, name: str, devices: dict[torch.device, str], terms: Terms
) -> plans.ParameterSpec:
    if not (parameter.is_floating_point() or parameter.is_complex()):
        raise UsageError(f"parameter {name!r} is {parameter.dtype}: it cannot have a gradient.")
    shape = tuple(parameter.shape)
    return plans.ParameterSpec(
        name=name,
        shape=shape,
        stride=plans.dense_stride(shape, parameter.stride()),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.element_size(),
        device=devices[parameter.device],
        family=terms.families.get(parameter),
    )


def _label_devices(members: Sequence[Tensor]) -> dict[torch.device, str]:
    """Names that mean the same on every rank, whatever the index of its GPU."""
    labels: dict[torch.device, str] = {}
    counts: dict[str, int] = {}
    for device in dict.fromkeys(each.device for each in members):
        number = counts.setdefault(device.type, 0)
        counts[device.type] += 1
        labels[device] = f"{device.type}#{number}"
    return labels


def _suffix(label: str) -> str:
    number = label.rpartition("#")[2]
    return "" if number == "0" else f".{number}"


def _reducer(
    plan: plans.Plan,
    engines: dict[str, tuple[torch.device, Engine]],
    members: Sequence[Tensor],
    terms: Terms,
    size: int,
) -> Reducer:
    averages = terms.op is Op.AVERAGE
    if averages and terms.predivide == 1.0:
        scale, post_scale = 1.0 / size, 1.0  # one multiplication an element, none afterwards
    elif averages:
        scale, post_scale = 1.0 / terms.predivide, terms.predivide / size
    else:
        scale, post_scale = 1.0, 1.0
    return Reducer(
        plan,
        engines,
        {str(each.dtype).removeprefix("torch."): each.dtype for each in members},
        scale=scale,
        reduced_scale=scale if averages else scale / size,
        post_scale=post_scale,
    )


def raise_different_steps(agreed: Agreed, channel: str, step: int) -> None:
    """All ranks have seen alike that their steps differ: each says its own, and all raise it."""
    group, label = agreed.group, agreed.terms.label
    what = f"agreement on the step of {label}"
    answers = group.agree(f"steps/{channel}", json.dumps(step).encode(), what)
    steps = [int(json.loads(answer)) for answer in answers]
    said = []
    for each in sorted(set(steps)):
        ranks = [group.members[rank] for rank, theirs in enumerate(steps) if theirs == each]
        said.append(f"{describe_ranks(ranks)} in step {each}")
    names = agreed.reducer.plan.names(0)
    shown = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += f", … {len(names) - SHOWN_NAMES} more"
    raise MismatchError(
        f"The ranks are in different steps of {label}: {'; '.join(said)}. A rank left out "
        f"optimizer.step() or called it once more than the others, so gradients ({shown}) of "
        "different steps met. Call it on all ranks alike: decide together whether to skip a "
        "step, for example by an allreduce of the reason.",
        ranks=group.members,
    )


def _describe(label: str, lines: Sequence[str]) -> str:
    shown = list(lines[: plans.SHOWN_DIFFERENCES])
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more differences")
    return "\n".join(
        [
            f"The ranks do not train the same parameters with {label}:",
            *(f"  {line}" for line in shown),
            "Build the model and the optimizer alike on every rank; add, freeze and unfreeze "
            "parameters on all of them before the same step.",
        ]
    )
