"""Which failure was the first, and how it is told. Pure.

The root cause is the first failure in time. A worker's uncaught exception counts from the moment
when it was raised, not from when Python has ended; and a worker that ended because another one was
lost (its exception is ``PeerLost`` or ``ShutDownError``) is a victim: it is the cause only when
there is no other.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from farandole.core.errors import describe_ranks

_VICTIM = re.compile(rb"^(?:farandole\.core\.errors\.)?(?:PeerLost|ShutDownError)\b")
_STACKS = ("Traceback (", "Fatal Python error")
_OURS = re.compile(r'  File ".*/farandole/launch/(?:worker|prefork)\.py"|Extension modules: ')
"""Lines of a fault's stack that are not of the user's program."""

_MOST_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank did not do its part."""

    rank: int
    at: float
    """When, on the launcher's clock."""
    code: int | None = None
    """How its process ended: exit code, or the negative signal; ``None``: it still runs."""
    reason: str = ""
    """What it did, where that is more than its code says; completes "rank 3 …"."""
    victim: bool = False
    """Whether it ended because of another rank."""
    details: Sequence[str] = field(default=())
    """Its own traceback, or the last lines of its standard error."""

    @property
    def exit_code(self) -> int:
        """What the launcher ends with: the rank's code, 128 + n for signal n."""
        if self.code is None or self.code == 0:
            return 1
        return self.code if self.code > 0 else 128 - self.code


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to show, of at least one."""
    return min(failures, key=lambda failure: (failure.victim, failure.at))


def looks_like_victim(stderr: bytes) -> bool:
    """Whether a Python that reports nothing else ended because of another rank."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    return bool(lines) and any(_VICTIM.match(line) for line in lines[-12:])


def last_words(stderr: bytes) -> list[str]:
    """The last traceback in what a rank wrote to standard error, else its last lines."""
    text = stderr.decode("utf-8", "replace").rstrip("\r\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
    starts = [n for n, line in enumerate(lines) if line.startswith(_STACKS)]
    words = lines[starts[-1] :] if starts else lines[-10:]
    own = "\n".join(line for line in words if not _OURS.match(line))
    return shortened(own.strip("\n").splitlines())


def shortened(lines: Sequence[str]) -> list[str]:
    """The beginning and the end of a long traceback."""
    if len(lines) <= _MOST_LINES:
        return list(lines)
    half = _MOST_LINES // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"  … {left_out} lines left out …", *lines[-half:]]


def describe(
    cause: Failure,
    others: Mapping[str, Sequence[int]],
    *,
    killed_for_memory: int,
    named: Callable[[Sequence[int]], str] = describe_ranks,
) -> str:
    """The message at the end of a failed job, several lines.

    ``others`` says what became of the other ranks, e.g. ``{"stopped": [0, 2]}``; ``named`` what
    ranks are called.
    """
    what = cause.reason or by_code(cause.code)
    who = named([cause.rank])
    head = f"{who} {what}"
    rest = "; ".join(f"{fate}: {named(ranks)}" for fate, ranks in others.items() if ranks)
    lines = [f"farandole: {head}{f' ({rest})' if rest else ''}."]
    if cause.code == -signal.SIGKILL:
        lines.append(
            f"  The kernel killed {killed_for_memory} process(es) of this container because its "
            "memory was used up."
            if killed_for_memory
            else "  If nobody sent it, the kernel may have, for want of memory: see `dmesg`."
        )
    if cause.details:
        lines.append(f"  What {who} said last:")
        lines += [f"    {line}" for line in cause.details]
    return "\n".join(lines)


def by_code(code: int | None) -> str:
    """How a process ended, by its exit code; negative for a signal."""
    if code is None:
        return "failed"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-code}{name}"
