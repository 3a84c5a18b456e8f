"""Which threads of this rank are blocked, and whether that leaves it any thread to go on with.

Whose wait it is:

* A thread of the user's that ever waited counts for as long as it lives; so does the one that
  formed the group. The rank is stuck when each of them waits and has been announced.
* A thread of our own (its name begins with :data:`HELPER_PREFIX`) waits on behalf of others, and
  when it idles it keeps nobody from being stuck. What it waits for is reported all the same.
* A thread that Python did not start runs autograd: while it waits, the thread that formed the
  group is inside ``backward()``. Its wait counts as that thread's.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from farandole.comm.control.position import Channel, Position
from farandole.comm.control.watch import GatherKey

HELPER_PREFIX = "farandole-"


class Meeting(Protocol):
    """What ranks come to one by one, and rank 0 knows who has come: a gather, a named request."""

    @property
    def key(self) -> GatherKey:
        """What it is known by, and who must come."""
        ...

    def done(self) -> bool:
        """Whether all have come, or it failed."""
        ...


class Blocked:
    """One thread that waits, for an operation or for others to come."""

    __slots__ = ("announced", "gather", "owner", "position", "since")

    def __init__(self, position: Position, since: float, gather: Meeting | None) -> None:
        self.position = position
        self.since = since
        self.gather = gather
        self.owner: threading.Thread | None = None
        """The user's thread that is blocked by it; ``None`` for a helper's wait."""
        self.announced = False

    def holds(self) -> bool:
        """Whether it counts: announced, and what it waits for has not come meanwhile."""
        return self.announced and not (self.gather is not None and self.gather.done())

    def to_json(self, now: float) -> dict[str, Any]:
        """As plain JSON values."""
        waited = round(now - self.since, 4)
        data: dict[str, Any] = {"position": self.position.to_json(), "waited": waited}
        if self.gather is not None:
            data["topic"], data["members"] = self.gather.key
        return data


@dataclass(frozen=True)
class Report:
    """What a rank tells of itself. Two are equal when there is nothing new to tell."""

    held: tuple[Blocked, ...] = ()
    stuck: bool = False


class Waits:
    """The blocked threads of one rank. Thread-safe.

    ``home`` is the thread that formed the group.
    """

    def __init__(self, home: threading.Thread) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._blocked: list[Blocked] = []
        self._known: weakref.WeakSet[threading.Thread] = weakref.WeakSet([home])
        self._begun: dict[Channel, int] = {}

    def enter(self, blocked: Blocked) -> None:
        """The calling thread begins to wait."""
        blocked.owner = owner = self._owner(threading.current_thread())
        with self._lock:
            if owner is not None and owner not in self._known:
                self._known.add(owner)
            self._blocked.append(blocked)

    def leave(self, blocked: Blocked, *, completed: bool) -> None:
        """It waits no more; ``completed`` when what it waited for has happened."""
        with self._lock:
            self._blocked.remove(blocked)
            if completed and blocked.gather is None:
                self._note(blocked.position)

    def note_begun(self, position: Position) -> None:
        """An operation was begun here that nobody waits for yet."""
        with self._lock:
            self._note(position)

    def threads(self) -> list[threading.Thread]:
        """The user's threads that live; the main thread when there is none."""
        with self._lock:
            alive = [thread for thread in self._known if thread.is_alive()]
        return sorted(alive, key=lambda thread: thread.ident or 0) or [threading.main_thread()]

    def report(self) -> Report:
        """Which announced waits hold, and whether the rank is stuck in them."""
        with self._lock:
            held = tuple(blocked for blocked in self._blocked if blocked.holds())
            owners = {blocked.owner for blocked in held}
            moving = any(t.is_alive() and t not in owners for t in self._known) if held else True
        return Report(held, not moving)

    def begun(self) -> list[list[str | int]]:
        """The highest number begun in each channel: path, group, number."""
        with self._lock:
            return [[*channel, number] for channel, number in self._begun.items()]

    def _note(self, position: Position) -> None:
        if position.sequence > self._begun.get(position.channel, -1):
            self._begun[position.channel] = position.sequence

    def _owner(self, thread: threading.Thread) -> threading.Thread | None:
        if thread is self._home:
            return thread
        if type(thread).__name__ == "_DummyThread":
            return self._home
        return None if thread.name.startswith(HELPER_PREFIX) else thread
