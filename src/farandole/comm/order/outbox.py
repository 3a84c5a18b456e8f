"""What this rank has submitted and not sent off yet, and when it is worth a message. Pure."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.comm.handle import Handle, Line
from farandole.comm.order import wire
from farandole.comm.order.memory import Memory
from farandole.comm.order.wire import Part
from farandole.core.errors import FarandoleError

PAUSE = 0.0005
"""Seconds that a request waits for others to travel with, when it is not known if any come."""

LINGER = 0.01
"""Seconds that it waits for those that it travelled with before."""


@dataclass(eq=False)
class Seat:
    """This rank's place in one group's named path."""

    line: Line
    memory: Memory
    unnamed: int = 0
    """Requests without a name so far."""
    sequence: int = 0
    """Requests that were agreed on so far."""
    waiting: dict[str, Handle[Any]] = field(default_factory=dict)
    """Requests that have not begun, by their keys."""
    latest: weakref.WeakValueDictionary[str, Handle[Any]] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """The last request of each key, for as long as somebody holds it or its data moves."""
    part: Part | None = None
    """What has not been sent off."""
    expected: int = 0
    """All that travelled with the requests in ``part`` the last time, as bits."""
    companions: dict[int, int] = field(default_factory=dict)
    """By number: the bits that a request left with last."""
    follows: bool = False
    """Whether ``part`` was begun so soon after the last one left that it is one company's."""
    gone: int = 0
    """What left last, as bits."""
    left: float = -math.inf
    """When it did."""
    closed_with: FarandoleError | None = None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return len(self.line.members) == 1

    def begin_anew(self) -> None:
        """Numbers mean nothing any more."""
        self.memory.begin_anew()
        self.companions.clear()
        self.gone = 0


@dataclass
class Mail:
    """What leaves in one message."""

    parts: Sequence[Part]
    joins: bool
    what: Handle[Any] | None
    """The first of the requests."""


class Outbox:
    """See the module. Times are seconds of any one clock.

    Example::

        if outbox.put(seat, handle, now) or now >= outbox.due:
            mail = outbox.take()
    """

    def __init__(self) -> None:
        self.due = math.inf
        """When it must leave at the latest."""
        self._mail: list[tuple[Seat, Part]] = []
        self._what: Handle[Any] | None = None
        self._closing: list[Part] = []
        self._joins = False

    def put(self, seat: Seat, handle: Handle[Any], now: float) -> bool:
        """Put a request down; whether those that left together last are all here again.

        As long as only some of them are, the others are expected, for :data:`LINGER` seconds.
        """
        part = seat.part
        if part is None or part.generation != seat.memory.generation:
            line = seat.line
            part = seat.part = Part(line.key, line.members, seat.memory.generation)
            self._mail.append((seat, part))
            # Who waits for some before submitting others does not want them to travel together.
            seat.expected, seat.follows = 0, now - seat.left < PAUSE and not line.waited
        seat.line.waited = False
        number = seat.memory.describe(part, handle.key, handle.header)
        if number is not None:
            seat.expected |= seat.companions.get(number, 0)
        self._what = self._what or handle
        if seat.expected == part.bits and not part.new:
            return True
        some_are_missing = bool(seat.expected & ~part.bits)
        self.due = min(self.due, now + (LINGER if some_are_missing else PAUSE))
        return False

    def close(self, seat: Seat) -> None:
        """Forget what lies here for ``seat``; say with the next message that it is closed."""
        self._mail = [each for each in self._mail if each[0] is not seat]
        line = seat.line
        self._closing.append(Part(line.key, line.members, closes=True))

    def join(self) -> None:
        """Say with the next message that this rank joins."""
        self._joins = True

    def take(self, now: float) -> Mail | None:
        """All that lies here; ``None`` when it is not worth a message.

        What comes right after something has left, and not because somebody waited for that, should
        have left with it: next time it does.
        """
        self.due = math.inf
        if not self._mail and not self._joins:
            return None
        for seat, part in self._mail:
            seat.part = None
            if part.generation != seat.memory.generation:
                continue  # its numbers stand for other requests by now
            together = part.bits | (seat.gone if seat.follows else 0)
            seat.companions |= dict.fromkeys(wire.numbers_in(together), together)
            seat.gone, seat.left = together, now
        mail = Mail([*(part for _, part in self._mail), *self._closing], self._joins, self._what)
        self._mail, self._closing, self._joins, self._what = [], [], False, None
        return mail
