"""The workers that live and the hosts that were named, as ``membership`` keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Worker:
    """A process that lives."""

    number: int
    host: str
    slot: int
    since: float
    """When it was started."""
    ready_since: float | None = None
    """Since when it waits for a world; ``None``: it does not."""
    commits: int = -1
    """How many commits its saved state has seen, as it said last; -1: it has no state."""
    going: bool = False
    """Whether it was told to end: its end is no loss."""
    named: bool = False
    """Whether it was named for not leaving the latest world."""
    last_moment: float | None = None
    """It was told to show where it is, which ends it; if it has not ended by then, it is killed."""


@dataclass
class Host:
    """A host that was named at some time."""

    slots: int = 0
    """How many ranks it may have now; 0: it is not named any more."""
    losses: int = 0
    last_loss: float = -math.inf
    avoided_until: float = -math.inf

    def takes(self, now: float) -> bool:
        """Whether it may get a new rank."""
        return self.slots > 0 and now >= self.avoided_until
