"""``join()``: a rank without data takes part in the others' work, and in the end knows as much.

While it waits it sends zeros (``comm.fusion.absence``, ``comm.order.zeros``), so the others go on.
It takes no steps of its own meanwhile: what a step is, with its clipping, scaling, schedulers and
closures, only the script knows. So when all have joined, the ranks that have taken fewer steps
with an optimizer than another get that one's parameters and state, which is exact whatever a step
is. Nothing is sent for an optimizer with which all ranks have taken as many.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from farandole.comm import group as groups
from farandole.comm.fusion.absence import PlanLog
from farandole.comm.group import Group
from farandole.core.errors import MismatchError, describe_ranks
from farandole.torch import state
from farandole.torch.optimizer import Distributed, optimizers_of
from farandole.torch.options import parameters_of

Key = tuple[int, str]
"""An optimizer by its process set's number and its channel: alike on all ranks."""

_log = logging.getLogger(__name__)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank has said so.

    Until then the other ranks' allreduces, and the reductions of ``DistributedOptimizer``, get
    zeros from this rank: zeros for every ``op``, and an average still divides by all ranks
    (``FARANDOLE_JOIN_AVERAGE=participants`` divides by those that took part). A rank may join
    before its first step. Any other collective of the others raises ``MismatchError``. ``device``
    is the index of the GPU where the zeros for CUDA tensors are made; -1 is the current one.

    Afterwards every rank has the parameters and the optimizer state of the rank that has taken the
    most steps, for each ``DistributedOptimizer``. What an optimizer does not know is left to the
    script: buffers of the model, such as the statistics of batch normalization, and the state of
    learning-rate schedulers and gradient scalers that are stepped once a batch.

    Returns the rank that joined last, on every rank: it has seen the most data.

    Raises ``MismatchError`` on every rank when the ranks' optimizers differ, and as collectives do.

    Example::

        for batch in batches_of_this_rank:      # more on some ranks than on others
            train_step(batch)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)      # for its buffers
    """
    ref = groups.root()
    root = ref.current
    optimizers = optimizers_of(ref)
    refusals: list[MismatchError] = []

    def answer(topic: str) -> PlanLog | None:
        for each in optimizers:
            try:
                log = each._farandole.gradients.agree_as_joined(topic)
            except MismatchError as error:  # of all ranks alike: whoever has not joined may go on
                refusals.append(error)
                return None
            if log is not None:
                return log
        return None

    where = torch.device("cuda", device) if device >= 0 and torch.cuda.is_available() else None
    last = root.join(where, answer)
    if root.size > 1:
        _catch_up(root, last, optimizers)
    if refusals:
        raise refusals[0]
    return last


@dataclass(frozen=True)
class _Standing:
    """How far a rank is with one optimizer."""

    label: str
    layout: str
    """Short fingerprint of the parameters' shapes and dtypes."""
    steps: int
    """Applied since the ranks last joined."""
    trained: str
    """For each parameter: 1 if it requires a gradient, else 0."""

    @classmethod
    def of(cls, optimizer: Distributed) -> _Standing:
        held = optimizer._farandole
        parameters = parameters_of(optimizer)
        layout = json.dumps([[tuple(each.shape), str(each.dtype)] for each in parameters])
        return cls(
            label=held.label,
            layout=hashlib.sha256(layout.encode()).hexdigest()[:12],
            steps=held.gradients.accumulation.steps - held.steps_before,
            trained="".join("01"[each.requires_grad] for each in parameters),
        )


def _catch_up(root: Group, last: int, optimizers: Sequence[Distributed]) -> None:
    """Give the parameters and states of those who have taken the most steps to the others."""
    mine: dict[Key, Distributed] = {}
    for each in optimizers:
        channel = each._farandole.channel
        mine[channel.set_number, channel.name] = each
    said = json.dumps([[*key, asdict(_Standing.of(each))] for key, each in mine.items()])
    answers = root.agree("joined", said.encode(), "agreement on what the ranks missed")
    standings = [
        {(number, name): _Standing(**standing) for number, name, standing in json.loads(answer)}
        for answer in answers
    ]
    sets, in_sets = root.sets(), False
    for key in sorted({key for each in standings for key in each}):
        there = {rank: standings[rank][key] for rank in sets[key[0]] if key in standings[rank]}
        if len({each.steps for each in there.values()}) == 1:
            continue
        in_sets = in_sets or key[0] != 0
        if key in mine:
            _give(root, last, there, mine[key])
    if in_sets:  # no rank may leave while a set that it is not in needs rank 0's control channel
        root.agree("caught up", b"", "the end of join")
    for each in optimizers:
        each._farandole.steps_before = each._farandole.gradients.accumulation.steps


def _give(root: Group, last: int, there: Mapping[int, _Standing], optimizer: Distributed) -> None:
    held = optimizer._farandole
    group = held.channel.group
    assert group is not None
    lacking = sorted(set(group.members) - set(there))
    if lacking:
        _log.warning(
            "%s is not there any more on %s, so join() leaves its parameters as they are: they "
            "differ between the ranks, which have not taken the same steps.",
            held.label,
            describe_ranks(lacking),
        )
        return
    _compare(group, held.label, there)
    most = max(each.steps for each in there.values())
    ahead = [rank for rank, each in there.items() if each.steps == most]
    source = last if last in ahead else ahead[0]
    name = f"joined.{held.label}.{held.channel.name}"
    trained = there[source].trained
    with torch.no_grad():
        tensors = [
            parameter.detach()
            for parameter, counts in zip(parameters_of(optimizer), trained, strict=True)
            if counts == "1"
        ]
        state.give_tensors(group, tensors, source, f"{name}.parameters")
        given = state.give_state(group, optimizer, source, f"{name}.state")
    if given is not None:
        optimizer._adopt(given)


def _compare(group: Group, label: str, there: Mapping[int, _Standing]) -> None:
    ranks_by_kind: dict[str, list[int]] = {}
    for rank, each in there.items():
        kind = f"{each.label} with {len(each.trained)} parameters (layout {each.layout})"
        ranks_by_kind.setdefault(kind, []).append(rank)
    if len(ranks_by_kind) > 1:
        lines = [f"  {describe_ranks(ranks)}: {kind}" for kind, ranks in ranks_by_kind.items()]
        raise MismatchError(
            "\n".join(
                [
                    f"join() cannot give the parameters of {label} to all ranks, for they differ:",
                    *lines,
                    "Build the model and the optimizer alike on every rank.",
                ]
            ),
            ranks=group.members,
        )
