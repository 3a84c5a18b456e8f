"""The watch, without a clock, a thread or a socket."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.control.position import Position
from farandole.comm.control.watch import (
    LEFT_AFTER,
    Failure,
    GatherKey,
    Limits,
    RankView,
    Stalled,
    State,
    Wait,
    hopeless,
    judge,
)
from farandole.core.errors import MismatchError, PeerLost, StallError

LIMITS = Limits(deadlock_after=2.0, stall_warning=60.0, stall_timeout=1800.0)
MOVING = RankView()


def bucket(sequence: int, *, plan: str = "p", members: tuple[int, ...] = ()) -> Position:
    return Position("planned", "0", sequence, f"bucket {sequence}", ("fc.weight",), plan, members)


def named(sequence: int, name: str = "loss") -> Position:
    return Position("named", "0", sequence, f'allreduce "{name}"')


def stuck(
    *positions: Position, since: float = 0.0, begun: Mapping[tuple[str, str], int] | None = None
) -> RankView:
    waits = tuple(Wait(position, since) for position in positions)
    return RankView(stuck=True, waits=waits, begun=begun or {}, changed=since)


def gathering(topic: str, members: tuple[int, ...], since: float = 0.0) -> RankView:
    wait = Wait(Position("agreement", "0", 0, topic), since, (topic, members))
    return RankView(stuck=True, waits=(wait,), changed=since)


def state(*ranks: RankView, gathers: Mapping[GatherKey, frozenset[int]] | None = None) -> State:
    return State(ranks=ranks, gathers=gathers or {}, limits=LIMITS)


def failure(state: State, now: float) -> Exception | None:
    verdicts = judge(state, now)
    assert len(verdicts) <= 1
    return verdicts[0].error if verdicts and isinstance(verdicts[0], Failure) else None


class TestDeadlock:
    def test_different_paths_end_after_the_limit_and_not_before(self) -> None:
        caught = state(stuck(bucket(3)), stuck(named(1)))
        assert judge(caught, 1.99) == []
        error = failure(caught, 2.0)
        assert isinstance(error, MismatchError)
        assert error.ranks == (0, 1)
        assert "rank 0: bucket 3 (fc.weight)" in str(error)
        assert 'rank 1: allreduce "loss"' in str(error)
        assert "same order" in str(error)

    def test_the_last_rank_to_stir_starts_the_time_anew(self) -> None:
        caught = state(stuck(bucket(3)), stuck(named(1), since=5.0))
        assert failure(caught, 6.9) is None
        assert isinstance(failure(caught, 7.0), MismatchError)

    def test_the_same_place_is_slow_and_no_deadlock(self) -> None:
        assert judge(state(stuck(bucket(3)), stuck(bucket(3))), 50.0) == []

    def test_ahead_in_the_same_channel_is_slow_and_no_deadlock(self) -> None:
        assert judge(state(stuck(bucket(3)), stuck(bucket(5))), 50.0) == []

    def test_a_rank_that_still_moves_may_arrive_anywhere(self) -> None:
        elsewhere = stuck(replace(named(1), members=(1, 2)))
        assert judge(state(stuck(bucket(3)), elsewhere, MOVING), 50.0) == []

    def test_a_cycle_in_a_part_of_the_group_needs_not_the_others(self) -> None:
        members = (0, 1)
        one = stuck(replace(bucket(3), members=members))
        other = stuck(replace(named(1), members=members))
        error = failure(state(one, other, MOVING), 3.0)
        assert isinstance(error, MismatchError)
        assert error.ranks == (0, 1)

    def test_what_a_rank_has_begun_before_it_blocked_elsewhere_is_on_its_way(self) -> None:
        ahead = stuck(named(1), begun={("planned", "0"): 3})
        assert judge(state(stuck(bucket(3)), ahead), 50.0) == []
        behind = stuck(named(1), begun={("planned", "0"): 2})
        assert isinstance(failure(state(stuck(bucket(3)), behind), 50.0), MismatchError)

    def test_another_plan_at_the_same_number_is_another_operation(self) -> None:
        error = failure(state(stuck(bucket(3, plan="a")), stuck(bucket(3, plan="b"))), 2.0)
        assert isinstance(error, MismatchError)
        assert "Their plans differ" in str(error)

    def test_one_thread_that_can_go_on_frees_its_rank(self) -> None:
        two_threads = stuck(bucket(3), named(1))
        assert judge(state(two_threads, stuck(named(1))), 50.0) == []

    def test_gathers_are_known_exactly(self) -> None:
        pending: dict[GatherKey, frozenset[int]] = {
            ("a", (0, 1)): frozenset({0}),
            ("b", (0, 1)): frozenset({1}),
        }
        caught = state(gathering("a", (0, 1)), gathering("b", (0, 1)), gathers=pending)
        assert isinstance(failure(caught, 2.0), MismatchError)
        answered = state(gathering("a", (0, 1)), gathering("b", (0, 1)), gathers={})
        assert judge(answered, 50.0) == []

    def test_ranks_at_one_place_are_named_together(self) -> None:
        error = failure(state(*[stuck(named(1))] * 3, stuck(bucket(2))), 2.0)
        assert 'ranks 0-2: allreduce "loss"' in str(error)


class TestLeft:
    def test_who_waits_for_a_rank_that_left_gets_an_error_within_a_second(self) -> None:
        gone = RankView(left=True, changed=10.0)
        caught = state(stuck(named(1), since=1.0), gone, MOVING)
        assert judge(caught, 10.0 + LEFT_AFTER - 0.01) == []
        error = failure(caught, 10.0 + LEFT_AFTER)
        assert isinstance(error, PeerLost)
        assert error.ranks == (1,)
        assert "Rank 1 has shut down" in str(error)
        assert 'rank 0: allreduce "loss"' in str(error)

    def test_what_it_began_before_it_left_may_still_arrive(self) -> None:
        gone = RankView(left=True, changed=10.0, begun={("named", "0"): 1})
        assert judge(state(stuck(named(1), since=1.0), gone), 50.0) == []

    def test_a_group_without_it_does_not_mind(self) -> None:
        inside = stuck(bucket(1, members=(0, 2)))
        gone = RankView(left=True, changed=0.0)
        assert judge(state(inside, gone, inside), 50.0) == []


class TestStall:
    def test_names_who_is_missing_once(self) -> None:
        slow = state(stuck(named(1)), MOVING, stuck(named(1), since=3.0))
        assert judge(slow, 59.9) == []
        (verdict,) = judge(slow, 60.0)
        assert isinstance(verdict, Stalled)
        assert verdict.culprits == (1,)
        assert {rank for rank, _ in verdict.waits} == {0, 2}
        assert judge(replace(slow, warned=verdict.operations), 70.0) == []

    def test_blames_who_is_not_blocked_itself(self) -> None:
        chain = state(
            stuck(bucket(1, members=(0, 1))), stuck(replace(named(1), members=(1, 2))), MOVING
        )
        (verdict,) = judge(chain, 60.0)
        assert isinstance(verdict, Stalled)
        assert verdict.culprits == (2,)

    def test_a_slow_operation_has_no_culprit(self) -> None:
        (verdict,) = judge(state(stuck(named(1)), stuck(named(1))), 60.0)
        assert isinstance(verdict, Stalled)
        assert verdict.culprits == ()

    def test_ends_everybody_after_the_limit(self) -> None:
        error = failure(state(stuck(named(1)), MOVING), 1800.0)
        assert isinstance(error, StallError)
        assert error.ranks == (1,)

    def test_zero_turns_both_off(self) -> None:
        never = replace(state(stuck(named(1)), MOVING), limits=Limits(2.0, 0.0, 0.0))
        assert judge(never, 1e9) == []


# Programs that wait, rank by rank: the judge must say what a search through the graph says.


@st.composite
def blocked_ranks(draw: st.DrawFn) -> tuple[State, dict[int, frozenset[int]]]:
    """Ranks with one blocking thread each, run until nobody moves; and who waits for whom."""
    size = draw(st.integers(2, 5))
    members = st.lists(st.integers(0, size - 1), min_size=2, max_size=size, unique=True)
    groups = [tuple(sorted(draw(members))) for _ in range(draw(st.integers(1, 3)))]
    programs = [
        draw(st.lists(st.sampled_from(range(len(groups))), max_size=4)) for _ in range(size)
    ]
    programs = [[g for g in program if rank in groups[g]] for rank, program in enumerate(programs)]
    done = [0] * size
    while True:
        heads = {r: programs[r][done[r]] for r in range(size) if done[r] < len(programs[r])}
        ready = [g for g in set(heads.values()) if all(heads.get(r) == g for r in groups[g])]
        if not ready:
            break
        for rank in groups[ready[0]]:
            done[rank] += 1
    waits_for = {
        rank: frozenset(m for m in groups[g] if heads.get(m) != g) for rank, g in heads.items()
    }
    views = [MOVING] * size
    for rank, g in heads.items():
        number = programs[rank][: done[rank]].count(g)
        views[rank] = stuck(Position("named", str(g), number, f"op {g}", members=groups[g]))
    return state(*views), waits_for


def on_or_before_a_cycle(waits_for: Mapping[int, frozenset[int]]) -> frozenset[int]:
    def reach(start: int) -> set[int]:
        found: set[int] = set()
        edge = [start]
        while edge:
            fresh = set(waits_for.get(edge.pop(), frozenset())) - found
            found |= fresh
            edge.extend(fresh)
        return found

    reached = {rank: reach(rank) for rank in waits_for}
    cyclic = {rank for rank in waits_for if rank in reached[rank]}
    return frozenset(rank for rank in waits_for if rank in cyclic or reached[rank] & cyclic)


@given(blocked_ranks())
@settings(max_examples=300, deadline=None)
def test_only_and_all_ranks_that_can_never_go_on_are_entangled(
    case: tuple[State, dict[int, frozenset[int]]],
) -> None:
    frozen, waits_for = case
    assert hopeless(frozen) == on_or_before_a_cycle(waits_for)
    error = failure(frozen, 2.0)
    assert (error is not None) == bool(hopeless(frozen))
    assert judge(frozen, 1.9) == []


@given(blocked_ranks())
@settings(max_examples=100, deadline=None)
def test_every_stall_has_an_end(case: tuple[State, dict[int, frozenset[int]]]) -> None:
    """Whoever is blocked when time is up gets an error: nothing hangs for ever."""
    frozen, waits_for = case
    assert (failure(frozen, 1800.0) is not None) == bool(waits_for)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_verdict_does_not_depend_on_who_is_who(order: tuple[int, ...]) -> None:
    ranks = (stuck(bucket(1)), stuck(named(1)), stuck(bucket(1)))
    error = failure(state(*[ranks[old] for old in order]), 2.0)
    assert isinstance(error, MismatchError)
    assert error.ranks == (0, 1, 2)
