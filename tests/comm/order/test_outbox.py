"""A message leaves when those that travelled together are all there again, or after a while."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.header import Header
from farandole.comm.order import wire
from farandole.comm.order.memory import Memory
from farandole.comm.order.outbox import LINGER, PAUSE, Outbox, Seat
from farandole.comm.order.wire import Agreed

NAMES = "abcdef"


def request(name: str) -> Any:
    header = Header(operation="allreduce", name=name)
    return SimpleNamespace(key=wire.key_of(header, 0), header=header)


def known_seat(names: str = NAMES) -> Seat:
    """A seat whose group has agreed on ``names`` before."""
    line: Any = SimpleNamespace(key="0", members=(0, 1), waited=False)
    seat = Seat(line, Memory(0))
    for number, name in enumerate(names):
        asked = request(name)
        seat.memory.learn(Agreed("0", asked.key, number, (0, 0), (asked.header.encode(),)))
    return seat


def put_all(outbox: Outbox, seat: Seat, names: str | list[str], now: float = 0.0) -> list[bool]:
    return [outbox.put(seat, request(name), now) for name in names]


def sent(outbox: Outbox, now: float = 0.0) -> int:
    mail = outbox.take(now)
    return 0 if mail is None else sum(part.bits.bit_count() + len(part.new) for part in mail.parts)


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    box = Outbox()
    yield box
    assert box.take(0.0) is None


def test_the_first_time_nobody_is_expected(outbox: Outbox) -> None:
    assert put_all(outbox, known_seat(), "ab", now=7.0) == [False, False]
    assert outbox.due == 7.0 + PAUSE
    assert sent(outbox) == 2
    assert outbox.due == math.inf


def test_the_second_time_the_last_one_completes_them_in_any_order(outbox: Outbox) -> None:
    seat = known_seat()
    put_all(outbox, seat, "abc")
    sent(outbox)
    assert put_all(outbox, seat, "cab", now=1.0) == [False, False, True]
    assert outbox.due == 1.0 + LINGER
    sent(outbox, 1.0)
    assert put_all(outbox, seat, "d", now=2.0) == [False]
    sent(outbox, 2.0)
    assert put_all(outbox, seat, "d", now=3.0) == [True]
    sent(outbox, 3.0)


def test_what_comes_right_after_others_have_left_travels_with_them_next_time(
    outbox: Outbox,
) -> None:
    seat = known_seat()
    put_all(outbox, seat, "ab", now=1.0)
    sent(outbox, 1.0)
    put_all(outbox, seat, "cd", now=1.0 + PAUSE / 2)
    sent(outbox, 1.0 + PAUSE / 2)
    put_all(outbox, seat, "ef", now=1.0 + 2 * PAUSE)
    sent(outbox, 1.0 + 2 * PAUSE)
    assert put_all(outbox, seat, "abcd", now=2.0) == [False, False, False, True]
    sent(outbox, 2.0)
    assert put_all(outbox, seat, "ef", now=3.0) == [False, True]
    sent(outbox, 3.0)


def test_what_follows_because_its_forerunner_was_waited_for_is_left_alone(outbox: Outbox) -> None:
    seat = known_seat()
    for step in (1.0, 2.0, 3.0):
        done = put_all(outbox, seat, "a", now=step)
        sent(outbox, step)
        seat.line.waited = True
        done += put_all(outbox, seat, "b", now=step + PAUSE / 2)
        sent(outbox, step + PAUSE / 2)
    assert done == [True, True]


def test_who_waits_between_two_of_them_parts_them_again(outbox: Outbox) -> None:
    seat = known_seat()
    put_all(outbox, seat, "ab", now=1.0)
    sent(outbox, 1.0)
    put_all(outbox, seat, "a", now=2.0)
    sent(outbox, 2.0)
    put_all(outbox, seat, "b", now=2.0 + 2 * PAUSE)
    sent(outbox, 2.0 + 2 * PAUSE)
    assert put_all(outbox, seat, "a", now=3.0) == [True]
    sent(outbox, 3.0)


def test_a_stranger_among_them_does_not_wait_for_them(outbox: Outbox) -> None:
    seat = known_seat()
    put_all(outbox, seat, "ab")
    sent(outbox)
    assert put_all(outbox, seat, ["a", "new", "b"]) == [False, False, False]
    assert outbox.due == PAUSE
    assert sent(outbox) == 3


@given(seed=st.integers(0, 1 << 32))
def test_parts_of_a_company_grow_together_whatever_the_order(seed: int) -> None:
    random, seat, outbox = Random(seed), known_seat(), Outbox()
    put_all(outbox, seat, random.sample(NAMES, 3))
    sent(outbox)
    alone = 0
    for _ in range(40):
        order = random.sample(NAMES, len(NAMES))
        done = put_all(outbox, seat, order)
        alone = 0 if done[-1] and not any(done[:-1]) else alone + 1
        assert sent(outbox) == len(NAMES)
    assert alone == 0


def test_a_group_that_closed_sends_nothing_but_that() -> None:
    outbox, seat, other = Outbox(), known_seat(), known_seat()
    put_all(outbox, seat, "ab")
    put_all(outbox, other, "c")
    outbox.close(seat)
    mail = outbox.take(0.0)
    assert mail is not None
    assert [(part.bits, part.closes) for part in mail.parts] == [(0b100, False), (0, True)]


def test_numbers_of_an_earlier_generation_are_nobodys_companions(outbox: Outbox) -> None:
    seat = known_seat()
    put_all(outbox, seat, "ab")
    seat.begin_anew()
    sent(outbox)
    for number, name in enumerate("cd"):
        asked = request(name)
        seat.memory.learn(Agreed("0", asked.key, number, (0, 0), (asked.header.encode(),)))
    put_all(outbox, seat, "c", now=1.0)
    assert outbox.due == 1.0 + PAUSE
    sent(outbox, 1.0)


def test_numbers_of_two_generations_travel_apart() -> None:
    outbox, seat = Outbox(), known_seat()
    put_all(outbox, seat, "a")
    seat.memory.begin_anew()
    put_all(outbox, seat, "b")
    mail = outbox.take(0.0)
    assert mail is not None
    assert [(part.generation, part.bits, len(part.new)) for part in mail.parts] == [
        (0, 1, 0),
        (1, 0, 1),
    ]


def test_a_join_is_worth_a_message() -> None:
    outbox = Outbox()
    outbox.join()
    mail = outbox.take(0.0)
    assert mail is not None
    assert mail.joins
    assert mail.what is None
    assert outbox.take(0.0) is None
