"""What happens to a piece of an operation in each of its three stages.

*Up*: the ranks of a host settle what they can among themselves. *Across*: the carriers of each lane
exchange their shares with those of the other hosts, so a byte goes to a host once, whatever the
number of its ranks. *Down*: the ranks of a host share what came.

=============  ======================  ===========================  ==========================
operation      up                      across                       down
=============  ======================  ===========================  ==========================
allreduce      reduce-scatter          allreduce of the share       allgather of the shares
reducescatter  reduce-scatter          reduce-scatter of the share  allgather, keep one's own
allgather      allgather               allgather of the slices      allgather of the slices
broadcast      on the root's host      broadcast of the slices      allgather, on other hosts
=============  ======================  ===========================  ==========================

Every stage has an engine of its own, so the operations of one stage never wait for those of
another, and every engine meets the pieces in the order in which they were begun. A stage returns
the operation that it has begun, or ``None`` where this rank has nothing to do in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farandole.comm.codec import Exchange
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.comm.engines.hierarchical.layout import Layout
from farandole.comm.engines.hierarchical.table import Table


@dataclass(frozen=True, slots=True)
class Ways:
    """The engines of the stages, as far as this rank has part in them."""

    layout: Layout
    up: Engine | None
    """Between the ranks of this host; ``None`` where there is one only."""
    across: Engine | None
    """Between the carriers of this rank's lane, in the order of the hosts; ``None`` without."""
    down: Engine | None
    """As ``up``."""


class Piece(ABC):
    """A part of an operation, or the whole of one. Stages are called once each, in order."""

    @abstractmethod
    def up(self, ways: Ways) -> Work | None:
        """Begin the first stage."""

    @abstractmethod
    def across(self, ways: Ways) -> Work | None:
        """Begin the second stage; the first has ended."""

    @abstractmethod
    def down(self, ways: Ways) -> Work | None:
        """Begin the third stage; the second has ended."""

    def finish(self, ways: Ways) -> None:  # noqa: B027 (most pieces have nothing left to do)
        """Leave the result where it belongs; the third stage has ended."""


class ReducePiece(Piece):
    """A part of an allreduce, in place."""

    def __init__(self, buffer: torch.Tensor, reduction: Reduction) -> None:
        self._buffer = buffer
        self._reduction = reduction
        self._share = buffer

    def up(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.up is None:
            return None
        shares = self._shares(ways.layout)
        self._share = self._buffer.new_empty(shares[ways.layout.local_rank])
        return ways.up.reducescatter(self._share, self._buffer, shares, self._reduction)

    def across(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.across is None:
            return None
        return ways.across.allreduce(self._share, self._reduction)

    def down(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.down is None:
            return None
        return ways.down.allgather(self._buffer, self._share, self._shares(ways.layout))

    def _shares(self, layout: Layout) -> list[int]:
        return layout.shares(self._buffer.numel())


class EncodedPiece(ReducePiece):
    """A sum, in place, that goes across hosts in another form: a part of it by each lane."""

    def __init__(self, buffer: torch.Tensor, parts: Sequence[tuple[int, Exchange]]) -> None:
        super().__init__(buffer, Reduction.SUM)
        self._parts = parts

    def across(self, ways: Ways) -> Work | None:
        """See :class:`Piece`. Waits: what the exchange begins later comes before other pieces'."""
        if ways.across is not None:
            _, exchange = self._parts[ways.layout.local_rank]
            exchange.sum(self._share, ways.across).wait()
        return None

    def _shares(self, layout: Layout) -> list[int]:
        carried = [length for length, _ in self._parts]
        return [*carried, *[0] * (len(layout.neighbours) - layout.lanes)]


class ScatterPiece(Piece):
    """A reduce-scatter."""

    def __init__(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> None:
        self._output = output
        self._source = source
        self._counts = counts
        self._reduction = reduction

    def up(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        table = Table(ways.layout, self._counts)
        arranged = table.to_lanes(self._source)
        if ways.up is None:
            self._share = arranged
            return None
        self._share = arranged.new_empty(table.shares[ways.layout.local_rank])
        return ways.up.reducescatter(self._share, arranged, table.shares, self._reduction)

    def across(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.across is None:
            self._slice = self._share
            return None
        slices = Table(ways.layout, self._counts).lane(ways.layout.local_rank)
        self._slice = self._share.new_empty(slices[ways.layout.host])
        return ways.across.reducescatter(self._slice, self._share, slices, self._reduction)

    def down(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.down is None:
            self._block = self._slice
            return None
        length = sum(self._counts[rank] for rank in ways.layout.neighbours)
        self._block = self._slice.new_empty(length)
        return ways.down.allgather(self._block, self._slice, ways.layout.shares(length))

    def finish(self, ways: Ways) -> None:
        """See :class:`Piece`."""
        counts = [self._counts[rank] for rank in ways.layout.neighbours]
        self._output.copy_(self._block.split_with_sizes(counts)[ways.layout.local_rank])


class GatherPiece(Piece):
    """An allgather."""

    def __init__(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> None:
        self._output = output
        self._source = source
        self._counts = counts

    def up(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.up is None:
            self._block = self._source
            return None
        counts = [self._counts[rank] for rank in ways.layout.neighbours]
        self._block = self._source.new_empty(sum(counts))
        return ways.up.allgather(self._block, self._source, counts)

    def across(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.across is None:
            self._lane = self._block.new_empty(0)
            return None
        layout = ways.layout
        own = self._block.split_with_sizes(layout.lane_slices(self._block.numel()))
        slices = Table(layout, self._counts).lane(layout.local_rank)
        self._lane = self._block.new_empty(sum(slices))
        return ways.across.allgather(self._lane, own[layout.local_rank], slices)

    def down(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.down is None:
            self._whole = self._lane
            return None
        self._whole = self._lane.new_empty(self._output.numel())
        shares = Table(ways.layout, self._counts).shares
        return ways.down.allgather(self._whole, self._lane, shares)

    def finish(self, ways: Ways) -> None:
        """See :class:`Piece`."""
        Table(ways.layout, self._counts).from_lanes(self._whole, self._output)


class BroadcastPiece(Piece):
    """A part of a broadcast, in place."""

    def __init__(self, buffer: torch.Tensor, root: int) -> None:
        self._buffer = buffer
        self._root = root

    def up(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.up is None or not self._is_at_home(ways):
            return None
        return ways.up.broadcast(self._buffer, ways.layout.neighbours.index(self._root))

    def across(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        layout = ways.layout
        if ways.across is None:
            self._slice = self._buffer.new_empty(0)
            return None
        own = self._buffer.split_with_sizes(layout.lane_slices(self._buffer.numel()))
        self._slice = own[layout.local_rank]
        if ways.down is not None and not self._is_at_home(ways):
            self._slice = torch.empty_like(self._slice)  # it is gathered into the buffer later
        home = next(at for at, ranks in enumerate(layout.hosts) if self._root in ranks)
        return ways.across.broadcast(self._slice, home)

    def down(self, ways: Ways) -> Work | None:
        """See :class:`Piece`."""
        if ways.down is None or self._is_at_home(ways):
            return None
        shares = ways.layout.shares(self._buffer.numel())
        return ways.down.allgather(self._buffer, self._slice, shares)

    def _is_at_home(self, ways: Ways) -> bool:
        return self._root in ways.layout.neighbours
