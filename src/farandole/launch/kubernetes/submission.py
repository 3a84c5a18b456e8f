"""What is submitted: one job, with all that a renderer needs to know and nothing to look up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reading job files takes its time to import, and most commands read none
    from farandole.launch.spec import JobSpec

STORE_PORT = 29400
"""Where index 0 listens for the agents of the other pods."""
GRACE = 120.0
"""Seconds from SIGTERM to SIGKILL on a cluster, unless the job file says otherwise."""
START_TIMEOUT = 1800.0
"""Seconds until all nodes have come, unless the job file says otherwise: images have to be pulled
and nodes to be started."""

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that is to be created."""

    name: str
    namespace: str
    spec: JobSpec
    argv: tuple[str, ...]
    """The program and its arguments, as the pods are to run it."""
    archive: bytes
    """What travels to the pods: Farandole and, if asked for, the project."""
    key: str = field(repr=False)
    """The job's secret, in hexadecimal."""
    owner: str = ""
    """Who submitted it: shown in lists."""
    extra_env: Mapping[str, str] = field(default_factory=dict)
    """Variables from the command line, over those of the job file."""

    @property
    def grace(self) -> float:
        """Seconds that pods get to end."""
        return self.spec.grace if self.spec.grace is not None else GRACE

    @property
    def start_timeout(self) -> float:
        """Seconds until all nodes must have come."""
        return self.spec.start_timeout or START_TIMEOUT

    @property
    def env(self) -> dict[str, str]:
        """The variables that the user gave."""
        limit = self.spec.stall_timeout
        stall = {} if limit is None else {"FARANDOLE_STALL_TIMEOUT": f"{limit:g}"}
        return {**stall, **self.spec.env, **self.extra_env}
