"""What agents bring with them that have outlived a job loop."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.launch.channel import Message
from farandole.launch.elastic_arrivals import REUNITED, ElasticArrivals
from farandole.launch.elastic_fleet import Guest
from farandole.launch.hosts import Share


@pytest.fixture
def arrivals() -> ElasticArrivals:
    made = ElasticArrivals.__new__(ElasticArrivals)
    made._reunited, made._numbers, made._messages, made._leaving = False, {}, [], set()
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    messages: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(Guest, "send", lambda _, kind, **fields: messages.append((kind, fields)))
    return messages


def guest() -> Guest:
    return Guest(Share("node 1", range(0)), "10.0.0.1", ready=True)


def test_what_an_agent_runs_is_told_and_its_messages_count(
    arrivals: ElasticArrivals, sent: list[tuple[str, dict[str, Any]]]
) -> None:
    came = guest()
    arrivals._take_back(came, [(2, 0), (3, 1)], [1])
    told = {"host": "node 1", "running": [(2, 0), (3, 1)], "well": [1]}
    assert arrivals._messages == [Message("returned", told, b"")]
    assert came.running == {2, 3}
    arrivals._translate(came, Message("exited", {"rank": 3, "code": 0}, b""))
    assert arrivals._messages[1].fields == {"rank": 3, "code": 0}
    assert came.running == {2}
    assert sent == []


def test_what_comes_back_too_late_is_ended_and_not_heard(
    arrivals: ElasticArrivals, sent: list[tuple[str, dict[str, Any]]]
) -> None:
    arrivals.send(REUNITED)
    came, other = guest(), guest()
    arrivals._numbers[2] = other  # this job loop has given the number to another one
    arrivals._take_back(came, [(2, 0)], [])
    assert sent == [("end", {"rank": 2})]
    for message in (
        Message("output", {"rank": 2, "stream": "stdout"}, b"still here\n"),
        Message("exited", {"rank": 2, "code": -9}, b""),
    ):
        arrivals._translate(came, message)
    assert arrivals._messages == []
