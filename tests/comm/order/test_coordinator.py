"""What all ranks are ready for: any order, any delay, changed headers, a full cache, joins."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.control import message
from farandole.comm.header import Header
from farandole.comm.order import wire
from farandole.comm.order.coordinator import Coordinator
from farandole.comm.order.memory import Memory
from farandole.comm.order.wire import Agreed, Flush, Joined, Known, Part, Refused, Verdict


def header(name: str | None, rows: int = 1, operation: str = "allreduce") -> Header:
    return Header(operation=operation, name=name, dtypes=("float32",), shapes=((rows, 2),))


class Rank:
    """One rank without its threads: what it sends and receives waits in queues."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.members = tuple(range(size))
        self.memory = Memory(number)
        self.sent: deque[tuple[list[Part], bool]] = deque()
        self.coming: deque[Verdict] = deque()
        self.waiting: dict[str, Header] = {}
        self.done: list[tuple[str, tuple[Header, ...] | None]] = []
        self.flushes = 0

    def submit(self, *headers: Header, joins: bool = False) -> None:
        part = Part("0", self.members, self.memory.generation)
        for each in headers:
            key = wire.key_of(each, 0)
            self.waiting[key] = each
            self.memory.describe(part, key, each)
        self.sent.append(([part], joins))

    def take_in(self) -> None:
        verdict = self.coming.popleft()
        if isinstance(verdict, Known):
            for number in wire.numbers_in(verdict.bits):
                entry = self.memory.recall(number)
                self.finish(entry.key, entry.headers)
        elif isinstance(verdict, Agreed):
            self.finish(verdict.key, self.memory.learn(verdict))
        elif isinstance(verdict, Refused):
            self.finish(verdict.key, None)
        elif isinstance(verdict, Flush):
            self.memory.begin_anew()
            self.flushes += 1

    def finish(self, key: str, headers: tuple[Header, ...] | None) -> None:
        mine = self.waiting.pop(key)
        assert headers is None or headers[self.number] == mine
        self.done.append((key, headers))


class Job:
    """A coordinator and its ranks."""

    def __init__(self, size: int, capacity: int = wire.CAPACITY) -> None:
        self.ranks = [Rank(number, size) for number in range(size)]
        self.coordinator = Coordinator(size, capacity)

    def deliver(self, number: int) -> None:
        parts, joins = self.ranks[number].sent.popleft()
        for members, verdict in self.coordinator.submit(number, parts, joins=joins):
            for member in members:
                self.ranks[member].coming.append(verdict)

    def settle(self) -> None:
        for rank in self.ranks:
            while rank.sent:
                self.deliver(rank.number)
        for rank in self.ranks:
            while rank.coming:
                rank.take_in()


def over_the_wire(parts: list[Part]) -> list[Part]:
    payloads, fields = wire.pack_parts(parts, joins=False)
    return wire.read_parts(message.unpack(message.pack("order", payloads, **fields)))


@settings(deadline=None, max_examples=200)
@given(size=st.integers(2, 4), rounds=st.integers(1, 5), seed=st.integers(0, 1 << 32))
def test_every_rank_learns_the_same_in_the_same_order_however_messages_cross(size, rounds, seed):
    random = Random(seed)
    job = Job(size, capacity=3)
    names = [f"t{i}" for i in range(5)]
    expected: list[tuple[str, bool]] = []
    todo: list[deque[Header]] = [deque() for _ in job.ranks]
    for _ in range(rounds):
        chosen = random.sample(names, random.randint(1, len(names)))
        wrong = {name for name in chosen if random.random() < 0.2}
        rows = random.randint(1, 2)
        for rank, queue in zip(job.ranks, todo, strict=True):
            for name in random.sample(chosen, len(chosen)):
                odd = 10 if name in wrong and rank.number == size - 1 else 0
                queue.append(header(name, rows + odd))
        expected.extend((f"allreduce.{name}", name not in wrong) for name in chosen)

    def submit_from(rank: Rank) -> None:
        queue = todo[rank.number]
        batch = []
        while queue and wire.key_of(queue[0], 0) not in rank.waiting and len(batch) < 3:
            batch.append(queue.popleft())
            rank.waiting[wire.key_of(batch[-1], 0)] = batch[-1]
        if batch:
            rank.submit(*batch)

    while any(todo) or any(rank.sent or rank.coming for rank in job.ranks):
        rank = random.choice(job.ranks)
        step = random.choice(["submit", "deliver", "take"])
        if step == "submit":
            submit_from(rank)
        elif step == "deliver" and rank.sent:
            job.deliver(rank.number)
        elif step == "take" and rank.coming:
            rank.take_in()
        elif not any(each.sent or each.coming for each in job.ranks):
            for each in job.ranks:
                submit_from(each)
    first = job.ranks[0]
    for rank in job.ranks:
        assert [(key, headers is not None) for key, headers in rank.done] == [
            (key, headers is not None) for key, headers in first.done
        ]
        assert not rank.waiting
    assert sorted((key, headers is not None) for key, headers in first.done) == sorted(expected)
    assert not job.coordinator.arrived()


def test_a_known_request_travels_as_a_bit():
    job = Job(2)
    for _ in range(3):
        for rank in job.ranks:
            rank.submit(header("a"), header("b"))
        parts = job.ranks[0].sent[0][0]
        assert over_the_wire(parts) == parts
        job.settle()
    assert parts[0].bits == 0b11
    assert parts[0].new == []
    assert [key for key, _ in job.ranks[1].done] == ["allreduce.a", "allreduce.b"] * 3


def test_a_full_cache_begins_anew_and_old_numbers_are_understood():
    job = Job(2, capacity=2)
    for name in "ab":
        for rank in job.ranks:
            rank.submit(header(name))
        job.settle()
    for rank in job.ranks:
        rank.submit(header("a"), header("c"))
    job.ranks[1].submit(header("b"))
    job.deliver(0)
    job.deliver(1)  # "c" does not fit any more
    job.deliver(1)  # still in numbers of before
    job.settle()
    job.ranks[0].submit(header("b"))
    job.settle()
    assert [rank.flushes for rank in job.ranks] == [1, 1]
    assert [key for key, _ in job.ranks[0].done][-1] == "allreduce.b"
    assert not job.ranks[1].waiting


def test_headers_that_may_differ_are_told_to_all():
    job = Job(2)
    for _ in range(2):
        for rank in job.ranks:
            rank.submit(header("x", 1 + rank.number, "allgather"))
        job.settle()
    for rank in job.ranks:
        for _, headers in rank.done:
            assert headers is not None
            assert [each.shapes[0][0] for each in headers] == [1, 2]


def test_one_rank_with_another_header_changes_it_for_all():
    job = Job(3)
    for rows in (1, 1):
        for rank in job.ranks:
            rank.submit(header("x", rows))
        job.settle()
    for rank in job.ranks:
        rank.submit(header("x", 2 if rank.number == 1 else 1))
    job.settle()
    assert [rank.done[-1] for rank in job.ranks] == [("allreduce.x", None)] * 3
    for rank in job.ranks:
        rank.submit(header("x", 1))
    job.settle()
    assert job.ranks[2].done[-1][1] is not None


def test_joined_ranks_are_counted_as_there_for_allreduce_alone():
    job = Job(3)
    for rank in job.ranks:
        rank.submit(header("known"), header("rows", operation="allgather"))
    job.settle()
    job.ranks[1].submit(joins=True)
    for number in (0, 2):
        job.ranks[number].submit(
            header("known"), header("new"), header("rows", operation="allgather")
        )
    for number in (1, 0, 2):
        job.deliver(number)
    told = list(job.ranks[0].coming)
    assert list(job.ranks[1].coming) == told
    agreed = {each.key: each for each in told if isinstance(each, Agreed)}
    assert agreed["allreduce.known"].which == (0, -1, 0)
    assert agreed["allreduce.new"].number is None
    (refused,) = [each for each in told if isinstance(each, Refused)]
    assert refused.text.startswith("Allgather is not supported with Join at this time.")
    job.ranks[0].submit(joins=True)
    job.deliver(0)
    assert job.coordinator.arrived() == {(wire.JOIN_TOPIC, (0, 1, 2)): frozenset({0, 1})}
    job.ranks[2].submit(joins=True)
    job.deliver(2)
    assert job.ranks[1].coming[-1] == Joined(2)
    assert not job.coordinator.arrived()


def test_what_was_submitted_before_joining_counts():
    job = Job(2)
    job.ranks[0].submit(header("x", operation="broadcast"), joins=True)
    job.ranks[1].submit(header("x", operation="broadcast"))
    job.settle()
    assert job.ranks[0].done[0][1] is not None
    job.ranks[1].submit(header("y"), joins=True)
    job.deliver(1)
    agreed, joined = job.ranks[1].coming
    assert isinstance(agreed, Agreed)
    assert agreed.which == (-1, 0)
    assert joined == Joined(1)


def test_who_waits_for_a_rank_that_left_is_known():
    job = Job(3)
    job.ranks[0].submit(header("x"))
    job.settle()
    assert job.coordinator.without(2) == {0: 'allreduce "x"'}
    assert job.coordinator.without(0) == {}
    job.ranks[1].submit(joins=True)
    job.settle()
    assert job.coordinator.without(2) == {0: 'allreduce "x"', 1: "join"}


def test_groups_are_apart_and_forgotten_when_all_have_closed_them():
    coordinator = Coordinator(3)

    def part(group: str, *members: int) -> Part:
        return Part(group, members, new=[("allreduce.x", True, header("x").encode())])

    assert coordinator.submit(0, [part("a", 0, 2), part("b", 0, 1)], joins=False) == []
    ((members, verdict),) = coordinator.submit(2, [part("a", 0, 2)], joins=False)
    assert members == (0, 2)
    assert isinstance(verdict, Agreed)
    for rank in (0, 1):
        coordinator.submit(rank, [Part("b", (0, 1), closes=True)], joins=False)
    assert not coordinator.arrived()


@pytest.mark.parametrize(
    "parts",
    [
        [Part("0", (0, 1), bits=1)],
        [Part("0", (0, 1), generation=1, bits=1)],
        [Part("0", (0, 7))],
        [Part("0", (1,))],
        [Part("0", (0, 1), new=[("k", True, b"{}"), ("k", True, b"{}")])],
    ],
)
def test_what_breaks_the_rules_is_refused(parts):
    with pytest.raises(ValueError, match=r"rank|numbers|members"):
        Coordinator(2).submit(0, parts, joins=False)
