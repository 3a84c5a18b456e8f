"""Knows when the outermost backward pass ends, and closes there what it opened.

Autograd runs a function at the end of the graph task that queued it. A reentrant checkpoint runs
graph tasks of its own inside another one, and only the outermost one's end is the end of the
backward pass that the user called. A task is an inner one when a Python autograd function is on
the stack beneath it; then the function is queued by a hook on the next node of the outer graph,
which autograd runs as part of the outermost task.

Autograd has a thread for each device, and whichever finishes last runs what was queued, so a pass
is an object that any thread can close.

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
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.autograd.variable import Variable

_APPLY = BackwardCFunction.apply.__code__
_RUN = graph._engine_run_backward.__code__

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

    def finish(self, *, keep: bool) -> None:
        """Everybody has sent: wait for the results, and ``keep`` them or not."""


class BackwardPass:
    """A backward pass of the user's: who takes part, and in which graph tasks it runs."""

    def __init__(self, depth: int) -> None:
        self.participants: list[Participant] = []
        self.tasks: set[int] = set()
        self.depth = depth
        """How many backward passes were on the stack of the thread that opened it."""

    def close(self, *, keep: bool = True) -> None:
        """End the pass for all who take part in it. Idempotent."""
        with _lock:
            participants = sorted(self.participants, key=lambda each: each.number)
            self.participants = []
            for task in self.tasks:
                _passes.pop(task, None)
        for participant in participants:
            participant.flush()
        for participant in participants:
            participant.finish(keep=keep)


class _Here(threading.local):
    latest: BackwardPass | None = None
    """The pass that this thread was last in."""


_lock = threading.Lock()
_passes: dict[int, BackwardPass] = {}
"""The open passes, by each of their graph tasks."""
_here = _Here()


def enter(participant: Participant, task: int) -> tuple[BackwardPass, bool, bool]:
    """Called in a hook, in graph task ``task``.

    Gives the pass, and says whether ``participant`` is new to it and whether the task is an inner
    one. A pass that an exception ended is closed first when another one begins, and its results are
    dropped.
    """
    node, depth = _surroundings()
    latest = _here.latest
    inside = latest if latest is not None and latest.participants else None
    if inside is not None and node is None and task > max(inside.tasks):
        # Deeper on the stack, a hook of the user's runs it inside the other one.
        inside.close(keep=depth > inside.depth)
        inside = None
    with _lock:
        joined = _passes.get(task) or (inside if node is not None else None)
        opens = joined is None
        if joined is None:
            joined = BackwardPass(depth)
        joined.tasks.add(task)
        _passes[task] = joined
        new = participant not in joined.participants
        if new:
            joined.participants.append(participant)
    _here.latest = joined
    if opens:
        _at_end_of_backward(joined.close, node)
    return joined, new, node is not None


def _surroundings() -> tuple[Node | None, int]:
    """Where this thread is.

    The outermost Python autograd function whose backward it is in the midst of, and the number of
    backward passes on its stack.
    """
    found: Node | None = None
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            found = frame.f_locals["self"]
        elif frame.f_code is _RUN:
            depth += 1
        frame = frame.f_back
    return found, depth


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
