"""What is to be run, resolved: plain data that the job loop and the agents understand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from farandole.launch.hosts import Share

GRACE = 30.0
"""Seconds that workers get to end after the user's signal, unless the user says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What every worker runs."""

    form: str
    """``script``: a Python file; ``module``: ``python -m``; ``command``: anything else."""
    argv: tuple[str, ...]
    """The file, module or command, then its arguments."""

    def __str__(self) -> str:
        how = {"script": "python ", "module": "python -m ", "command": ""}[self.form]
        return how + " ".join(self.argv)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A job."""

    program: Program
    size: int
    """Number of ranks."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers, besides those of the launcher's own environment."""
    fork: bool = True
    """Whether workers may be forked from a process that has torch imported."""
    output_dir: str | None = None
    """Folder for one file a rank with all that it wrote; ``None``: no files."""
    hosts: tuple[Share, ...] = ()
    """Which host runs which ranks, where not all are of this one."""
    remote_python: str = sys.executable
    """The Python of the other hosts: a path there, or a name on the PATH that a login has there."""
    ssh: tuple[str, ...] = ("ssh",)
    """The ssh to use, with its options."""
    start_timeout: float = 120.0
    """Seconds from the first rank's ``init()`` until every rank must have called it."""
    grace: float = GRACE
    """Seconds that workers get to end after the user's signal."""
    verbose: bool = False
    """Whether to tell how the workers were started."""
