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
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from farandole.comm.codec import Memory
from farandole.comm.control.position import Position
from farandole.comm.engines.base import Work
from farandole.comm.fusion.absence import PlanLog
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import CollectiveError, UsageTypeError
from farandole.torch import agreement, backward, tuning
from farandole.torch.accumulation import Accumulation
from farandole.torch.agreement import Agreed, Terms
from farandole.torch.channel import Channel
from farandole.torch.sparse_gradients import SparseLook, is_sparse, topic_of
from farandole.torch.tuning import Tuner

_hooks: MutableMapping[Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()
"""The hooks of ours that each parameter has."""


class Gradients:
    """Reduces the gradients of ``parameters()``, now and as that set changes.

    ``names`` are for messages and must be alike on all ranks.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Tensor]],
        names: MutableMapping[Tensor, str],
        channel: Channel,
        terms: Terms,
    ) -> None:
        self.accumulation = Accumulation(terms.passes_per_step)
        self.terms = terms
        self._parameters = parameters
        self._names = names
        self._channel = channel
        self._agreed: Agreed | None = None
        # Not by id: that of a parameter which is gone may be given to a new one.
        self._hooks: MutableMapping[Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()
        self._accumulators: MutableMapping[Tensor, Node] = WeakIdKeyDictionary()
        """The node that adds to ``grad``; autograd itself forgets it, and our hook with it."""
        self._order: list[int] = []
        """``id`` of parameters as they became ready in a pass that only watched."""
        self._pass: backward.BackwardPass | None = None
        """The pass that is open."""
        self._task: int | None = None
        """The graph task of the hook before, while a pass is open."""
        self._entering = threading.Lock()
        self._reduces = False
        """Whether the pass that is open ends in a reduction."""
        self._begun: Agreed | None = None
        """The plan whose reducer takes gradients now."""
        self._look = SparseLook()
        self._tuner: Tuner | None = None

    @property
    def number(self) -> int:
        """See :class:`backward.Participant`."""
        return self._channel.order

    def _partners(self) -> Group | None:
        """The ranks to reduce with; ``None`` when nothing is to be reduced."""
        group = self._channel.group
        if group is None or group.size == 1 or self.terms.op is Op.ADASUM:
            return None
        return group

    def name_of(self, parameter: Tensor) -> str:
        """What messages call a parameter; one that was added later has its place for a name."""
        name = self._names.get(parameter)
        if name is None:
            places = [id(each) for each in self._parameters()]
            name = self._names[parameter] = f"added parameter {places.index(id(parameter))}"
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
            if parameter in self._hooks or not _can_have_gradient(parameter):
                continue
            hookable: Any = parameter
            frozen = not parameter.requires_grad
            if frozen:
                parameter.requires_grad_()  # torch takes no hook otherwise
            hooks = [hookable.register_post_accumulate_grad_hook(self._accumulated)]
            if self.terms.op is Op.SUM:
                # Not a hook of the parameter's: torch.autograd.grad() calls that, and adds nothing.
                accumulator = graph.get_gradient_edge(parameter).node
                hooks.append(accumulator.register_prehook(_BeforeSum(self, parameter)))
                self._accumulators[parameter] = accumulator
            if frozen:
                parameter.requires_grad_(False)
            for hook in _hooks.get(parameter, ()):
                hook.remove()
            _hooks[parameter] = self._hooks[parameter] = hooks

    def unhook(self) -> None:
        """The optimizer is gone."""
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()

    # The hot path: once a parameter and pass.

    def _accumulated(self, parameter: Tensor) -> None:
        task = backward.current_task()
        if task != self._task:
            self._enter(parameter, task)
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
        if is_sparse(gradient):
            self._look.note(parameter, gradient.sparse_dim())
            return gradient.to_dense()
        raise UsageTypeError(
            f"the gradient of {self.name_of(parameter)!r} is {gradient.layout}, which "
            f"{self.terms.label} does not reduce. Dense and sparse (COO) gradients are."
        )

    # A pass.

    def _enter(self, parameter: Tensor, task: int) -> None:
        with self._entering:
            if task == self._task:  # a thread for another device was quicker
                return
            # Out of the way of a pass that is closed first.
            gradient, parameter.grad = parameter.grad, None
            self._pass, new, inner = backward.enter(self, task)
            self._put_back(parameter, gradient)
            if new:
                self._open(self.accumulation.backward())
            if inner and self._agreed is not None:
                self._agreed.reducer.adds_late = True
            self._task = task

    def _put_back(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            with torch.no_grad():
                self.undo_sum(parameter)
                parameter.grad.add_(gradient)

    def _open(self, reduces: bool) -> None:
        self._order.clear()
        self._begun = None
        self._reduces = reduces
        if not reduces:
            return
        self.accumulation.reduced = False
        group, agreed = self._partners(), self._agreed
        if (
            group is not None
            and agreed is not None
            and agreed.fits(group, self.terms, self._members())
        ):
            self._begin(agreed)

    def _begin(self, agreed: Agreed) -> None:
        agreed.reducer.spare_kept(lambda place: agreed.parameters[place].grad)
        agreed.reducer.begin(agreed.log.step(self.accumulation.steps))
        self._compare_steps(agreed)
        self._begun = agreed

    def flush(self) -> None:
        """See :class:`backward.Participant`."""
        self._task = self._pass = None
        if not self._reduces:
            return
        group = self._partners()
        if group is None:
            return
        agreed = self._begun
        if agreed is None:
            agreed = self._agree(group)
            self._begin(agreed)
        parameters = agreed.parameters
        try:
            with torch.no_grad():
                agreed.reducer.flush(lambda place: self._left(parameters[place]))
                agreed.sparse.submit()
        except CollectiveError as error:
            raise group.explain(error) from None
        # The next thing to wait for may be another optimizer's.
        count = len(agreed.reducer.plan.buckets)
        if count:
            last = self._position(agreed, count - 1, agreed.log.after(count))
            group.control.note_begun(last)

    def _left(self, parameter: Tensor) -> Tensor | None:
        agreed = self._begun
        if self.terms.op is Op.SUM and agreed is not None:
            self._look.undo_sum(parameter, agreed.group.size)
        gradient = parameter.grad
        if gradient is None or (gradient.layout is torch.strided and not gradient.requires_grad):
            return gradient
        return self._plain(parameter, gradient)

    def finish(self, *, keep: bool) -> None:
        """See :class:`backward.Participant`."""
        if not self._reduces:
            return
        self._reduces = False
        agreed, self._begun = self._begun, None
        if agreed is not None:
            with torch.no_grad():
                agreed.reducer.finish(self._wait_for)
                agreed.sparse.collect(keep=keep)
            if keep:
                self._hand_out(agreed)
            self._compare_steps(agreed)
            self._tune(agreed, keep=keep)
        self.accumulation.reduced = keep

    def _tune(self, agreed: Agreed, *, keep: bool) -> None:
        tuner = self._tuner
        if tuner is None:
            return
        with torch.no_grad():
            self._agreed = tuner.after_pass(agreed)
        if keep and self._agreed is not agreed:
            self._hand_out(self._agreed)

    def _hand_out(self, agreed: Agreed) -> None:
        for parameter, entry in zip(agreed.parameters, agreed.reducer.entries, strict=True):
            parameter.grad = self._look.dress(parameter, entry.view) if entry.present else None

    def settle(self) -> None:
        """Outside of backward: close what an exception left open, reduce what is due."""
        self.discard()
        if self.accumulation.is_due():
            self._open(True)
            self.flush()
            self.finish(keep=True)

    def discard(self) -> None:
        """Outside of backward: close what an exception left open."""
        if self._pass is not None:
            self._pass.close()

    def undo_sum(self, parameter: Tensor) -> None:
        """A gradient is about to be added to a sum over the ranks: keep this rank's share of it."""
        agreed = self._agreed
        if agreed is None:
            return
        place = agreed.places.get(id(parameter))
        if place is None:
            agreed.sparse.undo_sum(parameter)
            return
        entry = agreed.reducer.entries[place]
        if parameter.grad is entry.view:
            agreed.reducer.divide(entry)
        self._look.undo_sum(parameter, agreed.group.size)

    def forget_errors(self) -> None:
        """What compression has not sent belongs to a past that is gone."""
        if self._agreed is not None:
            self._agreed.memory.forget_errors()

    def _memory_of(self, group: Group) -> Memory:
        """What codecs know before a new plan of ``group``: nothing, if its ranks are other ones."""
        previous = self._agreed
        if previous is None or previous.group is not group:
            return Memory()
        return previous.memory.successor()

    # Agreements.

    def _members(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters() if parameter.requires_grad]

    def agree_as_joined(self, topic: str) -> PlanLog | None:
        """Have part in the agreement on ``topic``, if it is one of this optimizer's.

        For a rank that has joined. When it was about a plan: that plan.
        """
        group = self._partners()
        if group is None:
            return None
        if topic == group.next_agreement(topic_of(self._channel.name)):
            return self._agree(group, joined=True).log
        if topic == group.next_agreement(agreement.steps_topic(self._channel.name)):
            agreement.agree_on_steps(group, self._channel.name, self.terms.label, None)
        return None

    def _agree(self, group: Group, *, joined: bool = False) -> Agreed:
        """A new plan, for what is there now; see :func:`agreement.agree`."""
        self.hook()
        previous = self._agreed
        if previous is not None:
            for parameter, entry in zip(previous.parameters, previous.reducer.entries, strict=True):
                if parameter.grad is entry.view:
                    previous.reducer.divide(entry)
            previous.sparse.undo_sums()
        self._channel.open()
        if self._tuner is None or self._tuner.group is not group:
            self._tuner = tuning.tuner_for(group, self._channel)
        self._agreed = agreement.agree(
            group,
            self._channel.name,
            self.terms,
            self._members(),
            self._order,
            self.name_of,
            self._look,
            self._memory_of(group),
            joined=joined,
        )
        return self._agreed

    def _compare_steps(self, agreed: Agreed) -> None:
        if agreed.reducer.steps_differ:
            agreement.raise_different_steps(agreed, self._channel.name, self.accumulation.steps)

    def _wait_for(self, work: Work, bucket: int) -> None:
        agreed = self._agreed
        assert agreed is not None
        agreed.group.wait(work, self._position(agreed, bucket, agreed.log.next()))

    def _position(self, agreed: Agreed, bucket: int, sequence: int) -> Position:
        plan = agreed.reducer.plan
        return Position(
            path=f"planned/{self._channel.name}",
            group=agreed.group.key,
            sequence=sequence,
            what=f"bucket {bucket} of step {self.accumulation.steps} of {self.terms.label}",
            detail=plan.names(bucket),
            plan=plan.digest,
            members=agreed.group.members,
        )


class _BeforeSum:
    """Called with a gradient before it is added to ``parameter.grad``."""

    def __init__(self, gradients: Gradients, parameter: Tensor) -> None:
        self._gradients = gradients
        self._parameter = parameter

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            with torch.no_grad():
                self._gradients.undo_sum(self._parameter)


def _can_have_gradient(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
