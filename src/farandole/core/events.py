"""What happened, told to whoever listens: rooms emit, ``monitor`` subscribes.

An event is a small frozen record. Emitting one that nobody subscribed to costs a dictionary
look-up, so the hot path may emit freely. Handlers run in the emitting thread and must not block;
an exception in a handler reaches the emitter, since a silent listener is a defect.
"""

from __future__ import annotations

import enum
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


class Stage(enum.Enum):
    """How far a named collective is on one rank; each stage lasts until the next one."""

    NEGOTIATING = "negotiating"
    """Submitted here; not yet agreed on by all ranks."""
    QUEUED = "queued"
    """Agreed; waits for what was agreed before it, or for its input."""
    PACKING = "packing"
    """Copied into the buffer that it shares with others."""
    MOVING = "moving"
    """In the hands of the transport."""
    UNPACKING = "unpacking"
    """Moved; the result is being made."""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class RequestStaged:
    """A named collective of this rank entered ``stage``.

    The first stage is ``NEGOTIATING``, the last ``DONE`` or ``FAILED``; those between may be left
    out, and none comes twice.
    """

    rank: int
    """Global."""
    group: str
    """The key of its group: a name may be in flight once in each group."""
    operation: str
    """``allreduce``, ``allgather``, ..."""
    name: str
    """As the user, or the count of unnamed ones, has it: ``loss``, ``noname.3``."""
    stage: Stage
    at: float
    """``time.perf_counter()`` when it happened: for work of a transport, when it was noticed."""
    transport: str = ""
    """With ``MOVING``: ``gloo``, ``nccl``, ``threads``."""
    detail: str = ""
    """With ``FAILED``: the first line of the error. Else what helps a reader, or nothing."""


@dataclass(frozen=True)
class BucketLeft:
    """A bucket of gradients was handed to an engine; ``CollectiveFinished`` of that name follows.

    Buckets of one name, which belong to several optimizers, finish in any order.
    """

    name: str
    at: float
    """As in :class:`RequestStaged`."""


@dataclass(frozen=True)
class CycleStarted:
    """This rank began a round of agreement about what was submitted since the last one."""

    rank: int
    group: str
    at: float
    """As in :class:`RequestStaged`."""


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
