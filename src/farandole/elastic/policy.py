"""What the user allows and wants of an elastic job, and how long a host that fails is avoided.

:func:`cooldown` is exponential backoff, as Horovod's, without its random part: hosts fail one by
one, and there is nobody to be kept from coming at the same moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from farandole.core.errors import UsageError

RANK, HOST = "rank", "host"
SHRINK, HOLD = "shrink", "hold"

RESPAWN_RANGE = (1.0, 300.0)
"""Seconds, shortest and longest, by which a replacement is put off on a host that keeps failing."""

FORGIVEN_AFTER = 600.0
"""Seconds without a loss after which a host's earlier ones count no more."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Fixed for a job. ``UsageError`` when the numbers do not fit together."""

    start_size: int
    """Ranks that must be there to begin. Where hosts have more slots, up to ``max_size`` begin."""
    min_size: int
    """With fewer ranks training waits."""
    max_size: int | None = None
    """More ranks are not started; ``None``: as many as there are slots."""
    on_loss: str = RANK
    """``rank``: only the lost rank goes. ``host``: all ranks of its host go, and the host is
    avoided."""
    on_loss_size: str = SHRINK
    """``shrink``: go on with the survivors at once. ``hold``: wait for the replacement, which takes
    the lost rank's number."""
    reset_limit: int | None = None
    """How many generations may follow the first; ``None``: any number."""
    cooldown: tuple[float, float] | None = None
    """Seconds, shortest and longest, for which a host gets no new rank. ``None``: with ``host`` for
    good, with ``rank`` as :data:`RESPAWN_RANGE` says."""
    awaits_newcomers: bool = False
    """Whether members leave as soon as newcomers are being started, and wait for them, as with
    Horovod; otherwise they train on until newcomers are ready."""
    start_timeout: float = 120.0
    """Seconds from a worker's start until it must have called ``init()``, if others wait there."""
    stall_warning: float = 60.0
    """Seconds that those who have left a world wait for a member that has not, until that is told;
    0: never."""
    stall_timeout: float = 1800.0
    """… and until that member is ended, as a loss; 0: never."""
    patience: float = 600.0
    """Seconds that training waits for ``min_size`` ranks, or a replacement, before it gives up."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.start_size:
            raise UsageError(
                f"--min-np {self.min_size} must be from 1 to the {self.start_size} ranks to begin "
                "with (-np)."
            )
        if self.max_size is not None and self.max_size < self.start_size:
            raise UsageError(
                f"--max-np {self.max_size} is below the {self.start_size} ranks to begin with "
                "(-np)."
            )
        if self.cooldown is not None and not 0 <= self.cooldown[0] <= self.cooldown[1]:
            low, high = self.cooldown
            raise UsageError(
                f"--blacklist-cooldown-range {low:g} {high:g}: give the shortest time, at least 0, "
                "then the longest, in seconds."
            )
        _require_one_of("--on-loss", self.on_loss, (RANK, HOST))
        _require_one_of("--on-loss-size", self.on_loss_size, (SHRINK, HOLD))


def _require_one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise UsageError(f"{name} {value}: it is {' or '.join(words)}.")


def cooldown(losses: int, policy: Policy) -> float:
    """Seconds for which a host that has had ``losses`` losses, at least 1, gets no new rank.

    Example::

        cooldown(1, Policy(start_size=4, min_size=2))                    # 0.0: replaced at once
        cooldown(3, Policy(start_size=4, min_size=2))                    # 2.0
        cooldown(1, Policy(start_size=4, min_size=2, on_loss="host"))    # inf: never again
    """
    if policy.on_loss == HOST:
        if policy.cooldown is None:
            return math.inf
        low, high = policy.cooldown
        return min(max(low * 2.0 ** min(losses, 60), low), high)
    if losses == 1:
        return 0.0
    low, high = policy.cooldown or RESPAWN_RANGE
    return min(low * 2.0 ** min(losses - 2, 60), high)
