"""What is to be run, resolved: plain data that the job loop and the agents understand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from farandole.core import route
from farandole.core.secret import Secret
from farandole.elastic.policy import Policy
from farandole.launch.discovery import Discovery
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
class Elastic:
    """A job whose ranks may change."""

    policy: Policy
    discovery: Discovery
    """Where the hosts, and their slots, are looked up."""
    first: Mapping[str, int]
    """The hosts to begin with, and their slots."""

    @property
    def elsewhere(self) -> bool:
        """Whether ranks may run on other machines: if not, nothing listens to the network.

        Where hosts are looked up again, any machine may come.
        """
        return self.discovery.changes or not all(route.is_own(host) for host in self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the agents of the other hosts come by themselves, instead of being fetched over ssh."""

    address: str
    """Of this host."""
    port: int
    """Where the agents come to. The ranks' store is at the next one."""
    secret: Secret
    """By which they know each other, and the ranks too."""
    patience: float
    """Seconds until all must have come."""
    time_limit: float | None = None
    """Seconds after which the ranks are told to save and end."""
    replaces: bool = False
    """Whether an earlier process led this job, and is lost."""


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
    elastic: Elastic | None = None
    """What may change while the job runs; ``None``: nothing."""
    meeting: Meeting | None = None
    """Where the agents of ``hosts`` come; this host is the first of them."""
