"""From the ranks' order to that by lanes, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.engines.hierarchical.layout import layout_of
from farandole.comm.engines.hierarchical.table import Table


def test_a_lane_carries_a_slice_of_every_host() -> None:
    table = Table(layout_of(0, ["a", "b", "a", "b"]), [1, 2, 3, 4])
    #                 rank 0, rank 1, rank 2, rank 3; so host a has 0 3 4 5, b has 1 2 6 7 8 9
    assert table.to_lanes(torch.arange(10)).tolist() == [0, 3, 1, 2, 6, 4, 5, 7, 8, 9]
    assert table.shares == [5, 5]
    assert table.lane(1) == [2, 3]


@given(ranks=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=7))
def test_there_and_back_is_the_same(ranks: list[tuple[str, int]]) -> None:
    hosts, counts = zip(*ranks, strict=True)
    source = torch.arange(sum(counts))
    for rank in range(len(ranks)):
        table = Table(layout_of(rank, hosts), counts)
        arranged = table.to_lanes(source)
        assert sum(table.shares) == len(arranged) == len(source)
        output = torch.empty_like(source)
        table.from_lanes(arranged, output)
        assert torch.equal(output, source)
