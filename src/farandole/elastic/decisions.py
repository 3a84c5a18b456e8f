"""What ``membership`` decides, as data: the driver acts on it, tests compare it."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.core.worlds import World

NOT_ELASTIC = (
    "The job was started with --min-np, but the script cannot go on without the lost rank: it has "
    "never called elastic.run. Wrap its training function with @hvd.elastic.run and give that a "
    "state, as docs/elastic.md shows in five lines; or start it without --min-np."
)
NEVER_CAME = (
    "A rank has ended without calling init() while others waited for it there. Every rank has to "
    "call init(), or none."
)
STATE_LOST = "All ranks that had the state of the training were lost."
RESET_LIMIT_EXCEEDED = (
    "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
)


@dataclass(frozen=True)
class Spawn:
    """Start a worker. ``rank`` and ``size`` are what it will probably have."""

    number: int
    host: str
    slot: int
    slots: int
    """How many the host has."""
    rank: int
    size: int


@dataclass(frozen=True)
class Kill:
    """End a worker's process at once; with ``show`` it shows first where it is."""

    number: int
    why: str
    show: bool = False


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Publish:
    """This is the next world; its members wait for it."""

    world: World


@dataclass(frozen=True)
class Update:
    """Tell the members to leave at their next commit."""

    generation: int
    removed_only: bool


@dataclass(frozen=True)
class End:
    """Tell the members that their generation is over."""

    generation: int
    why: str
    lost: tuple[int, ...]


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker that waits that it is not wanted any more; it ends in good order."""

    number: int
    why: str


@dataclass(frozen=True)
class Refuse:
    """Tell a worker that waits that there will be no world any more."""

    number: int
    why: str


@dataclass(frozen=True)
class Fail:
    """The job has failed. ``culprit`` is the worker whose loss it was, if it was one."""

    why: str
    culprit: int | None


Decision = Spawn | Kill | Say | Publish | Update | End | Dismiss | Refuse | Fail
