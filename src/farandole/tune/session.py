"""One search while something runs on: it is told how long each step took, and says what to try.

The loop that is being tuned is not ours, so the session does not call it: it is called after every
step. On each of several ranks there is one, and all of them come to the same decisions, because
they judge from the same times: those of all ranks, which the caller exchanges when a trial is over.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.tune.search import Search, Setting


@dataclass(frozen=True)
class Trial:
    """What a finished trial has shown."""

    number: int
    """From 1; 0 and below while warming up."""
    setting: Setting
    seconds: float
    """A step, on the slowest rank: the median over the trial's steps."""


class Session:
    """Tries what ``search`` asks for.

    A trial has ``steps`` steps and one before them that does not count, in which the new setting is
    brought into force. ``warm_up`` trials of the first setting come first, and their times are
    thrown away: caches fill, and clocks settle.
    """

    def __init__(self, search: Search, *, warm_up: int, steps: int) -> None:
        self._search = search
        self._steps = steps
        self._number = 1 - warm_up
        self._times: list[float] = []
        self.chosen: Setting | None = None
        """The best setting, when the search is over."""
        self.setting: Setting = {}
        """What is to be in force now."""
        self._go_on(None)

    def note(self, seconds: float) -> bool:
        """A step took so long on this rank; whether the trial is complete."""
        self._times.append(seconds)
        return len(self._times) > self._steps

    def times(self) -> list[float]:
        """What counts of this trial, on this rank; as many on every rank."""
        return self._times[1:]

    def restart_trial(self) -> None:
        """The trial is worth nothing: something else has changed meanwhile. Begin it again."""
        self._times.clear()

    def judge(self, times: Sequence[Sequence[float]]) -> Trial:
        """The trial is over; ``times`` are those of all ranks. What is to be tried now is set."""
        slowest = [max(step) for step in zip(*times, strict=True)]
        trial = Trial(self._number, self.setting, statistics.median(slowest))
        self._times.clear()
        self._number += 1
        if trial.number > 0:
            self._go_on(trial.seconds)
        return trial

    def _go_on(self, cost: float | None) -> None:
        try:
            self.setting = next(self._search) if cost is None else self._search.send(cost)
        except StopIteration as end:
            self.setting = self.chosen = end.value
