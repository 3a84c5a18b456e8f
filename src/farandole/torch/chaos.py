"""Faults that were ordered with ``farandole run --chaos``, carried out in the rank they meet."""

from __future__ import annotations

import logging
import os
import signal

from farandole.comm import group as groups
from farandole.core import events, faults

_log = logging.getLogger(__name__)


def follow(text: str) -> None:
    """From now on, have this process suffer what ``text`` says of its rank; see ``core.faults``."""
    ordered = faults.parse(text)
    steps = 0

    def on_step(_: events.StepFinished) -> None:
        nonlocal steps
        steps += 1
        for fault in ordered:
            if fault.step == steps and fault.rank == groups.root().current.rank and _claim(fault):
                _suffer(fault)

    events.subscribe(events.StepFinished, on_step)


def _claim(fault: faults.Fault) -> bool:
    """Whether this process is the first that the fault meets: a replacement is spared."""
    meeting = groups.root().meeting
    if meeting is None:
        return True
    mine = b"%d" % os.getpid()
    return meeting.store.compare_and_set(f"chaos/{fault}", None, mine) == mine


def _suffer(fault: faults.Fault) -> None:
    _log.warning("As ordered: %s.", fault)
    if fault.kind == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
