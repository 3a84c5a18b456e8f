"""How a rank ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """How one rank ended. ``T`` is what ``fn`` returns."""

    rank: int
    finished: bool
    """Whether ``fn`` returned."""
    value: T | None = None
    """What ``fn`` returned."""
    error: BaseException | None = None
    """What ``fn`` raised."""
    traceback: str = ""
    """Where it raised it, as text."""
    exit_code: int | None = None
    """The process's exit code; ``None`` for a thread, or when a signal ended it."""
    signal: int | None = None
    """The signal that ended the process."""
    timed_out: bool = False
    """Whether it still ran at the deadline."""
    stacks: str = ""
    """Where its threads were at the deadline."""
    output: str = ""
    """What the process wrote to its standard output."""
    errors: str = ""
    """What the process wrote to its standard error."""

    def describe(self) -> str:
        """How it ended, with its output: what a failed test wants to show."""
        parts = [f"rank {self.rank} {self._end()}"]
        for title, text in (
            ("traceback", self.traceback),
            ("stacks", self.stacks),
            ("output", self.output),
            ("errors", self.errors),
        ):
            if text.strip() and not (title == "errors" and self.traceback.strip() in text):
                parts.append(f"--- {title} of rank {self.rank}\n{text.rstrip()}")
        return "\n".join(parts)

    def _end(self) -> str:
        if self.timed_out:
            return "still ran at the deadline"
        if self.error is not None:
            return f"raised {type(self.error).__name__}"
        if self.signal is not None:
            return f"was ended by {signal.Signals(self.signal).name}"
        if self.finished:
            return "finished"
        return f"exited with {self.exit_code} before fn returned"


class RanksFailed(AssertionError):
    """Some ranks did not finish; ``outcomes`` says how each one ended."""

    def __init__(self, outcomes: Sequence[Outcome[Any]]) -> None:
        super().__init__("\n".join(outcome.describe() for outcome in outcomes))
        self.outcomes = list(outcomes)
