"""The job loop in a pod: node 0 of a job on a cluster, and what its exit codes tell the cluster.

======  ==========================================================================================
0       every rank ended well
64      the program cannot run, or its time is up: trying again would not help
75      a node was lost or taken away: the job is to be tried again, and nobody is to blame
143     this pod was told to end, and the ranks had their time to save
else    a rank's own code
======  ==========================================================================================

A program cannot run when its first failure, before it has called ``init()``, is an import or its
syntax, or when it refuses its arguments with exit code 2, as ``argparse`` does.
"""

from __future__ import annotations

import signal
from typing import Any

from farandole.core.errors import FarandoleBug
from farandole.core.store import LocalStore
from farandole.launch import early
from farandole.launch.channel import Message
from farandole.launch.failure import Failure
from farandole.launch.job import Job
from farandole.launch.task import Task

CANNOT_RUN, TRY_AGAIN, TERMINATED = 64, 75, 143

_NOT_WORTH_TRYING = frozenset(
    ["ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"]
)
_REFUSED_ARGUMENTS, _NOT_STARTED = 2, 127


class PodJob(Job):
    """See the module."""

    def __init__(self, task: Task, agent: early.Agent, store: LocalStore) -> None:
        super().__init__(task, agent, store)
        if task.meeting is None:
            raise FarandoleBug("This task has no place to meet.")
        self._time_limit = task.meeting.time_limit
        self._ends_at: float | None = None
        self._out_of_time = False
        self._taken: str | None = None
        """The node that was told to end, if that came before anything else."""
        self._lost: set[int] = set()
        """Ranks of nodes that were lost."""

    def _patience(self) -> float | None:
        patience = super()._patience()
        if self._ends_at is None or self._is_ending:
            return patience
        left = max(0.0, self._ends_at - self._now())
        return left if patience is None else min(left, patience)

    def _act(self) -> None:
        super()._act()
        late = self._ends_at is not None and self._now() >= self._ends_at
        if late and not self._is_ending:
            self._out_of_time = True
            self._say(
                f"farandole: the time limit of {self._time_limit:g} s is reached; the ranks are "
                "told to save and end."
            )
            self._on_user_signal(signal.SIGTERM)

    def _on_message(self, message: Message) -> None:
        if message.kind == "terminated":
            self._on_taken(message.fields["node"])
        else:
            super()._on_message(message)

    def _on_taken(self, node: str) -> None:
        """A node has to go: without it the others cannot go on either, but all can save."""
        if not self._is_ending:
            self._taken = node
            self._say(f"farandole: {node} was told to end; the ranks are told to save and end.")
            self._on_user_signal(signal.SIGTERM)

    def _on_started(self, fields: dict[str, Any]) -> None:
        super()._on_started(fields)
        if self._time_limit is not None and self._ends_at is None:
            self._ends_at = self._now() + self._time_limit

    def _on_fate(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        if kind == "lost":
            self._lost.add(rank)
        super()._on_fate(rank, kind, fields)

    def _conclude(self) -> int:
        code = super()._conclude()
        if self._out_of_time:
            self._say("farandole: the time limit was reached.")
            self._flush()
            return CANNOT_RUN
        if self._signal is not None:
            return TRY_AGAIN if self._taken is not None else code
        cause = self._verdict.cause
        if cause is None:
            return code
        if cause.rank in self._lost:
            return TRY_AGAIN
        return CANNOT_RUN if self._cannot_run(cause) else code

    def _cannot_run(self, cause: Failure) -> bool:
        rank = self._verdict.ranks[cause.rank]
        if cause.code == _NOT_STARTED:
            return True
        if rank.in_init:
            return False
        if rank.report is not None:
            return rank.report["exception"] in _NOT_WORTH_TRYING
        return cause.code == _REFUSED_ARGUMENTS
