"""Threads by whose end other processes see at once that this process dies.

A process that is killed gives back its memory before the system says that it has ended, which takes
tens of milliseconds with the memory of a training. Its threads are gone before that, all but the
one that gives the memory back. So each process keeps two threads that do nothing, and whoever
depends on it watches both, by pidfds of threads (Linux 6.9). Where the system has none, the process
itself is watched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

COUNT = 2
"""One of them may be the one that gives the memory back."""

_PIDFD_THREAD = os.O_EXCL
"""A flag of ``pidfd_open``: of a thread, not of a process."""

_lock = threading.Lock()
_threads: dict[int, list[int]] = {}
"""By process, since a forked child has none."""


def witnesses() -> list[int]:
    """The numbers that the system has given to the witnesses of this process."""
    with _lock:
        if os.getpid() not in _threads:
            _threads[os.getpid()] = [_start() for _ in range(COUNT)]
        return _threads[os.getpid()]


def watch(process: int, threads: Sequence[int]) -> list[int]:
    """Descriptors of which one is readable when ``process``, whose witnesses they are, dies.

    Raises ``OSError`` when it has.
    """
    pidfds: list[int] = []
    try:
        pidfds.extend(os.pidfd_open(thread, _PIDFD_THREAD) for thread in threads)
    except OSError:  # an older system, or they are gone: then the process is, too
        for pidfd in pidfds:
            os.close(pidfd)
        return [os.pidfd_open(process)]
    return pidfds


def _start() -> int:
    never = threading.Lock()
    never.acquire()
    thread = threading.Thread(target=never.acquire, name="farandole-witness", daemon=True)
    thread.start()
    assert thread.native_id is not None
    return thread.native_id
