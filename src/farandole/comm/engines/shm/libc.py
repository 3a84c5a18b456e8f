"""The few functions of the C library that shared memory needs and Python does not offer.

Two ways to call it: with the GIL held, for what returns at once (releasing the GIL invites another
thread to take it, and getting it back can last milliseconds), and without, for what may block.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

_holding = ctypes.PyDLL(None, use_errno=True)
_releasing = ctypes.CDLL(None, use_errno=True)

CLOCK_MONOTONIC = 1
_MADV_REMOVE = 9
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_TFD_CLOEXEC = os.O_CLOEXEC


class TimeSpec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> TimeSpec:
        """``seconds`` as the C library writes them."""
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", TimeSpec), ("value", TimeSpec))


_missing: list[str] = []


def require() -> None:
    """Raise ``OSError`` if the C library lacks any of these functions (glibc before 2.30 does)."""
    if _missing:
        raise OSError(errno.ENOSYS, f"the C library has no {', '.join(_missing)}")


def _bind(
    library: ctypes.CDLL, name: str, *arguments: type, result: type = ctypes.c_int
) -> Callable[..., int]:
    function = getattr(library, name, None)
    if function is None:
        _missing.append(name)
        return lambda *_: errno.ENOSYS
    function.argtypes = arguments
    function.restype = result
    return function  # type: ignore[no-any-return]


_pointer, _int, _long, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_size_t

sem_init = _bind(_holding, "sem_init", _pointer, _int, ctypes.c_uint)
sem_post = _bind(_holding, "sem_post", _pointer)
sem_trywait = _bind(_holding, "sem_trywait", _pointer)
sem_clockwait = _bind(_releasing, "sem_clockwait", _pointer, _int, _pointer)
sched_yield = _bind(_holding, "sched_yield")

_mmap = _bind(_holding, "mmap", _pointer, _size, _int, _int, _int, _long, result=_pointer)
_munmap = _bind(_holding, "munmap", _pointer, _size)
_madvise = _bind(_holding, "madvise", _pointer, _size, _int)
_timerfd_create = _bind(_holding, "timerfd_create", _int, _int)
_timerfd_settime = _bind(_holding, "timerfd_settime", _int, _int, _pointer, _pointer)


def _fail(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what} failed: {os.strerror(number)}")


def map_shared(descriptor: int, length: int) -> int:
    """Map ``length`` bytes of ``descriptor`` for reading and writing; the address."""
    flags = mmap.MAP_SHARED | _MAP_NORESERVE
    address = _mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _fail(f"mmap of {length} bytes")
    return address


def map_private_over(address: int, descriptor: int, length: int) -> None:
    """Replace a shared mapping by one whose changes stay in this process."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
        raise _fail(f"mmap of {length} bytes")


def unmap(address: int, length: int) -> None:
    """Undo :func:`map_shared`."""
    if _munmap(address, length) != 0:
        raise _fail("munmap")


def give_back(address: int, length: int) -> None:
    """Return the memory of whole pages to the system; the pages read as zeros again."""
    if _madvise(address, length, _MADV_REMOVE) != 0:
        raise _fail("madvise")


def new_timer() -> int:
    """The descriptor of a timer: reading it blocks until the timer has expired."""
    descriptor = _timerfd_create(CLOCK_MONOTONIC, _TFD_CLOEXEC)
    if descriptor < 0:
        raise _fail("timerfd_create")
    return descriptor


def set_timer(descriptor: int, seconds: float) -> None:
    """Let the timer expire once, ``seconds`` from now."""
    value = _TimerSpec(value=TimeSpec.of(seconds))
    if _timerfd_settime(descriptor, 0, ctypes.byref(value), None) != 0:
        raise _fail("timerfd_settime")


def address_of(value: ctypes.Structure) -> int:
    """Where ``value`` lies; it must be kept alive meanwhile."""
    return ctypes.addressof(value)
