"""The search alone, on costs that are made up: exact ones, and noisy ones."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.tune.search import Dimension, Setting, search

SIZES = [2**power for power in range(16, 27, 2)]


def run(
    dimensions: list[Dimension], start: Setting, cost: Callable[[Setting], float]
) -> tuple[Setting, list[Setting]]:
    """The best setting, and all that was tried."""
    looking = search(dimensions, start)
    tried: list[Setting] = []
    try:
        setting = next(looking)
        while True:
            tried.append(setting)
            setting = looking.send(cost(setting))
    except StopIteration as end:
        return end.value, tried


def fixed(name: str, choices: list) -> Dimension:
    return Dimension(name, lambda best: choices)


COSTS = st.lists(st.floats(0.1, 10), min_size=7, max_size=7)


@given(costs=COSTS, start=st.integers(0, 6), count=st.integers(0, 7))
def test_finds_the_least_cost_of_one_dimension(costs, start, count):
    best, tried = run([fixed("a", list(range(count)))], {"a": start}, lambda s: costs[s["a"]])
    assert costs[best["a"]] == min(costs[each] for each in {start, *range(count)})
    candidates = len({start, *range(count)})
    assert len(tried) <= 2 * candidates + 3
    assert (candidates == 1) == (tried == [])


@given(first=COSTS, second=COSTS, start=st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_is_never_worse_than_the_start_in_several_dimensions(first, second, start):
    def cost(setting):
        return first[setting["a"]] * second[setting["b"]]

    beginning = {"a": start[0], "b": start[1]}
    best, _ = run([fixed("a", list(range(7))), fixed("b", list(range(7)))], beginning, cost)
    assert cost(best) <= cost(beginning)
    assert cost(best) == pytest.approx(min(first) * min(second))  # the dimensions do not interact


def test_stays_where_all_costs_are_equal():
    best, _ = run([fixed("a", SIZES)], {"a": SIZES[2]}, lambda setting: 1.0)
    assert best == {"a": SIZES[2]}


@given(seed=st.integers(0, 2**32))
def test_same_costs_make_the_same_trials(seed):
    def once():
        noise = random.Random(seed)
        return run(
            [fixed("a", SIZES), fixed("b", [1, 2, 3])], {"a": 1, "b": 1}, lambda s: noise.random()
        )

    assert once() == once()


def test_a_dimension_may_depend_on_the_ones_before():
    smaller = Dimension("b", lambda best: [each for each in SIZES if each < best["a"]])
    _, tried = run(
        [fixed("a", SIZES), smaller],
        {"a": SIZES[0], "b": SIZES[0]},
        lambda s: abs(s["a"] - SIZES[3]),
    )
    assert {each["b"] for each in tried if each["a"] == SIZES[3]} == set(SIZES[:3])


def bathtub(setting: Setting) -> float:
    """As step times are: dear where buckets are tiny, flat for long, dearer where nothing hides."""
    size = int(setting["a"])
    return 1.0 + 2000 / size**0.7 + size / 2**29


@pytest.mark.parametrize("scatter", [0.05, 0.15, 0.30])
def test_noise_seldom_leads_it_astray(scatter):
    """Steps that scatter like a busy machine's, now and then one several times as long."""
    noise = random.Random(1)

    def trial(setting):
        return statistics.median(
            bathtub(setting)
            * noise.lognormvariate(0, scatter)
            * (5 if noise.random() < 0.05 else 1)
            for _ in range(5)
        )

    least = min(bathtub({"a": size}) for size in SIZES)
    runs = 200
    found = [bathtub(run([fixed("a", SIZES)], {"a": SIZES[0]}, trial)[0]) for _ in range(runs)]
    within = sum(cost <= 1.1 * least for cost in found)
    assert within >= (0.99 if scatter < 0.3 else 0.95) * runs
    assert bathtub({"a": SIZES[0]}) > 1.3 * least  # it had a way to go
