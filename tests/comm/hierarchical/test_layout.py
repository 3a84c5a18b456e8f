"""Who carries what across hosts, for any arrangement of ranks on hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.engines.hierarchical.layout import layout_of

ARRANGEMENTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


def test_a_larger_host_has_ranks_that_carry_nothing() -> None:
    hosts = ["a", "b", "a", "a", "b"]
    layouts = [layout_of(rank, hosts) for rank in range(5)]
    assert layouts[0].hosts == ((0, 2, 3), (1, 4))
    assert [each.lanes for each in layouts] == [2] * 5
    assert [each.is_carrier for each in layouts] == [True, True, True, False, True]
    assert layouts[0].shares(7) == [4, 3, 0]
    assert layouts[1].shares(7) == [4, 3]


@given(hosts=ARRANGEMENTS)
def test_every_rank_sees_the_same_and_its_own_place(hosts: list[str]) -> None:
    layouts = [layout_of(rank, hosts) for rank in range(len(hosts))]
    assert len({layout.hosts for layout in layouts}) == 1
    for rank, layout in enumerate(layouts):
        assert layout.neighbours[layout.local_rank] == rank
        assert {hosts[each] for each in layout.neighbours} == {hosts[rank]}
    assert layouts[0].in_order == (
        [rank for ranks in layouts[0].hosts for rank in ranks] == list(range(len(hosts)))
    )


@given(hosts=ARRANGEMENTS)
def test_every_lane_has_one_carrier_on_every_host(hosts: list[str]) -> None:
    layouts = [layout_of(rank, hosts) for rank in range(len(hosts))]
    carriers = [(each.local_rank, each.host) for each in layouts if each.is_carrier]
    lanes, host_count = layouts[0].lanes, len(layouts[0].hosts)
    assert sorted(carriers) == [(lane, host) for lane in range(lanes) for host in range(host_count)]


@given(hosts=ARRANGEMENTS, length=st.integers(0, 1000))
def test_shares_cover_all_and_are_even(hosts: list[str], length: int) -> None:
    for rank in range(len(hosts)):
        layout = layout_of(rank, hosts)
        shares = layout.shares(length)
        assert len(shares) == len(layout.neighbours)
        assert sum(shares) == length
        assert max(shares[: layout.lanes]) - min(shares[: layout.lanes]) <= 1
        assert not any(shares[layout.lanes :])


@pytest.mark.parametrize("hosts", [["a"], ["a", "a"], ["a", "b"]])
def test_ranks_host_by_host_are_in_order(hosts: list[str]) -> None:
    assert layout_of(0, hosts).in_order
