"""``DistributedOptimizer``: an optimizer of torch whose gradients are those of all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from farandole.comm.codec import Codec
from farandole.comm.group import GroupRef
from farandole.comm.ops import Op
from farandole.core import events
from farandole.core.errors import UnsupportedError, UsageError, UsageTypeError
from farandole.torch import channel as channels
from farandole.torch import options
from farandole.torch.agreement import Terms
from farandole.torch.compression import Compressing, Compression
from farandole.torch.deltas import Deltas
from farandole.torch.gradients import Gradients
from farandole.torch.process_sets import ProcessSet, global_process_set

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
ValueT = TypeVar("ValueT")

SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). Nothing is sent twice here, but with Horovod the gradients would "
    "be. Say: with optimizer.skip_synchronize(): optimizer.step()"
)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> OptimizerT:
    """Dress ``optimizer`` so that every rank steps with the gradients of all ranks.

    The result is a new optimizer of a subclass of the given one's class. It shares ``state`` and
    ``param_groups`` with the given one, which should not be stepped any more; its ``state_dict()``
    has the given one's format.

    Gradients travel while the backward pass still runs, and **when ``backward()`` returns, every
    ``grad`` is that of all ranks** and the same on each: clip it, unscale it, look at it, then call
    ``step()``. A parameter without gradient on some ranks counts as zeros there; one without
    gradient on all ranks keeps ``grad is None``. All ranks must call ``backward()`` and ``step()``
    alike; a rank whose backward pass touches none of the parameters takes part in ``step()``.

    With ``op=Adasum`` gradients stay local: every rank takes its own step, and ``step()`` combines
    how far the ranks went (Maleki et al., MLSys 2021). The learning rate is then that of one rank.

    Arguments:
        optimizer: any ``torch.optim.Optimizer``, with any floating-point or complex parameters.
        named_parameters: ``model.named_parameters()``, for readable messages. Must then name every
            parameter of ``optimizer``.
        compression: how gradients travel: one of ``Compression``. They are scaled before, and
            have the parameter's dtype again after. What ``int8``, ``powersgd`` and ``topk`` leave
            unsent stays on the rank until a later step, and is in no ``state_dict()``.
        backward_passes_per_step: gradients are summed locally over this many backward passes and
            travel with the last one. ``step()`` in between does nothing, and ``zero_grad()`` after
            it keeps the gradients. A script that calls ``step()`` once after several backward
            passes may have a shorter last group; one that uses a ``GradScaler`` must call
            ``scaler.step()`` that way, since in between it would unscale what is not reduced.
        op: ``Average``, ``Sum``, or ``Adasum`` with a power of two of ranks.
        gradient_predivide_factor: with ``Average``, divide by this before and by
            ``size() / factor`` after the sum.
        num_groups: old name of ``groups`` as a number.
        groups: lists of parameters, each of which travels in a bucket of its own; or a number, to
            divide the parameters into so many. ``None`` or 0: buckets by size.
        sparse_as_dense: let sparse gradients travel as dense ones, with the others. Without it
            the rows that some rank has travel to all ranks, when the pass ends. Either way the
            result is sparse.
        process_set: the ranks that share gradients. On other ranks the optimizer works alone.

    Raises ``UsageError`` (a ``ValueError``) for arguments that do not fit together,
    ``UnsupportedError`` (also a ``NotImplementedError``) for Adasum with another number of ranks,
    and ``NotInitializedError`` before ``init()``. Later, in ``backward()`` or ``step()``,
    ``MismatchError`` on every rank when the ranks' parameters or steps differ, and ``PeerLost``.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(
            f"DistributedOptimizer wraps a torch.optim.Optimizer, not {type(optimizer).__name__}."
        )
    if isinstance(optimizer, Distributed):
        raise UsageError("This optimizer is a DistributedOptimizer already; wrap it once.")
    channel = channels.claim(process_set)
    chosen = options.Options(
        op=options.check_op(op, channel.group),
        passes_per_step=options.check_passes(backward_passes_per_step),
        predivide=options.check_predivide(gradient_predivide_factor, op),
        sparse_as_dense=sparse_as_dense,
        compression=options.check_compression(compression, op),
        process_set=process_set,
        names=options.check_names(optimizer, named_parameters),
        families=options.families(optimizer, options.check_groups(groups, num_groups)),
    )
    return _dress(optimizer, chosen, channel)


@dataclass
class _Attachment:
    """What a distributed optimizer holds beside what it shares with the wrapped one."""

    wrapped: Optimizer
    chosen: options.Options
    channel: channels.Channel
    gradients: Gradients
    label: str
    deltas: Deltas | None
    """With Adasum: combines how far the ranks went."""
    synchronized: bool = False
    """Whether ``synchronize()`` was called since the last step."""
    skips: bool = False
    """Whether the script is inside of ``skip_synchronize()``."""
    steps_before: int = 0
    """Steps that were applied when the ranks last joined."""


class Distributed(Optimizer):
    """The methods that a distributed optimizer adds to the wrapped class."""

    _farandole: _Attachment

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the reduced gradients, as the wrapped class does.

        With ``backward_passes_per_step > 1`` it does nothing until the group of passes is
        complete. A closure runs its backward passes inside, reduced like any other.
        """
        closure = args[0] if args else kwargs.get("closure")
        held = self._farandole
        if held.synchronized and not held.skips:
            warnings.warn(SYNCHRONIZED_TWICE, stacklevel=3)
        held.synchronized = False
        gradients = held.gradients
        accumulation = gradients.accumulation
        if closure is not None and accumulation.passes_per_step == 1:
            result: Any = self._apply(_settled(closure, gradients), *args[1:], **_without(kwargs))
            accumulation.step()
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            gradients.settle()
            if not accumulation.step():
                return loss
            rest = (None, *args[1:]) if args else ()
            result = self._apply(*rest, **_without(kwargs))
            result = loss if result is None else result
        # Learning-rate schedulers made before the wrapping ask the wrapped one.
        held.wrapped._opt_called = True  # type: ignore[attr-defined]
        events.emit(events.StepFinished(optimizer=held.label))
        return result

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped class's step; with Adasum, as far as all ranks together go."""
        deltas = self._farandole.deltas
        if deltas is None:
            return super().step(*args, **kwargs)
        with deltas.combined(options.parameters_of(self)):
            return super().step(*args, **kwargs)

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """Horovod's field: what each parameter is called."""
        name_of = self._farandole.gradients.name_of
        return {each: name_of(each) for each in options.parameters_of(self)}

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class does; keeps gradients that a later pass of the group needs."""
        gradients = self._farandole.gradients
        gradients.discard()
        if gradients.accumulation.clears():
            super().zero_grad(*args, **kwargs)

    def synchronize(self) -> None:
        """Make sure that the gradients are those of all ranks.

        They are after ``backward()``, so this returns at once, but on a rank whose backward pass
        touched none of the parameters, and for a group of passes that the script ends early.

        Example::

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._farandole.gradients.settle()
        self._farandole.synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts that call :meth:`synchronize` before ``step()``: it does not warn.

        ``UnsupportedError`` with Adasum, whose ranks have nothing to synchronize before a step.
        """
        held = self._farandole
        if held.deltas is not None:
            raise UnsupportedError(
                "Skipping synchronization is not supported when using Adasum optimizer: step() "
                "is where the ranks meet. Leave out synchronize() and skip_synchronize()."
            )
        held.skips = True
        try:
            yield
        finally:
            held.skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change ``backward_passes_per_step`` and begin a new group; on all ranks alike.

        Example::

            optimizer.set_backward_passes_per_step(4)
        """
        held = self._farandole
        held.chosen = dataclasses.replace(held.chosen, passes_per_step=options.check_passes(passes))
        held.gradients.change_passes(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped class does; begins a new group of passes.

        What compression has not sent yet belonged to the state before, and is forgotten.
        """
        gradients = self._farandole.gradients
        gradients.discard()
        gradients.forget_errors()
        self._adopt(state_dict)
        gradients.accumulation.reset()

    def _adopt(self, state_dict: dict[str, Any]) -> None:
        """Load it in the midst of a group of passes."""
        super().load_state_dict(state_dict)
        wrapped = self._farandole.wrapped
        wrapped.state = self.state
        wrapped.param_groups = self.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped class does. On all ranks alike, before the same step."""
        super().add_param_group(param_group)
        self._farandole.gradients.hook()

    def __reduce__(self) -> tuple[Any, ...]:
        held = self._farandole
        gradients = held.gradients
        names = tuple(gradients.name_of(each) for each in options.parameters_of(self))
        families = tuple(gradients.terms.families.get(each) for each in options.parameters_of(self))
        chosen = dataclasses.replace(held.chosen, names=names, families=families)
        return _restore, (type(held.wrapped), self.__getstate__(), chosen)


def _dress(optimizer: OptimizerT, chosen: options.Options, channel: channels.Channel) -> OptimizerT:
    dressed = object.__new__(_class_for(type(optimizer)))
    vars(dressed).update(vars(optimizer))
    vars(dressed).pop("step", None)  # a scheduler's wrapper around the wrapped one's method
    label = type(optimizer).__name__
    if channel.number:
        label = f"{label} (optimizer {channel.number})"
    parameters = options.parameters_of(optimizer)
    names = chosen.names or tuple(options.default_names(optimizer))
    alive = weakref.ref(dressed)
    gradients = Gradients(
        lambda: [] if (optimizer := alive()) is None else options.parameters_of(optimizer),
        _by_parameter(zip(parameters, names, strict=True)),
        channel,
        Terms(
            label=label,
            op=chosen.op,
            passes_per_step=chosen.passes_per_step,
            predivide=chosen.predivide,
            sparse_as_dense=chosen.sparse_as_dense,
            compression=chosen.compression,
            families=_by_parameter(
                (each, family)
                for each, family in zip(parameters, chosen.families, strict=True)
                if family is not None
            ),
        ),
    )
    adasum = chosen.op is Op.ADASUM
    deltas = Deltas(channel, label, cast(Codec, chosen.compression)) if adasum else None
    dressed._farandole = _Attachment(optimizer, chosen, channel, gradients, label, deltas)
    gradients.hook()
    weakref.finalize(dressed, gradients.unhook)
    with _lock:
        _alive.add(dressed)
    return cast(OptimizerT, dressed)


_alive: weakref.WeakSet[Distributed] = weakref.WeakSet()
_lock = threading.Lock()


def optimizers_of(ref: GroupRef) -> list[Distributed]:
    """Those of this rank that share gradients with other ranks of ``ref``, in the ranks' order."""
    with _lock:
        alive = list(_alive)
    sharing = [each for each in alive if each._farandole.channel.is_of(ref)]
    return sorted(sharing, key=lambda each: each._farandole.channel.order)


def _by_parameter(pairs: Iterable[tuple[Tensor, ValueT]]) -> MutableMapping[Tensor, ValueT]:
    """What is known of each parameter, for as long as that lives."""
    known: MutableMapping[Tensor, ValueT] = WeakIdKeyDictionary()
    known.update(pairs)
    return known


_classes: dict[type[Optimizer], type[Distributed]] = {}


def _class_for(base: type[Optimizer]) -> type[Distributed]:
    """The subclass of ``base`` that is distributed; one for each."""
    if base not in _classes:
        _classes[base] = _subclass(base)
    return _classes[base]


def _subclass(base: type[Optimizer]) -> type[Distributed]:
    def step(self: Distributed, *args: Any, **kwargs: Any) -> Any:
        return Distributed.step(self, *args, **kwargs)

    def zero_grad(self: Distributed, *args: Any, **kwargs: Any) -> None:
        Distributed.zero_grad(self, *args, **kwargs)

    named = {
        "step": functools.update_wrapper(step, base.step),
        "zero_grad": functools.update_wrapper(zero_grad, base.zero_grad),
        "__doc__": base.__doc__,
        "__module__": __name__,
    }
    # The wrapped class's step runs the step hooks; torch marks a method that does.
    step.hooked = True  # type: ignore[attr-defined]
    return type(base.__name__, (Distributed, base), named)


def _restore(base: type[Optimizer], state: dict[str, Any], chosen: options.Options) -> Optimizer:
    """What a pickled or copied distributed optimizer becomes: distributed, on its own channel."""
    optimizer = object.__new__(base)
    optimizer.__setstate__(state)  # type: ignore[no-untyped-call, unused-ignore]
    return _dress(optimizer, chosen, channels.claim_later(chosen.process_set))


def _settled(closure: Callable[[], Any], gradients: Gradients) -> Callable[[], Any]:
    def run() -> Any:
        loss = closure()
        gradients.settle()
        return loss

    return run


def _without(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "closure"}
