"""What happened, told to whoever listens: rooms emit, ``monitor`` subscribes.

An event is a small frozen record. Emitting one that nobody subscribed to costs a dictionary
look-up, so the hot path may emit freely. Handlers run in the emitting thread and must not block;
an exception in a handler reaches the emitter, since a silent listener is a defect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class CollectiveFinished:
    """One collective moved its bytes."""

    operation: str
    name: str
    path: str
    """``named`` or ``planned``."""
    engine: str
    bytes: int
    seconds: float
    ranks: int


@dataclass(frozen=True)
class WaitFinished:
    """A thread of the user's was blocked by communication for ``seconds``."""

    path: str
    seconds: float


@dataclass(frozen=True)
class StepFinished:
    """An optimizer took a step."""

    optimizer: str


@dataclass(frozen=True)
class BatchLoaded:
    """A data loader handed out ``samples`` samples after ``seconds`` of waiting for them."""

    samples: int
    seconds: float
    training: bool


@dataclass(frozen=True)
class GroupFormed:
    """This process became ``rank`` of ``size`` ranks."""

    rank: int
    size: int
    generation: int
    source: str


@dataclass(frozen=True)
class GroupClosed:
    """This process left its group."""

    rank: int
    generation: int


EventT = TypeVar("EventT")

_handlers: dict[type, tuple[Callable[[Any], None], ...]] = {}
_lock = threading.Lock()


def emit(event: object) -> None:
    """Hand ``event`` to the handlers subscribed to its class, in the order they came."""
    for handler in _handlers.get(type(event), ()):
        handler(event)


def wanted(kind: type) -> bool:
    """Whether anybody listens to ``kind``: lets the hot path skip measuring."""
    return kind in _handlers


def subscribe(kind: type[EventT], handler: Callable[[EventT], None]) -> Callable[[], None]:
    """Call ``handler`` with each later event of class ``kind``; returns the way to stop.

    Example::

        stop = subscribe(StepFinished, lambda event: print(event.optimizer))
        ...
        stop()
    """
    with _lock:
        _handlers[kind] = (*_handlers.get(kind, ()), handler)

    def unsubscribe() -> None:
        with _lock:
            left = tuple(h for h in _handlers.get(kind, ()) if h is not handler)
            if left:
                _handlers[kind] = left
            else:
                _handlers.pop(kind, None)

    return unsubscribe
