"""Lets a thread that has little to do run soon after it wakes, beside threads that compute.

Linux lets each thread say for how long it wants to run at a time, and from 6.12 on one that wants
less than the one which runs takes its place (the EEVDF scheduler). It needs no rights, and gives no
larger share of the processor. Elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import os
import sys

SLICE = 100_000
"""Nanoseconds: the least that Linux grants."""

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of ``sched_setattr`` and ``sched_getattr``."""
_USUAL = (0, 3)
"""The policies with slices: ``SCHED_OTHER`` and ``SCHED_BATCH``."""


class _Attributes(ctypes.Structure):
    """``struct sched_attr``."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def be_prompt() -> bool:
    """Ask for the shortest slices for the calling thread; whether the system knows of such."""
    change, _ = _calls()
    attributes = _attributes()
    if change is None or attributes is None or attributes.policy not in _USUAL:
        return False
    attributes.size, attributes.runtime = ctypes.sizeof(attributes), SLICE
    done: int = _libc().syscall(change, 0, ctypes.byref(attributes), 0)
    return done == 0


def slice_of_thread() -> int | None:
    """Nanoseconds that the calling thread asks for, or the system's usual; ``None``: not known."""
    attributes = _attributes()
    return None if attributes is None else int(attributes.runtime)


def _attributes() -> _Attributes | None:
    _, ask = _calls()
    if ask is None:
        return None
    found = _Attributes()
    done = _libc().syscall(ask, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return found if done == 0 else None


def _calls() -> tuple[int, int] | tuple[None, None]:
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None, None
    return _CALLS.get(os.uname().machine, (None, None))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
