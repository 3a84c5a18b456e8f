"""What the ranks agree on before gradients travel: the plan, and in trouble the step."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from farandole.comm.codec import Block, Exchange, ExchangeCodec, Layout, Memory
from farandole.comm.engines.base import REDUCIBLE, Engine
from farandole.comm.fusion import absence
from farandole.comm.fusion import plan as plans
from farandole.comm.fusion.absence import PlanLog
from farandole.comm.fusion.reducer import Reducer
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.config import Settings
from farandole.core.errors import MismatchError, UsageError, describe_ranks
from farandole.torch import compression as compressions
from farandole.torch.compression import Compressing, Compression
from farandole.torch.sparse_gradients import SparseGradients, SparseLook, agree_on_sparse

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
    compression: Compressing = Compression.none
    families: MutableMapping[Tensor, int] = field(default_factory=WeakIdKeyDictionary)
    """The number of the parameters' group that shares a bucket with each parameter."""

    def said(self) -> dict[str, str]:
        """What the ranks compare, by the names of the arguments."""
        return {
            "optimizer": self.label,
            "op": self.op.label,
            "backward_passes_per_step": str(self.passes_per_step),
            "gradient_predivide_factor": str(self.predivide),
            "compression": compressions.name_of(self.compression),
            "sparse_as_dense": str(self.sparse_as_dense),
        }


@dataclass(frozen=True)
class Agreed:
    """A plan, and for whom it holds."""

    group: Group
    terms: Terms
    key: Key
    parameters: tuple[Tensor, ...]
    """Those of the plan, in its order."""
    reducer: Reducer
    log: PlanLog
    places: dict[int, int]
    """``id(parameter)`` → its place in the plan."""
    sparse: SparseGradients
    """Those that are not in the plan."""
    proposal: plans.Proposal
    """What the plan follows from."""
    builder_for: Callable[[plans.Plan, Memory, Compressing], Callable[[], Reducer]]
    """From a plan of the same parameters to a way to build its reducer."""
    memory: Memory
    """What the codecs of this plan know."""

    def fits(self, group: Group, terms: Terms, members: Sequence[Tensor]) -> bool:
        """Whether it still holds."""
        return self.group is group and self.terms is terms and self.key == key_of(members)

    def retuned(
        self, bucket_bytes: int, first_bucket_bytes: int, compression: Compressing
    ) -> Agreed:
        """The same with other buckets; the results of the pass before are moved over.

        On all ranks alike after the same pass, in which all of them had part.
        """
        specs = [
            dataclasses.replace(each, codec=_said_of_codec(compression, each.name, each.dtype))
            for each in self.proposal.parameters
        ]
        proposal = dataclasses.replace(
            self.proposal,
            parameters=tuple(specs),
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
        )
        plan, memory = proposal.plan(), self.memory.for_other_buckets()
        reducer = self.builder_for(plan, memory, compression)()
        reducer.adopt(self.reducer)
        absent = self.builder_for(plan, memory.of_absent(), compression)
        self.group.plans.register(self.log.path, absent)
        return dataclasses.replace(self, reducer=reducer, proposal=proposal, memory=memory)


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
    ready: Sequence[int],
    name_of: Callable[[Tensor], str],
    look: SparseLook,
    memory: Memory,
    *,
    joined: bool,
) -> Agreed:
    """Agree on a plan with the other ranks; blocks until all have come to this point.

    ``ready`` has the ``id`` of parameters as their gradients became ready on this rank; the order
    of the lowest rank counts that has not ``joined``. ``look`` is told whose gradients are sparse
    but travel dense, ``memory`` is what codecs know from the plan before. ``MismatchError``, alike
    on every rank, names what differs.
    """
    key = key_of(members)
    dims = agree_on_sparse(group, channel, terms.label, members)
    if terms.sparse_as_dense:
        for place, count in dims.items():
            look.note(members[place], count)
        dims = {}
    rows = [members[place] for place in dims]
    members = [each for place, each in enumerate(members) if place not in dims]
    devices = _label_devices(members)
    specs = [_spec(each, name_of(each), devices, terms) for each in members]
    mine = plans.Proposal(
        tuple(specs),
        () if joined else _expected_order(members, ready),
        group.settings.bucket_bytes,
        group.settings.first_bucket_bytes,
        {**terms.said(), **_said_of(rows, name_of), **_said_of_tuning(group.settings)},
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
    path = f"planned/{channel}"
    earlier = group.plans.find(path)
    if earlier is not None and not joined and any(each.is_absent for each in proposals):
        absence.release(group.control, earlier)
    proposal = plans.deciding(proposals)
    builder_for = functools.partial(
        _builder, engines=engines, members=members, terms=terms, group=group
    )
    plan, compression = proposal.plan(), terms.compression
    return Agreed(
        group,
        terms,
        key,
        tuple(members),
        builder_for(plan, memory, compression)(),
        group.plans.register(path, builder_for(plan, memory.of_absent(), compression)),
        {id(parameter): place for place, parameter in enumerate(members)},
        SparseGradients(group, f"{terms.label}.{channel}", terms.op, rows, list(dims.values())),
        proposal,
        builder_for,
        memory,
    )


def _expected_order(members: Sequence[Tensor], ready: Sequence[int]) -> tuple[int, ...]:
    """As gradients became ready in this pass; the others in reverse, as DDP does."""
    places = {id(parameter): place for place, parameter in enumerate(members)}
    seen = dict.fromkeys(places[each] for each in ready if each in places)
    seen.update(dict.fromkeys(reversed(range(len(members)))))
    return tuple(seen)


def _said_of(rows: Sequence[Tensor], name_of: Callable[[Tensor], str]) -> dict[str, str]:
    """What the ranks compare of parameters that are in no bucket."""
    return {
        f"sparse parameter {name_of(each)!r} is": f"{each.dtype} {tuple(each.shape)}"
        for each in rows
    }


def _said_of_tuning(settings: Settings) -> dict[str, str]:
    if not settings.autotune:
        return {}
    steps, warm_up = settings.autotune_steps_per_sample, settings.autotune_warmup_samples
    said = f"{steps} steps a sample after {warm_up} samples"
    if settings.autotune_compression != "none":
        said += f", compression {settings.autotune_compression} allowed"
    return {"autotune": said}


def _spec(
    parameter: Tensor, name: str, devices: dict[torch.device, str], terms: Terms
) -> plans.ParameterSpec:
    if not (parameter.is_floating_point() or parameter.is_complex()):
        raise UsageError(f"parameter {name!r} is {parameter.dtype}: it cannot have a gradient.")
    shape = tuple(parameter.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return plans.ParameterSpec(
        name=name,
        shape=shape,
        stride=plans.dense_stride(shape, parameter.stride()),
        dtype=dtype,
        itemsize=parameter.element_size(),
        device=devices[parameter.device],
        family=terms.families.get(parameter),
        codec=_said_of_codec(terms.compression, name, dtype),
    )


def _codec(compression: Compressing, name: str, dtype: str) -> ExchangeCodec | None:
    """What encodes a parameter's gradients; nothing does those that no engine adds up."""
    kind: torch.dtype = getattr(torch, dtype)
    if not kind.is_floating_point or kind not in REDUCIBLE:
        return None
    return compressions.codec_for(compression, name)


def _said_of_codec(compression: Compressing, name: str, dtype: str) -> str:
    codec = _codec(compression, name, dtype)
    return "" if codec is None else str(codec)


def _exchange(
    plan: plans.Plan, bucket: plans.BucketPlan, compression: Compressing, memory: Memory
) -> Exchange | None:
    specs = [plan.parameters[slot.index] for slot in bucket.slots]
    codec = _codec(compression, specs[0].name, bucket.dtype)
    if codec is None:
        return None
    blocks = [
        Block(spec.name, slot.offset, plans.shape_in_memory(spec))
        for spec, slot in zip(specs, bucket.slots, strict=True)
    ]
    return codec.exchange(Layout(tuple(blocks), bucket.length), memory)


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


def _builder(
    plan: plans.Plan,
    memory: Memory,
    compression: Compressing,
    engines: dict[str, tuple[torch.device, Engine]],
    members: Sequence[Tensor],
    terms: Terms,
    group: Group,
) -> Callable[[], Reducer]:
    size = group.size
    averages = terms.op is Op.AVERAGE
    if averages and terms.predivide == 1.0:
        scale, post_scale = 1.0 / size, 1.0  # one multiplication an element, none afterwards
    elif averages:
        scale, post_scale = 1.0 / terms.predivide, terms.predivide / size
    else:
        scale, post_scale = 1.0, 1.0

    def build() -> Reducer:
        return Reducer(
            plan,
            engines,
            {str(each.dtype).removeprefix("torch."): each.dtype for each in members},
            scale=scale,
            reduced_scale=scale if averages else scale / size,
            post_scale=post_scale,
            exchanges=[_exchange(plan, each, compression, memory) for each in plan.buckets],
            average_over=size if averages and group.settings.join_average == "participants" else 0,
        )

    return build


def steps_topic(channel: str) -> str:
    """What the agreement on the ranks' steps is about."""
    return f"steps/{channel}"


def agree_on_steps(group: Group, channel: str, label: str, step: int | None) -> dict[int, int]:
    """The step that each rank is in, but for those that have joined and said ``None``."""
    answers = group.agree(
        steps_topic(channel), json.dumps(step).encode(), f"agreement on the step of {label}"
    )
    said = zip(group.members, map(json.loads, answers), strict=True)
    return {rank: int(theirs) for rank, theirs in said if theirs is not None}


def raise_different_steps(agreed: Agreed, channel: str, step: int) -> None:
    """All ranks have seen alike that their steps differ: each says its own, and all raise it."""
    group, label = agreed.group, agreed.terms.label
    steps = agree_on_steps(group, channel, label, step)
    said = []
    for each in sorted(set(steps.values())):
        ranks = [rank for rank, theirs in steps.items() if theirs == each]
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
