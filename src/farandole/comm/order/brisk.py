"""Lets the threads that agree on requests run soon, beside a main thread that computes in Python.

A thread of Python gives way to another one that has become ready after the *switch interval*, 5 ms
by default. An agreement passes through about eight such changes of thread. So while a request of
this process waits for its agreement, and only then, the interval is :data:`BRISK`. It is one value
for the process: a larger one that somebody sets meanwhile is left alone, and so is a smaller one
that was there before.
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
    """``count`` requests wait for their agreement."""
    global _wanted, _usual
    with _lock:
        if _wanted == 0:
            _usual = sys.getswitchinterval()
            if _usual > BRISK:
                sys.setswitchinterval(BRISK)
        _wanted += count


def end(count: int = 1) -> None:
    """``count`` of them do not any more."""
    global _wanted
    with _lock:
        _wanted -= count
        if _wanted == 0 and _usual > BRISK and abs(sys.getswitchinterval() - BRISK) < BRISK / 10:
            sys.setswitchinterval(_usual)
