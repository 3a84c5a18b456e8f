"""Lets the threads that agree on requests run soon, beside a main thread that computes in Python.

A thread of Python gives way to another one that has become ready after the *switch interval*, 5 ms
by default. An agreement passes through up to three such changes of thread. So while this process
has requests, and for a moment after that, the interval is :data:`BRISK`: a thread that began to
wait before the interval became short still waits for the long one, which back-to-back requests
would meet again and again. It is one value for the process: a larger one that somebody sets
meanwhile is left alone, and so is a smaller one that was there before.
"""

from __future__ import annotations

import sys
import threading

BRISK = 0.00002
"""Seconds."""

_lock = threading.Lock()
_wanted = 0
_usual = 0.0


def begin(count: int = 1) -> None:
    """``count`` of those that share the interval have requests."""
    global _wanted, _usual
    with _lock:
        if _wanted == 0:
            _usual = sys.getswitchinterval()
            if _usual > BRISK:
                sys.setswitchinterval(BRISK)
        _wanted += count


def end(count: int = 1) -> None:
    """``count`` of them have none any more."""
    global _wanted
    with _lock:
        _wanted -= count
        if _wanted == 0 and _usual > BRISK and abs(sys.getswitchinterval() - BRISK) < BRISK / 10:
            sys.setswitchinterval(_usual)
