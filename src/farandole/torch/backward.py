"""Knows when the outermost backward pass ends, and closes there what it opened.

Autograd runs a function at the end of the graph task that queued it. A reentrant checkpoint runs
graph tasks of its own inside another one, and only the outermost one's end is the end of the
backward pass that the user called. A task is an inner one when a Python autograd function is on
the stack beneath it; then the function is queued by a hook on the next node of the outer graph,
which autograd runs as part of the outermost task.

All optimizers whose gradients one backward pass touches are closed together: first each sends what
is left, then each waits. Waiting for one before the next has sent would deadlock ranks whose
gradients come in different order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.autograd.variable import Variable

_APPLY = BackwardCFunction.apply.__code__

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the graph task that this thread runs, later ones being greater; -1 outside."""


class Participant(Protocol):
    """Something that a backward pass opened."""

    @property
    def number(self) -> int:
        """Its place in the order in which all ranks close the same things."""
        ...

    def flush(self) -> None:
        """The pass is over: send what is left. Must not wait for another participant."""

    def finish(self) -> None:
        """Everybody has sent: wait for the results."""


class BackwardPass(threading.local):
    """The backward pass that this thread runs, if any."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []
        self._tasks: set[int] = set()

    def enter(self, participant: Participant, task: int) -> tuple[bool, bool]:
        """Called in a hook, in graph task ``task``.

        Says whether ``participant`` is new to the pass, and whether the task is an inner one. A
        pass that an exception ended is closed first when another one begins.
        """
        node = _enclosing_node()
        if self._participants and node is None and task > max(self._tasks):
            self.close()
        if not self._participants:
            _at_end_of_backward(self.close, node)
        new = participant not in self._participants
        if new:
            self._participants.append(participant)
        self._tasks.add(task)
        return new, node is not None

    def close(self) -> None:
        """End the pass for all who take part in it."""
        participants = sorted(self._participants, key=lambda each: each.number)
        self._participants = []
        self._tasks = set()
        for participant in participants:
            participant.flush()
        for participant in participants:
            participant.finish()


def _enclosing_node() -> Node | None:
    """The outermost Python autograd function whose backward this thread is in the midst of."""
    found: Node | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def _at_end_of_backward(close: Callable[[], None], node: Node | None) -> None:
    queue = Variable._execution_engine.queue_callback
    if node is None:
        queue(close)
        return
    following = next((each for each, _ in node.next_functions if each is not None), None)
    if following is None:
        return

    def before(*_: Any) -> None:
        handle.remove()
        queue(close)

    handle = following.register_prehook(before)
