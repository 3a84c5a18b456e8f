"""Hosts as people write them, and the ranks that each one gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.errors import UsageError
from farandole.launch.hosts import Host, assign, parse, read_file

LINES = st.lists(
    st.builds(Host, st.sampled_from(["a", "b.c", "fe80::1", "10.0.0.1"]), st.integers(1, 9))
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:2", [("a", 2), ("b", 2)]),
        ("a", [("a", 1)]),
        (" a:2 , b ,", [("a", 2), ("b", 1)]),
        ("a:2,b:1,a:3", [("a", 5), ("b", 1)]),
        ("Node:1,node:1", [("Node", 2)]),
        ("10.0.0.1:4,ann@node-1.cluster:2", [("10.0.0.1", 4), ("ann@node-1.cluster", 2)]),
        ("[fe80::1%eth0]:2,[::1]", [("fe80::1%eth0", 2), ("::1", 1)]),
    ],
)
def test_the_command_line_names_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert [(host.name, host.slots) for host in parse(text)] == hosts


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "names no host"),
        (",", "names no host"),
        ("a:0", "'a:0'.*from 1 to"),
        ("a:", "'a:'.*from 1 to"),
        ("a:two", "'a:two'.*'two'"),
        ("a:2:3", "'a:2:3'"),
        ("a:-1", "'-1'"),
        ("a:99999999999999", "from 1 to"),
        ("a:\u0663", "from 1 to"),
        (":2", "':2'.*host's name"),
        ("-oProxyCommand=x:2", "host's name"),
        ("-l@a", "host's name"),
        ("a b:2", "host's name"),
        ("::1", "brackets"),
        ("[::1:2", "not an IPv6 address"),
        ("[node]:2", "not an IPv6 address"),
        ("[::1]2", "not an IPv6 address"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        parse(f"good:1,{text}" if text.strip(",") else text)


FILE = """
# our cluster
node1 slots=4
node2 slots=2 max_slots=8   # the old one

node3:2
\tnode4
node1\tslots=1
fe80::1%eth0 slots=2
[::1]:3
node5 max-slots=3
"""


def test_a_host_file_of_either_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(FILE)
    assert [(host.name, host.slots) for host in read_file(str(path))] == [
        ("node1", 5),
        ("node2", 2),
        ("node3", 2),
        ("node4", 1),
        ("fe80::1%eth0", 2),
        ("::1", 3),
        ("node5", 3),
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a slots=4\nb slots=x\n", "line 2: 'slots=x'"),
        ("a slots\n", "line 1: 'slots' is not understood"),
        ("a cpus=4\n", "line 1: 'cpus=4' is not understood"),
        ("a slots=4 max_slots=2\n", "slots=4 is more than max_slots=2"),
        ("a:2 slots=4\n", "both 2 and 4"),
        ("a slots=1 slots=2\n", "both 1 and 2"),
        ("slots=4\n", "line 1: 'slots=4'"),
    ],
)
def test_a_host_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=wrong) as caught:
        read_file(str(path))
    assert str(path) in caught.value.message


def test_a_host_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere cannot be read: No such file"):
        read_file(str(tmp_path / "nowhere"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not text"):
        read_file(str(tmp_path / "binary"))


@given(LINES.filter(bool))
def test_hosts_that_were_read_read_the_same_again(hosts: list[Host]) -> None:
    once = parse(",".join(map(str, hosts)))
    assert parse(",".join(map(str, once))) == once
    assert sum(host.slots for host in once) == sum(host.slots for host in hosts)


@given(LINES.filter(bool), st.data())
def test_ranks_fill_one_host_after_the_other(hosts: list[Host], data: st.DataObject) -> None:
    hosts = list(parse(",".join(map(str, hosts))))
    slots = sum(host.slots for host in hosts)
    size = data.draw(st.one_of(st.none(), st.integers(1, slots)))
    shares = assign(hosts, size)
    assert [rank for share in shares for rank in share.ranks] == list(range(size or slots))
    assert [share.host for share in shares] == [host.name for host in hosts[: len(shares)]]
    for share, host in list(zip(shares, hosts, strict=False))[:-1]:
        assert len(share.ranks) == host.slots
    assert all(len(s.ranks) <= h.slots for s, h in zip(shares, hosts, strict=False))


def test_more_ranks_than_slots() -> None:
    with pytest.raises(
        UsageError, match=r"5 ranks are wanted and the hosts have 4 slots: a:2, b:2"
    ):
        assign(parse("a:2,b:2"), 5)
