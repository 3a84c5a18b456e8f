"""Frames, errors and gathers: the pure parts below the hub."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.control import message
from farandole.comm.control.gathers import MAX_ANSWER, Gathers
from farandole.comm.control.position import SHOWN_DETAILS, Position
from farandole.core import errors

texts = st.text(max_size=20)
positions = st.builds(
    Position,
    path=texts,
    group=texts,
    sequence=st.integers(0, 2**40),
    what=texts,
    detail=st.lists(texts, max_size=9).map(tuple),
    plan=texts,
    members=st.lists(st.integers(0, 99), max_size=5).map(tuple),
)


@given(st.lists(st.binary(max_size=50), max_size=4), st.dictionaries(texts, st.integers()))
def test_a_frame_is_read_as_it_was_written(payloads: list[bytes], data: dict[str, int]) -> None:
    read = message.unpack(message.pack("gather", payloads, request=3, data=data))
    assert read.kind == "gather"
    assert read.integer("request") == 3
    assert read.fields["data"] == data
    assert list(read.payloads) == payloads


@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda t: t.encode() + b"\n")))
def test_garbage_is_a_value_error_and_nothing_else(frame: bytes) -> None:
    with contextlib.suppress(ValueError):
        message.unpack(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{}\n",
        b'{"kind": "where"}',
        b'{"kind": 3}\n',
        b'{"kind": "gather", "sizes": [5]}\nabc',
        b'{"kind": "gather", "sizes": [-1, 4]}\nabc',
        b'{"kind": "gather", "sizes": "3"}\nabc',
        b"[" * 100_000 + b"\n",
        b'{"kind": "where", "waited": NaN}\n',
    ],
)
def test_what_is_no_frame(frame: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of them
        message.unpack(frame)


@given(positions)
def test_a_position_survives_but_for_its_length(position: Position) -> None:
    read = Position.from_json(position.to_json())
    assert read.describe() == position.describe()
    assert len(read.detail) <= SHOWN_DETAILS + 1
    assert (read.channel, read.sequence, read.plan) == (
        position.channel,
        position.sequence,
        position.plan,
    )


@pytest.mark.parametrize(
    "kind", [errors.PeerLost, errors.MismatchError, errors.StallError, errors.DeadlineError]
)
def test_an_error_arrives_as_itself(kind: type[errors.FarandoleError]) -> None:
    read = message.unpack_error(message.pack_error(kind("what happened", ranks=[2, 5])))
    assert type(read) is kind
    assert (read.message, read.ranks) == ("what happened", (2, 5))


def test_an_error_of_a_class_that_is_not_ours_becomes_a_collective_error() -> None:
    data = {"class": "SystemExit", "message": "m", "ranks": []}
    assert type(message.unpack_error(data)) is errors.CollectiveError


@given(st.permutations(range(4)), st.lists(st.binary(max_size=3), min_size=4, max_size=4))
def test_a_gather_ends_with_its_last_member_whoever_that_is(
    order: list[int], payloads: list[bytes]
) -> None:
    gathers = Gathers()
    key = ("t", (2, 0, 3, 1))
    for rank in order[:-1]:
        assert gathers.contribute(rank, 10 + rank, key, payloads[rank], "it") == []
    answers = gathers.contribute(order[-1], 10 + order[-1], key, payloads[order[-1]], "it")
    assert {answer.rank: answer.request for answer in answers} == {r: 10 + r for r in range(4)}
    for answer in answers:
        parts = [answer.payloads[index] for index in answer.which]
        assert parts == [payloads[rank] for rank in key[1]]
        assert len(answer.payloads) == len(set(payloads)), "identical payloads travel once"
    assert gathers.arrived() == {}


def test_groups_with_the_same_topic_do_not_meet() -> None:
    gathers = Gathers()
    assert gathers.contribute(0, 1, ("t", (0, 1)), b"", "it") == []
    assert gathers.contribute(2, 1, ("t", (2, 3)), b"", "it") == []
    assert len(gathers.contribute(1, 1, ("t", (0, 1)), b"", "it")) == 2
    assert gathers.without(3) == {2: "it"}
    assert gathers.without(0) == {}


def test_what_cannot_be_gathered_is_refused() -> None:
    gathers = Gathers()
    (stranger,) = gathers.contribute(5, 1, ("t", (0, 1)), b"", "it")
    assert "no member" in stranger.refusal
    assert gathers.contribute(0, 1, ("t", (0, 1)), b"", "it") == []
    (again,) = gathers.contribute(0, 2, ("t", (0, 1)), b"", "it")
    assert "twice" in again.refusal
    half = b"a" * (MAX_ANSWER // 2 + 1)
    assert gathers.contribute(0, 3, ("large", (0, 1)), half, "it") == []
    answers = gathers.contribute(1, 3, ("large", (0, 1)), half[:-1] + b"b", "it")
    assert all("bytes together" in answer.refusal for answer in answers)
