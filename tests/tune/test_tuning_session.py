"""A session: what it wants in force at each step, and what it makes of the ranks' times."""

from __future__ import annotations

import pytest

from farandole.tune.search import Dimension, search
from farandole.tune.session import Session

COST = {1: 3.0, 2: 1.0, 4: 2.0}


def session(**more) -> Session:
    dimension = Dimension("size", lambda best: [1, 2, 4])
    return Session(search([dimension], {"size": 1}), **{"warm_up": 1, "steps": 3, **more})


def trial(session: Session, *, first: float = 100.0) -> list[float]:
    """Step through a trial; the times that count. The first step is slow: it brings a change."""
    assert not session.note(first)
    for _ in range(2):
        assert not session.note(COST[session.setting["size"]])
    assert session.note(COST[session.setting["size"]])
    return session.times()


def test_warms_up_then_tries_and_chooses():
    one = session()
    seen = []
    while one.chosen is None:
        seen.append(one.judge([trial(one)]))
    assert [each.number for each in seen] == list(range(len(seen)))
    assert [each.setting["size"] for each in seen] == [1, 1, 2, 4, 2, 4]
    assert all(each.seconds == COST[each.setting["size"]] for each in seen)
    assert one.chosen == one.setting == {"size": 2}


def test_the_slowest_rank_of_each_step_counts():
    one = session(warm_up=0)
    trial(one)
    judged = one.judge([[1.0, 9.0, 1.0], [2.0, 2.0, 8.0]])
    assert judged.seconds == 8.0  # the median of 2, 9, 8


def test_a_trial_that_was_disturbed_begins_again():
    one = session()
    one.note(50.0)
    one.note(50.0)
    one.restart_trial()
    assert trial(one) == [3.0, 3.0, 3.0]


def test_where_there_is_nothing_to_choose_nothing_is_tried():
    nothing = Session(search([], {"size": 1}), warm_up=3, steps=5)
    assert nothing.chosen == nothing.setting == {"size": 1}


def test_times_of_another_number_of_steps_are_a_defect():
    one = session(warm_up=0)
    trial(one)
    with pytest.raises(ValueError, match="shorter"):
        one.judge([[1.0, 2.0, 3.0], [1.0, 2.0]])
