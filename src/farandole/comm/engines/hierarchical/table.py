"""Where the elements of each rank are when all are arranged by the lanes that carry them.

Each host's *block*, what its ranks have in their order, is cut into one *slice* a lane. *By lanes*
means: for each lane, for each host, its slice. So what a lane carries is in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.comm.engines.hierarchical.layout import Layout


class Table:
    """Where ``counts[r]`` elements of each rank r are, by lane and by host."""

    def __init__(self, layout: Layout, counts: Sequence[int]) -> None:
        self._layout = layout
        self._counts = counts
        blocks = [sum(counts[rank] for rank in ranks) for ranks in layout.hosts]
        self._slices = [layout.lane_slices(block) for block in blocks]

    def lane(self, lane: int) -> list[int]:
        """The lengths of the hosts' slices for ``lane``."""
        return [slices[lane] for slices in self._slices]

    @property
    def shares(self) -> list[int]:
        """What the ranks of this host carry: the slices of all hosts for their lane."""
        carried = [sum(self.lane(lane)) for lane in range(self._layout.lanes)]
        return [*carried, *[0] * (len(self._layout.neighbours) - self._layout.lanes)]

    def to_lanes(self, source: torch.Tensor) -> torch.Tensor:
        """From the ranks' order to that by lanes."""
        slices = self._host_slices(self._by_host(source))
        return torch.cat([slices[host][lane] for lane, host in self._places()])

    def from_lanes(self, whole: torch.Tensor, output: torch.Tensor) -> None:
        """From the order by lanes to that of the ranks."""
        by_host = output if self._layout.in_order else torch.empty_like(output)
        slices = self._host_slices(by_host)
        lengths = [self._slices[host][lane] for lane, host in self._places()]
        for (lane, host), part in zip(self._places(), whole.split_with_sizes(lengths), strict=True):
            slices[host][lane].copy_(part)
        if by_host is not output:
            places = output.split_with_sizes(list(self._counts))
            ranks = [rank for ranks in self._layout.hosts for rank in ranks]
            parts = by_host.split_with_sizes([self._counts[rank] for rank in ranks])
            for rank, part in zip(ranks, parts, strict=True):
                places[rank].copy_(part)

    def _places(self) -> list[tuple[int, int]]:
        hosts = range(len(self._layout.hosts))
        return [(lane, host) for lane in range(self._layout.lanes) for host in hosts]

    def _by_host(self, source: torch.Tensor) -> torch.Tensor:
        if self._layout.in_order:
            return source
        pieces = source.split_with_sizes(list(self._counts))
        return torch.cat([pieces[rank] for ranks in self._layout.hosts for rank in ranks])

    def _host_slices(self, by_host: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        blocks = by_host.split_with_sizes([sum(slices) for slices in self._slices])
        return [
            block.split_with_sizes(slices)
            for block, slices in zip(blocks, self._slices, strict=True)
        ]
