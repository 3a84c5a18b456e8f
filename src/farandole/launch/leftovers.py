"""Ending every process below this one, and removing what killed processes leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from farandole.launch import kernel

_SHARED_MEMORY = "/dev/shm"
_TRACKER = "multiprocessing.resource_tracker"
_LIMIT = 5.0
"""Seconds; a killed process that is not gone by then hangs in the kernel."""

_TRACKER_RESPITE = 0.5
"""Seconds for Python's resource trackers, which remove shared memory when their user is gone."""


def kill_all(ancestor: int, reap: Callable[[], None]) -> set[int]:
    """SIGKILL every descendant of ``ancestor`` until none is left; ``reap`` collects the dead.

    Returns the pids that were killed.
    """
    killed: set[int] = set()
    start = time.monotonic()
    while time.monotonic() < start + _LIMIT:
        reap()
        left = kernel.descendants(ancestor)
        if not left:
            break
        spare = time.monotonic() < start + _TRACKER_RESPITE
        for pid, command in left.items():
            if spare and _TRACKER in command:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.005)
    return killed


def remove_shared_memory(pids: Iterable[int]) -> None:
    """Remove the named segments that torch processes had not unlinked yet when they died."""
    prefixes = tuple(f"torch_{pid}_" for pid in pids if pid)
    if not prefixes:
        return
    try:
        names = os.listdir(_SHARED_MEMORY)
    except OSError:
        return
    for name in names:
        if name.startswith(prefixes):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(_SHARED_MEMORY, name))
