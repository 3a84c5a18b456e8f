"""Process relations that Linux keeps for us: who dies with whom, who inherits orphans."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Let the kernel SIGKILL this process when process ``parent``, its parent now, dies.

    The bond is to the parent's thread that made this process, so parents here have one thread.
    It holds across ``exec``. When the parent is gone already, this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies: none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(ancestor: int) -> dict[int, str]:
    """All living descendants of a process: pid → command line, for finding what is left."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            state, parent = _state_and_parent(int(entry))
            if state not in ("", "Z", "X"):
                parents[int(entry)] = parent
    found: dict[int, str] = {}
    for pid in parents:
        above = pid
        while above in parents and above != ancestor:
            above = parents[above]
        if above == ancestor != pid:
            found[pid] = _command_line(pid)
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold blanks and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0
    return fields[0].decode("ascii"), int(fields[1])


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
