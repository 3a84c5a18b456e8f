"""Time, as something that is passed in: real in production, virtual in tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and the right to sleep."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread for ``seconds``."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See :class:`Clock`."""
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()


@dataclass(frozen=True)
class Deadline:
    """A moment after which waiting must end; ``limit`` is the span it was made from, for messages.

    ``limit=None`` never expires.

    Example::

        deadline = Deadline.after(30.0)
        while not deadline.expired():
            chunk = receive(timeout=deadline.remaining())
    """

    at: float | None
    limit: float | None
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """A deadline ``seconds`` from now, or one that never expires for ``None``."""
        return cls(None if seconds is None else clock.now() + seconds, seconds, clock)

    def remaining(self) -> float | None:
        """Seconds left, not below 0; ``None`` when it never expires."""
        return None if self.at is None else max(0.0, self.at - self.clock.now())

    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.at is not None and self.clock.now() >= self.at
