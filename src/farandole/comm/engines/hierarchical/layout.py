"""Which ranks share a host, and who carries what across hosts. Pure.

The ranks of a host are numbered by their *local rank*. A **lane** joins, over all hosts, the ranks
with one local rank; there are as many lanes as the smallest host has ranks, so every lane has a
rank on every host and no rank is in two. Those ranks are *carriers*: each carries the share of its
lane over the network, all lanes at once. On a larger host the other ranks carry nothing, which
costs nothing: the bytes that a host must send are the same however many of its ranks send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's view of the ranks on their hosts.

    Example::

        layout_of(3, ["a", "a", "a", "b"])    # hosts=((0, 1, 2), (3,)), one lane: ranks 0 and 3
    """

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, in rank order; the hosts in order of their first rank."""
    host: int
    """The index in ``hosts`` of this rank's."""
    local_rank: int

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this host, this one among them."""
        return self.hosts[self.host]

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return min(len(ranks) for ranks in self.hosts)

    @property
    def is_carrier(self) -> bool:
        """Whether this rank carries a lane: that of its local rank."""
        return self.local_rank < self.lanes

    @property
    def in_order(self) -> bool:
        """Whether the ranks host by host are the ranks in order."""
        flat = [rank for ranks in self.hosts for rank in ranks]
        return flat == list(range(len(flat)))

    def lane_slices(self, length: int) -> list[int]:
        """``length`` elements dealt to the lanes, as evenly as can be."""
        each, more = divmod(length, self.lanes)
        return [each + (lane < more) for lane in range(self.lanes)]

    def shares(self, length: int) -> list[int]:
        """``length`` elements dealt to the ranks of this host: to its carriers."""
        return [*self.lane_slices(length), *[0] * (len(self.neighbours) - self.lanes)]


def layout_of(rank: int, hosts: Sequence[str]) -> Layout:
    """How ranks sit on ``hosts`` (one identity a rank, any arrangement), seen from ``rank``."""
    ranks_on: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        ranks_on.setdefault(host, []).append(each)
    return Layout(
        hosts=tuple(map(tuple, ranks_on.values())),
        host=list(ranks_on).index(hosts[rank]),
        local_rank=ranks_on[hosts[rank]].index(rank),
    )
