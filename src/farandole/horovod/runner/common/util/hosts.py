"""Hosts, slots and which rank gets which, as Horovod's own tools put it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.core.errors import UsageError
from farandole.core.topology import topology_of
from farandole.launch import hosts as ours


@dataclass
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Read ``host:slots``."""
        return parse_hosts(host_string)[0]


@dataclass
class SlotInfo:
    """One rank's place."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Read ``host:slots,host:slots``; see ``farandole.launch.hosts`` for all that is understood."""
    return [HostInfo(host.name, host.slots) for host in ours.parse(hosts_string)]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Read ``host:slots,host:slots`` into names, and slots by name."""
    found = ours.parse(hosts)
    return [host.name for host in found], {host.name: host.slots for host in found}


def parse_host_files(filename: str) -> str:
    """Read a host file into the form ``host:slots,host:slots``."""
    return ",".join(map(str, ours.read_file(filename)))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Deal at most ``max_num_proc`` ranks to hosts, each filled before the next.

    ``UsageError`` when that makes fewer than ``min_num_proc``.
    """
    slots = sum(host.slots for host in hosts)
    size = slots if max_num_proc is None else min(slots, max_num_proc)
    if size < min_num_proc:
        raise UsageError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({size})."
        )
    shares = ours.assign([ours.Host(host.hostname, host.slots) for host in hosts], size)
    names = [share.host for share in shares for _ in share.ranks]
    places = [topology_of(rank, names) for rank in range(size)]
    return [
        SlotInfo(
            hostname=names[place.rank],
            rank=place.rank,
            local_rank=place.local_rank,
            cross_rank=place.cross_rank,
            size=place.size,
            local_size=place.local_size,
            cross_size=place.cross_size,
        )
        for place in places
    ]
