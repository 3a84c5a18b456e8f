"""``TorchState``: models, optimizers and whatever else is to survive, with how each is kept."""

from __future__ import annotations

import os
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch.optim import Optimizer

from farandole.elastic.preemption import PREEMPTED
from farandole.elastic.state import ObjectState, source
from farandole.torch.checkpoint import Checkpoints
from farandole.torch.elastic import private
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.snapshot import copied
from farandole.torch.objects import broadcast_object
from farandole.torch.session import rank
from farandole.torch.state import broadcast_optimizer_state, broadcast_parameters

ValueT = TypeVar("ValueT")


@runtime_checkable
class Stateful(Protocol):
    """Whatever knows its state: schedulers, gradient scalers, samplers, loaders."""

    def state_dict(self) -> Any:
        """What there is to save."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a saved state."""
        ...


class StateHandler(Generic[ValueT]):
    """How one kind of value is saved, restored and given to all ranks."""

    def __init__(self, value: ValueT) -> None:
        self.value = value
        self.saved: Any = None
        """What the last :meth:`save` copied. It stays as it is until the next."""

    def save(self) -> None:
        """Copy the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the state of the rank ``elastic.state.source()`` to all ranks."""
        raise NotImplementedError

    def set_value(self, value: ValueT) -> None:
        """Another object in place of this one."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler[torch.nn.Module]):
    """Parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """See :class:`StateHandler`."""
        self.saved = copied(self.value.state_dict(), self.saved)

    def restore(self) -> None:
        """See :class:`StateHandler`."""
        self.value.load_state_dict(self.saved)

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        entries = self.value.state_dict()
        tensors = {name: each for name, each in entries.items() if isinstance(each, torch.Tensor)}
        others = {name: each for name, each in entries.items() if name not in tensors}
        broadcast_parameters(tensors, root_rank=source())
        given = broadcast_object(others, root_rank=source(), name="elastic.extra")
        if given:
            self.value.load_state_dict({**tensors, **given})


class OptimizerStateHandler(StateHandler[Optimizer]):
    """Momenta, step counts and hyperparameters. Gradients of a step that failed are dropped."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """See :class:`StateHandler`."""
        self.saved = copied(self.value.state_dict(), self.saved)

    def restore(self) -> None:
        """See :class:`StateHandler`."""
        # The optimizer keeps the tensors that it is given: its own, where they still fit.
        self.value.load_state_dict(copied(self.saved, self.value.state_dict()))
        for group in self.value.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        broadcast_optimizer_state(self.value, root_rank=source())


class StatefulHandler(StateHandler[Stateful]):
    """Anything else with a ``state_dict()``."""

    def __init__(self, value: Stateful) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """See :class:`StateHandler`."""
        self.saved = copied(self.value.state_dict(), self.saved)

    def restore(self) -> None:
        """See :class:`StateHandler`."""
        self.value.load_state_dict(copied(self.saved))

    def sync(self) -> None:
        """See :class:`StateHandler`."""
        given = broadcast_object(self.value.state_dict(), root_rank=source())
        self.value.load_state_dict(copied(given))

    def reset(self) -> None:
        """The ranks have changed."""
        again = getattr(self.value, "reset", None)
        if callable(again):
            again()


class SamplerStateHandler(StatefulHandler):
    """How far the samples of an epoch are processed."""


Registry = list[tuple[type[Any], type[StateHandler[Any]]]]

_handler_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (Stateful, StatefulHandler),
]


def get_handler_registry() -> Registry:
    """Pairs of type and handler; the first whose type fits a value is taken.

    Example::

        set_handler_registry([(Mine, MyHandler), *get_handler_registry()])
    """
    return _handler_registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs of :func:`get_handler_registry`, for states that are made from now on."""
    global _handler_registry
    _handler_registry = registry


class TorchState(ObjectState):
    """A model, an optimizer, and anything else, as attributes: what ``elastic.run`` keeps.

    Every keyword becomes an attribute. Models, optimizers, schedulers, scalers, samplers (whatever
    has ``state_dict()`` and ``load_state_dict()``) are kept by their state; other objects are
    copied, and pickled when they travel. Assigning a new model to ``state.model`` is fine.

    Raises as ``broadcast_parameters`` and ``broadcast_optimizer_state`` do, when the ranks' models
    differ.

    Example::

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, scheduler=scheduler)
        state.register_reset_callbacks([rescale_learning_rate])
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers: dict[str, StateHandler[Any]] = {}
        for name, value in values.items():
            handler = _handler_for(value)
            if handler is not None:
                handlers[name] = handler
        self._handlers = handlers
        self._saved_private = b""
        for name, handler in handlers.items():
            vars(self)[name] = handler.value
        super().__init__(
            bcast_object=broadcast_object,
            get_rank=rank,
            **{name: value for name, value in values.items() if name not in handlers},
        )

    def save(self) -> None:
        """See :class:`~farandole.elastic.state.State`."""
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._saved_private = private.packed(self._models()) if private.matters() else b""

    def restore(self) -> None:
        """See :class:`~farandole.elastic.state.State`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        if self._saved_private:
            private.take(self._saved_private, self._models())

    def private(self) -> bytes:
        """Random states, and the buffers of models. See :class:`~farandole.elastic.state.State`."""
        return private.packed(self._models())

    def take_private(self, data: bytes) -> None:
        """See :class:`~farandole.elastic.state.State`."""
        private.take(data, self._models())

    def _models(self) -> dict[str, torch.nn.Module]:
        handlers = self._handlers.items()
        return {name: h.value for name, h in handlers if isinstance(h, ModelStateHandler)}

    def sync(self) -> None:
        """See :class:`~farandole.elastic.state.State`."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """See :class:`~farandole.elastic.state.State`."""
        for handler in self._handlers.values():
            if isinstance(handler, StatefulHandler):
                handler.reset()

    def saved_state(self) -> dict[str, Any]:
        """What the last commit copied, by attribute; never changed until the next commit.

        Example::

            torch.save(state.saved_state(), "last.pt")
        """
        kept = {name: handler.saved for name, handler in self._handlers.items()}
        return {**self._saved_state, **kept}

    def keep_in(
        self, folder: str | os.PathLike[str], *, every: int | None = None, keep: int = 3
    ) -> None:
        """Keep checkpoints of all that this state has in ``folder``, which all ranks see.

        One is written every ``every`` commits, beside the training, and one when the job is told
        to end (SIGTERM). A job that begins goes on from the newest one that is whole, with any
        number of ranks. The ``keep`` newest stay. See :class:`farandole.torch.Checkpoints`.

        Call it before ``elastic.run``.

        Example::

            state = hvd.elastic.TorchState(model, optimizer, data=loader, epoch=0)
            state.keep_in("/ckpt", every=500)
        """
        parts = {name: _Live(self, name) for name in self._handlers}
        checkpoints = Checkpoints(folder, keep=keep, objects=_Objects(self), **parts)

        def save(raised: frozenset[str]) -> None:
            told_to_end = PREEMPTED in raised
            if told_to_end or (every and self.saved_commits % every == 0):
                checkpoints.save(self.saved_commits)
            if told_to_end:
                checkpoints.wait()

        def load() -> None:
            about = checkpoints.load()
            if about is not None:
                self.saved_commits = about["step"]
                self.save()

        self.on_commit(save)
        self.on_resume(load)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = vars(self).get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


class _Live:
    """One attribute of a state, whatever object it is at the moment."""

    def __init__(self, state: TorchState, name: str) -> None:
        self._state = state
        self._name = name

    def state_dict(self) -> Any:
        """Of the object."""
        return getattr(self._state, self._name).state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Into the object."""
        getattr(self._state, self._name).load_state_dict(state_dict)


class _Objects:
    """The plain attributes of a state, together."""

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """As of the last commit, which is now."""
        return dict(self._state._saved_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Attributes that the program has no more are left out."""
        for name in self._state._saved_state.keys() & state_dict.keys():
            setattr(self._state, name, state_dict[name])


def _handler_for(value: Any) -> StateHandler[Any] | None:
    for kind, handler in get_handler_registry():
        if isinstance(value, kind):
            return handler(value)
    return None
