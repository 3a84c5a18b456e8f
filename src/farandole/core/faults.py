"""Faults to order: which rank dies or freezes at which step, to try what a job survives. Pure.

Written ``kill:rank=1@step=30,stop:rank=2@step=50``: faults between commas, each a kind (``kill``:
SIGKILL; ``stop``: SIGSTOP; ``exit``: exit code 1), a rank, and the step of that process after which
it happens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from farandole.core.errors import UsageError

KINDS = ("kill", "stop", "exit")

_FAULT = re.compile(r"(\w+):rank=(\d+)@step=(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a rank, once in a job."""

    kind: str
    """One of :data:`KINDS`."""
    rank: int
    step: int
    """When the process that is this rank has finished so many steps of an optimizer, from 1."""

    def __str__(self) -> str:
        return f"{self.kind}:rank={self.rank}@step={self.step}"


def parse(text: str) -> tuple[Fault, ...]:
    """Read faults; ``UsageError`` names what cannot be read.

    Example::

        parse("kill:rank=1@step=30")   # (Fault("kill", rank=1, step=30),)
    """
    faults = []
    for part in text.split(","):
        match = _FAULT.fullmatch(part.strip())
        if match is None or match[1] not in KINDS or int(match[3]) < 1:
            raise UsageError(
                f"The fault {part.strip()!r} is not understood. Write it as "
                f"kill:rank=1@step=30, with {', '.join(KINDS)}, and steps from 1."
            )
        faults.append(Fault(match[1], int(match[2]), int(match[3])))
    return tuple(faults)
