"""The hooks of one optimizer: from a parameter's gradient to the reducer, and back.

The first reducing pass only watches: at its end the ranks agree on a plan, made from the order in
which gradients became ready there, and reduce everything at once. From the next pass on a gradient
goes into its bucket in its hook, and buckets leave under the backward pass. A changed set of
parameters begins this anew.

In a hook the parameter loses its ``grad`` to the bucket, so that a second gradient in the same
pass (backward inside backward) is told apart from the first; it gets the result, a view of the
bucket, when the pass ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from farandole.comm.control.position import Position
from farandole.comm.engines.base import Work
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import CollectiveError, UsageTypeError
from farandole.torch import agreement, backward
from farandole.torch.accumulation import Accumulation
from farandole.torch.agreement import Agreed, Terms
from farandole.torch.channel import Channel

_PASS = backward.BackwardPass()

_hooks: MutableMapping[Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()
"""The hooks of ours that each parameter has."""


class Gradients:
    """Reduces the gradients of ``parameters()``, now and as that set changes.

    ``names`` (``id(parameter)`` → name) are for messages and must be alike on all ranks.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        names: dict[int, str],
        channel: Channel,
        terms: Terms,
    ) -> None:
        self.accumulation = Accumulation(terms.passes_per_step)
        self.terms = terms
        self._parameters = parameters
        self._names = names
        self._channel = channel
        self._agreed: Agreed | None = None
        self._hooks: dict[int, list[RemovableHandle]] = {}
        self._order: list[int] = []
        """``id`` of parameters as they became ready in a pass that only watched."""
        self._task: int | None = None
        """The graph task of the hook before, while a pass is open."""
        self._reduces = False
        """Whether the pass that is open ends in a reduction."""
        self._begun: Agreed | None = None
        """The plan whose reducer takes gradients now."""
        self._sequence = 0

    @property
    def number(self) -> int:
        """See :class:`backward.Participant`."""
        return self._channel.number

    def name_of(self, parameter: Tensor) -> str:
        """What messages call a parameter; one that was added later has its place for a name."""
        name = self._names.get(id(parameter))
        if name is None:
            places = [id(each) for each in self._parameters()]
            name = self._names[id(parameter)] = f"added parameter {places.index(id(parameter))}"
        return name

    def change_passes(self, passes: int) -> None:
        """Another number of backward passes a step: a new group, and a new agreement."""
        self.discard()
        self.terms = dataclasses.replace(self.terms, passes_per_step=passes)
        self.accumulation.passes_per_step = passes
        self.accumulation.reset()

    def hook(self) -> None:
        """Hook every parameter that is not hooked yet, frozen ones too.

        A parameter has the hook of one optimizer, the last that was made for it. An older one that
        is still in use finds its gradients reduced already, and reduces them again in ``step()``.
        """
        for parameter in self._parameters():
            if id(parameter) in self._hooks or not _can_have_gradient(parameter):
                continue
            hookable: Any = parameter
            frozen = not parameter.requires_grad
            if frozen:
                parameter.requires_grad_()  # torch takes no hook otherwise
            hooks = [hookable.register_post_accumulate_grad_hook(self._accumulated)]
            if self.terms.op is Op.SUM:
                hooks.append(hookable.register_hook(_BeforeSum(self, parameter)))
            if frozen:
                parameter.requires_grad_(False)
            for hook in _hooks.get(parameter, ()):
                hook.remove()
            _hooks[parameter] = self._hooks[id(parameter)] = hooks

    def unhook(self) -> None:
        """The optimizer is gone."""
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()

    # The hot path: once a parameter and pass.

    def _accumulated(self, parameter: Tensor) -> None:
        task = backward.current_task()
        if task != self._task:
            self._enter(task)
        agreed = self._begun
        if agreed is None:
            if self._reduces:
                self._order.append(id(parameter))
            return
        gradient = parameter.grad
        place = agreed.places.get(id(parameter))
        if place is None or gradient is None:
            return  # it was taken out of the optimizer, or frozen after the forward pass
        parameter.grad = None
        try:
            if torch.is_grad_enabled() or gradient.layout is not torch.strided:
                with torch.no_grad():
                    agreed.reducer.put(place, self._plain(parameter, gradient))
            else:
                agreed.reducer.put(place, gradient)
        except CollectiveError as error:
            raise agreed.group.explain(error) from None

    def _plain(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Without a graph, and dense."""
        gradient = gradient.detach()
        if gradient.layout is torch.strided:
            return gradient
        if self.terms.sparse_as_dense:
            return gradient.to_dense()
        raise UsageTypeError(
            f"the gradient of {self.name_of(parameter)!r} is sparse ({gradient.layout}), which "
            f"{self.terms.label} does not reduce as it is. Give sparse_as_dense=True to "
            "DistributedOptimizer, or build the layer with sparse=False."
        )

    # A pass.

    def _enter(self, task: int) -> None:
        new, inner = _PASS.enter(self, task)
        if new:
            self._open(self.accumulation.backward())
        self._task = task
        if inner and self._agreed is not None:
            self._agreed.reducer.adds_late = True

    def _open(self, reduces: bool) -> None:
        self._order.clear()
        self._begun = None
        group = self._channel.ref.current
        self._reduces = reduces
        if not reduces:
            return
        self.accumulation.reduced = False
        agreed = self._agreed
        if agreed is not None and agreed.fits(group, self.terms, self._members()):
            self._begin(agreed)

    def _begin(self, agreed: Agreed) -> None:
        agreed.reducer.begin(self.accumulation.steps)
        self._compare_steps(agreed)
        self._begun = agreed

    def flush(self) -> None:
        """See :class:`backward.Participant`."""
        self._task = None
        if not self._reduces:
            return
        group = self._channel.ref.current
        if group.size == 1:
            return
        agreed = self._begun
        if agreed is None:
            agreed = self._agree(group)
            self._begin(agreed)
        parameters = agreed.parameters
        try:
            with torch.no_grad():
                agreed.reducer.flush(lambda place: self._left(parameters[place]))
        except CollectiveError as error:
            raise group.explain(error) from None

    def _left(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or (gradient.layout is torch.strided and not gradient.requires_grad):
            return gradient
        return self._plain(parameter, gradient)

    def finish(self) -> None:
        """See :class:`backward.Participant`."""
        if not self._reduces:
            return
        self._reduces = False
        agreed, self._begun = self._begun, None
        if agreed is not None:
            with torch.no_grad():
                self._collect(agreed)
        self.accumulation.reduced = True

    def _collect(self, agreed: Agreed) -> None:
        reducer = agreed.reducer
        reducer.finish(self._wait_for)
        for parameter, entry in zip(agreed.parameters, reducer.entries, strict=True):
            parameter.grad = entry.view if entry.present else None
        self._compare_steps(agreed)

    def settle(self) -> None:
        """Outside of backward: close what an exception left open, reduce what is due."""
        if self._task is not None:
            _PASS.close()
        if self.accumulation.is_due():
            self._open(True)
            self.flush()
            self.finish()

    def discard(self) -> None:
        """Outside of backward: close what an exception left open."""
        if self._task is not None:
            _PASS.close()

    def undo_sum(self, parameter: Tensor) -> None:
        """A gradient is about to be added to a sum over the ranks: keep this rank's share of it."""
        agreed = self._agreed
        place = None if agreed is None else agreed.places.get(id(parameter))
        if agreed is not None and place is not None:
            entry = agreed.reducer.entries[place]
            if parameter.grad is entry.view:
                agreed.reducer.divide(entry)

    # Agreements.

    def _members(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters() if parameter.requires_grad]

    def _agree(self, group: Group) -> Agreed:
        """A new plan, for what is there now; see :func:`agreement.agree`."""
        self.hook()
        previous = self._agreed
        if previous is not None:
            for parameter, entry in zip(previous.parameters, previous.reducer.entries, strict=True):
                if parameter.grad is entry.view:
                    previous.reducer.divide(entry)
        self._channel.open()
        members = self._members()
        order = self._expected_order(members)
        self._agreed = agreement.agree(
            group, self._channel.name, self.terms, members, order, self.name_of
        )
        return self._agreed

    def _expected_order(self, members: list[Tensor]) -> tuple[int, ...]:
        """As gradients became ready in this pass; the others in reverse, as DDP does."""
        places = {id(parameter): place for place, parameter in enumerate(members)}
        seen = dict.fromkeys(places[each] for each in self._order if each in places)
        seen.update(dict.fromkeys(reversed(range(len(members)))))
        return tuple(seen)

    def _compare_steps(self, agreed: Agreed) -> None:
        if agreed.reducer.steps_differ:
            agreement.raise_different_steps(agreed, self._channel.name, self.accumulation.steps)

    def _wait_for(self, work: Work, bucket: int) -> None:
        self._sequence += 1
        agreed = self._agreed
        assert agreed is not None
        plan = agreed.reducer.plan
        label = self.terms.label
        position = Position(
            path=f"planned/{self._channel.name}",
            group=agreed.group.key,
            sequence=self._sequence,
            what=f"bucket {bucket} of step {self.accumulation.steps} of {label}",
            detail=plan.names(bucket),
            plan=plan.digest,
            members=agreed.group.members,
        )
        agreed.group.wait(work, position)


class _BeforeSum:
    """Called with a gradient before it is added to ``parameter.grad``."""

    def __init__(self, gradients: Gradients, parameter: Tensor) -> None:
        self._gradients = gradients
        self._parameter = parameter

    def __call__(self, _: Tensor) -> None:
        with torch.no_grad():
            self._gradients.undo_sum(self._parameter)


def _can_have_gradient(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
