from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.errors import UsageError
from farandole.core.topology import host_identity, topology_of

hosts_strategy = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


def test_one_host() -> None:
    topology = topology_of(1, ["a", "a", "a"])
    assert (topology.rank, topology.size) == (1, 3)
    assert (topology.local_rank, topology.local_size) == (1, 3)
    assert (topology.cross_rank, topology.cross_size) == (0, 1)
    assert topology.hosts == ("a", "a", "a")


def test_uneven_hosts_as_horovod_counts_them() -> None:
    # Three ranks on a, one on b, two on c.
    hosts = ["a", "a", "a", "b", "c", "c"]
    found = [topology_of(rank, hosts) for rank in range(6)]
    assert [each.local_rank for each in found] == [0, 1, 2, 0, 0, 1]
    assert [each.local_size for each in found] == [3, 3, 3, 1, 2, 2]
    assert [each.cross_rank for each in found] == [0, 0, 0, 1, 2, 1]
    assert [each.cross_size for each in found] == [3, 2, 1, 3, 3, 2]


def test_interleaved_hosts() -> None:
    found = [topology_of(rank, ["b", "a", "b", "a"]) for rank in range(4)]
    assert [each.local_rank for each in found] == [0, 0, 1, 1]
    assert [each.cross_rank for each in found] == [0, 1, 0, 1]


@given(hosts_strategy)
def test_local_and_cross_ranks_number_the_ranks_of_each_host_and_row(hosts: list[str]) -> None:
    found = [topology_of(rank, hosts) for rank in range(len(hosts))]
    for host in set(hosts):
        here = [each for each in found if hosts[each.rank] == host]
        assert [each.local_rank for each in here] == list(range(len(here)))
        assert {each.local_size for each in here} == {len(here)}
    for local_rank in {each.local_rank for each in found}:
        row = [each for each in found if each.local_rank == local_rank]
        assert sorted(each.cross_rank for each in row) == list(range(len(row)))
        assert {each.cross_size for each in row} == {len(row)}


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="from 0 to 1"):
        topology_of(rank, ["a", "a"])


def test_processes_of_this_machine_have_one_identity() -> None:
    code = "from farandole.core.topology import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_identity() != ""
