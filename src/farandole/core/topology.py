"""Where the ranks sit: ranks, the hosts they share, and the neighbours across hosts.

Horovod's terms. The ranks of one host are *local* to each other. The ranks that have the same
local rank on their hosts are *across* from each other.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.core.assigned import Assigned, assigned
from farandole.core.errors import UsageError
from farandole.core.placement import Placement, find_placement

__all__ = [
    "Assigned",
    "Placement",
    "Topology",
    "assigned",
    "find_placement",
    "host_identity",
    "topology_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One rank's view of the whole. ``hosts[r]`` is the identity of the host of rank r."""

    rank: int
    size: int
    local_rank: int
    """Place among the ranks of this host, counted in rank order."""
    local_size: int
    cross_rank: int
    """Place among the hosts that have a rank with this local rank, in order of their first."""
    cross_size: int
    hosts: tuple[str, ...]


def topology_of(rank: int, hosts: Sequence[str]) -> Topology:
    """What ``rank`` is among ranks that sit on ``hosts`` (one identity a rank, any arrangement).

    Example::

        topology_of(2, ["a", "a", "b"])   # local_rank=0, local_size=1, cross_rank=1, cross_size=2
    """
    if not 0 <= rank < len(hosts):
        raise UsageError(f"rank must be from 0 to {len(hosts) - 1}, got {rank}.")
    ranks_on: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        ranks_on.setdefault(host, []).append(each)
    here = hosts[rank]
    local_rank = ranks_on[here].index(rank)
    across = [host for host, ranks in ranks_on.items() if len(ranks) > local_rank]
    return Topology(
        rank=rank,
        size=len(hosts),
        local_rank=local_rank,
        local_size=len(ranks_on[here]),
        cross_rank=across.index(here),
        cross_size=len(across),
        hosts=tuple(hosts),
    )


def host_identity() -> str:
    """Text that processes share exactly when one's loopback reaches the other.

    Containers of one machine have the same kernel but, unless told otherwise, each its own
    network: they count as different hosts.
    """
    return "/".join((platform.node(), _boot(), _network()))


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def _network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
