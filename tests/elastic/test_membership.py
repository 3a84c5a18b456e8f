"""Who is in: single cases, and random histories replayed against the promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.core.errors import UsageError
from farandole.core.worlds import World
from farandole.elastic import decisions as m
from farandole.elastic import membership, stragglers
from farandole.elastic.membership import Membership
from farandole.elastic.policy import Policy, cooldown


def policy(start: int = 3, least: int = 1, **more: object) -> Policy:
    return Policy(start_size=start, min_size=least, **more)  # type: ignore[arg-type]


@dataclass
class Scene:
    """A membership, and workers that do as they are told when the test lets them."""

    members: Membership
    now: float = 0.0
    log: list[m.Decision] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    generation: dict[int, int] = field(default_factory=dict)
    commits: dict[int, int] = field(default_factory=dict)
    told_to_leave: set[int] = field(default_factory=set)

    def take(self, decisions: list[m.Decision]) -> list[m.Decision]:
        for each in decisions:
            self.log.append(each)
            if isinstance(each, m.Spawn):
                assert each.number not in self.generation
                self.alive.add(each.number)
                self.generation[each.number] = self.commits[each.number] = -1
            elif isinstance(each, m.Publish):
                self.form(each.world)
            elif isinstance(each, m.End | m.Update):
                world = self.members.world
                assert world is not None
                self.told_to_leave |= set(world.members) & self.alive - self.waiting
            elif isinstance(each, m.Dismiss):
                assert each.number in self.waiting
                self.waiting.discard(each.number)
                self.told_to_leave.discard(each.number)
        return decisions

    def form(self, world: World) -> None:
        """Only those who wait can come, and all of them have left what was before."""
        assert set(world.members) <= self.waiting
        self.waiting -= set(world.members)
        self.told_to_leave -= set(world.members)
        newest = self.commits[world.members[world.source]]
        for number in world.members:
            assert self.commits[number] <= newest
            self.generation[number] = world.generation
            self.commits[number] = max(newest, 0)

    def ready(self, number: int, **more: object) -> list[m.Decision]:
        self.waiting.add(number)
        self.told_to_leave.discard(number)
        return self.take(
            self.members.on_ready(
                number, self.generation[number], self.now,
                commits=self.commits[number], **more,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def exit(self, number: int, *, well: bool = False) -> list[m.Decision]:
        self.alive.discard(number)
        self.waiting.discard(number)
        self.told_to_leave.discard(number)
        return self.take(self.members.on_exit(number, well=well, now=self.now))

    def obey(self) -> None:
        """All that live do what they have been told to, and newcomers come."""
        for number in sorted(self.alive):
            new = self.generation[number] < 0 and number not in self.waiting
            if self.members.workers[number].going:
                self.exit(number, well=True)
            elif number in self.told_to_leave or new:
                self.ready(number)

    def hosts(self, **slots: int) -> list[m.Decision]:
        return self.take(self.members.on_hosts(slots, self.now))

    def at(self, now: float) -> list[m.Decision]:
        self.now = now
        return self.take(self.members.on_tick(now))

    @property
    def world(self) -> World:
        assert self.members.world is not None
        return self.members.world

    def of(self, kind: type[m.Decision]) -> list[m.Decision]:
        return [each for each in self.log if isinstance(each, kind)]


def started(rules: Policy, **slots: int) -> Scene:
    """A scene in which the first world stands, of workers that can recover."""
    scene = Scene(Membership(rules))
    scene.hosts(**slots)
    for number in sorted(scene.alive):
        scene.ready(number)
    scene.take(scene.members.on_enrolled(0, 0.0))
    return scene


def test_the_first_world_has_all_ranks_and_waits_for_each_of_them() -> None:
    scene = Scene(Membership(policy(2, max_size=3)))
    scene.hosts(a=2, b=4)
    assert [(s.host, s.slot, s.rank, s.size) for s in scene.of(m.Spawn)] == [  # type: ignore[union-attr]
        ("a", 0, 0, 3), ("a", 1, 1, 3), ("b", 0, 2, 3),
    ]  # fmt: skip
    assert scene.ready(0) == scene.ready(2) == []
    (published,) = scene.ready(1)
    assert published == m.Publish(
        World(generation=0, members=(0, 1, 2), hosts=("a", "a", "b"), slots=(0, 1, 0))
    )


def test_a_loss_shrinks_the_world_when_all_survivors_have_left_and_a_replacement_is_started() -> (
    None
):
    scene = started(policy(3), a=3)
    scene.commits.update({0: 4, 1: 4, 2: 5})
    decisions = scene.exit(1)
    assert m.End(0, "worker 1 was lost", (1,)) in decisions
    assert [type(each) for each in decisions] == [m.End]
    assert scene.ready(0, why="PeerLost", lost=[1]) == []
    scene.ready(2, why="PeerLost", lost=[1])
    # Rank 0 is who has the newest commit.
    assert (scene.world.generation, scene.world.members) == (1, (2, 0))
    assert not scene.world.removed_only
    # The replacement starts when the survivors train again.
    assert scene.members.next_due(0.0) == membership.RESPITE
    assert [type(each) for each in scene.at(membership.RESPITE)] == [m.Spawn]


def test_a_replacement_that_is_waited_for_is_started_at_once() -> None:
    for rules in (policy(3, on_loss_size="hold"), policy(3, least=3)):
        scene = started(rules, a=3)
        assert [type(each) for each in scene.exit(1)] == [m.End, m.Spawn]


def test_two_losses_at_once_cost_one_generation() -> None:
    scene = started(policy(4, least=2), a=4)
    scene.exit(0)
    scene.ready(3, why="PeerLost")
    scene.exit(1)
    scene.ready(2, why="PeerLost")
    assert (scene.world.generation, scene.world.members) == (1, (2, 3))
    assert len(scene.of(m.End)) == 1


def test_a_loss_while_the_next_world_forms_ends_that_one_too() -> None:
    scene = started(policy(4, least=2), a=4)
    scene.exit(0)
    for number in (1, 2, 3):
        scene.ready(number, why="PeerLost")
    scene.exit(1)
    for number in (2, 3):
        scene.ready(number, why="PeerLost")
    assert (scene.world.generation, scene.world.members) == (2, (2, 3))


def test_a_newcomer_comes_in_at_a_commit_and_last() -> None:
    scene = started(policy(2), a=2)
    scene.hosts(a=2, b=1)
    assert scene.told_to_leave == set()  # not before it is there
    assert scene.ready(2) == [m.Update(0, removed_only=False)]
    scene.ready(0)
    scene.ready(1)
    assert scene.world.members == (0, 1, 2)
    assert scene.world.fresh == (2,)


def test_members_are_told_once_although_newcomers_come_one_by_one() -> None:
    scene = started(policy(2), a=2)
    scene.hosts(a=2, b=2)
    assert scene.ready(2) == []  # the other is about to come
    assert scene.at(membership.SETTLE) == [m.Update(0, removed_only=False)]
    assert scene.ready(3) == []
    scene.ready(0)
    scene.ready(1)
    assert scene.world.members == (0, 1, 2, 3)


def test_a_host_that_is_gone_from_the_list_is_left_in_good_order() -> None:
    scene = started(policy(4, least=2), a=2, b=2)
    assert scene.hosts(b=2) == [m.Update(0, removed_only=True)]
    for number in range(4):
        scene.ready(number)
    assert scene.world.members == (2, 3)
    assert scene.world.removed_only
    assert scene.of(m.Dismiss) == [
        m.Dismiss(0, "its place in the job is gone"), m.Dismiss(1, "its place in the job is gone")
    ]  # fmt: skip
    assert scene.exit(0, well=True) == scene.exit(1, well=True) == []


def test_fewer_hosts_than_ranks_are_needed_disturb_nobody() -> None:
    scene = started(policy(4, least=3), a=2, b=2)
    assert scene.hosts(b=2) == []


def test_the_last_that_has_the_state_stays_until_another_has_it() -> None:
    scene = started(policy(1), a=1)
    scene.commits[0] = 7
    assert [type(each) for each in scene.hosts(b=1)] == [m.Spawn]
    assert scene.ready(1) == [m.Update(0, removed_only=False)]
    scene.ready(0)
    assert scene.world.members == (0, 1)
    # Now both have it.
    assert scene.at(1.0) == [m.Update(1, removed_only=True)]
    scene.ready(0)
    scene.ready(1)
    assert scene.world.members == (1,)


def test_with_hold_the_replacement_takes_the_lost_ones_number() -> None:
    scene = started(policy(3, on_loss_size="hold"), a=3)
    scene.commits.update({0: 2, 1: 2, 2: 2})
    scene.exit(0)
    scene.ready(1, why="PeerLost")
    assert scene.ready(2, why="PeerLost") == []
    scene.ready(3)
    assert scene.world.members == (3, 1, 2)
    assert scene.world.source == 1
    assert scene.world.heirs == ((0, 3),)
    scene.exit(3)
    scene.exit(2)
    scene.at(10.0)  # the host may have ranks again
    for number in (1, 4, 5):
        scene.ready(number, why="PeerLost")
    assert scene.world.members == (4, 1, 5)
    assert scene.world.heirs == ((3, 4), (2, 5))
    assert World.from_bytes(scene.world.to_bytes()) == scene.world


def test_with_hold_and_no_replacement_training_goes_on_after_a_while() -> None:
    rules = policy(3, on_loss_size="hold", on_loss="host", patience=60.0)
    scene = started(rules, a=1, b=1, c=1)
    scene.exit(0)
    scene.ready(1, why="PeerLost")
    scene.ready(2, why="PeerLost")
    assert scene.at(59.0) == []
    scene.at(60.0)
    assert scene.world.members == (1, 2)


def test_on_loss_host_ends_all_ranks_of_the_host_and_avoids_it() -> None:
    scene = started(policy(4, least=2, on_loss="host"), a=2, b=2)
    decisions = scene.exit(0)
    assert m.Kill(1, "another rank of a was lost") in decisions
    assert not scene.of(m.Spawn)[4:]
    scene.ready(2, why="PeerLost")
    assert scene.ready(3, why="PeerLost") == []  # rank 1 still lives
    scene.exit(1)
    assert scene.world.members == (2, 3)


def test_a_host_that_was_avoided_comes_back_after_its_time() -> None:
    rules = policy(4, least=2, on_loss="host", cooldown=(10.0, 100.0))
    scene = started(rules, a=2, b=2)
    scene.exit(3)
    scene.exit(2)
    scene.ready(0, why="PeerLost")
    scene.ready(1, why="PeerLost")
    assert scene.members.next_due(scene.now) == 20.0
    assert scene.at(19.0) == []
    assert [each.host for each in scene.at(20.0)] == ["b", "b"]  # type: ignore[union-attr]


def test_a_host_that_went_and_came_is_another_machine_with_the_same_name() -> None:
    scene = started(policy(4, least=2, on_loss="host"), a=2, b=2)
    scene.exit(3)
    scene.exit(2)
    scene.ready(0, why="PeerLost")
    scene.ready(1, why="PeerLost")
    assert scene.at(1e6) == []
    scene.hosts(a=2)
    assert [each.host for each in scene.hosts(a=2, b=2)] == ["b", "b"]  # type: ignore[union-attr]


def test_all_hosts_avoided_for_good_is_the_end() -> None:
    scene = started(policy(4, least=2, on_loss="host"), a=2, b=2)
    scene.exit(0)
    assert not scene.of(m.Fail)
    scene.exit(2)
    assert len(scene.of(m.Fail)) == 1


def test_too_few_ranks_wait_for_a_host_and_then_give_up() -> None:
    scene = started(policy(2, least=2, on_loss="host", patience=30.0), a=1, b=1, c=0)
    scene.exit(1)
    scene.ready(0, why="PeerLost")
    assert scene.at(29.0) == []
    (failed,) = scene.at(30.0)
    assert isinstance(failed, m.Fail)
    assert "1 of at least 2 ranks could be had within 30 s" in failed.why
    assert failed.culprit == 1


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_reset_limit_counts_generations_after_the_first(limit: int) -> None:
    scene = started(policy(3, reset_limit=limit), a=3)
    for _ in range(limit):
        scene.exit(scene.world.members[-1])
        for number in scene.world.members[:-1]:
            scene.ready(number, why="PeerLost")
        for number in sorted(scene.alive - set(scene.world.members)):
            scene.exit(number)  # replacements do not come
    assert not scene.of(m.Fail)
    for number in scene.world.members:
        scene.ready(number, why="PeerLost")
    (failed,) = scene.of(m.Fail)
    assert failed.why == (  # type: ignore[union-attr]
        f"Horovod was shutdown because number of resets during elastic job exceeded limit: {limit}"
    )


def test_nobody_left_with_the_state_is_the_end_although_newcomers_wait() -> None:
    scene = started(policy(2), a=2)
    scene.commits.update({0: 1, 1: 1})
    scene.exit(1)
    scene.at(membership.RESPITE)
    scene.ready(2)
    scene.ready(0, why="PeerLost")
    assert scene.world.members == (0, 2)
    scene.commits[2] = -1  # it has not had the state yet
    scene.exit(0)
    scene.ready(2, why="PeerLost")
    (failed,) = scene.of(m.Fail)
    assert failed.why == m.STATE_LOST  # type: ignore[union-attr]


def test_a_script_that_is_not_elastic_is_told_so() -> None:
    scene = Scene(Membership(policy(2)))
    scene.hosts(a=2)
    scene.ready(0)
    scene.ready(1)
    assert [type(each) for each in scene.exit(1)] == [m.End]  # and nobody is started in vain
    (failed,) = scene.exit(0)
    assert failed == m.Fail(m.NOT_ELASTIC, 1)


def test_survivors_that_never_recover_are_not_waited_for_for_ever() -> None:
    scene = Scene(Membership(policy(2)))
    scene.hosts(a=2)
    scene.ready(0)
    scene.ready(1)
    scene.exit(1)
    assert scene.members.next_due(membership.RESPITE) == membership.ENROL
    assert scene.at(membership.ENROL) == [m.Fail(m.NOT_ELASTIC, 1)]


def test_a_program_that_fails_at_its_start_is_not_started_again_and_again() -> None:
    scene = Scene(Membership(policy(2)))
    scene.hosts(a=2)
    scene.exit(0)
    scene.exit(1)
    (failed,) = [each for each in scene.exit(2) if isinstance(each, m.Fail)]
    assert failed.culprit == 0


def test_who_does_not_come_to_init_while_others_wait_is_ended() -> None:
    scene = Scene(Membership(policy(2, start_timeout=20.0)))
    scene.hosts(a=2)
    assert scene.at(100.0) == []  # nobody waits
    (killed,) = scene.ready(0)
    assert isinstance(killed, m.Kill)
    assert (killed.number, killed.show) == (1, True)
    assert scene.at(101.0) == []


def test_a_rank_that_is_stuck_is_ended_by_the_word_of_the_others() -> None:
    scene = started(policy(3), a=3)
    decisions = scene.ready(0, why="StallError", lost=[2], stuck=True)
    assert decisions[:2] == [
        m.Kill(2, "it did not come to a collective that the others waited in", show=True),
        m.End(0, "StallError", (2,)),
    ]


def test_who_does_not_leave_a_world_that_is_over_is_named_and_then_ended() -> None:
    scene = started(policy(4, stall_warning=60.0, stall_timeout=300.0), a=4)
    scene.exit(3)
    assert [type(each) for each in scene.at(10.0)] == [m.Spawn]  # nobody waits
    scene.ready(0, why="PeerLost", lost=[3])
    scene.now = 50.0
    scene.ready(2, why="PeerLost", lost=[3])
    scene.ready(4)  # the replacement
    assert scene.members.next_due(60.0) == 70.0
    (named,) = scene.at(70.0)
    assert isinstance(named, m.Say)
    assert "for 60 s the others have waited for rank 1 of generation 0" in named.text
    assert scene.at(200.0) == []
    assert scene.members.next_due(200.0) == 310.0
    (killed,) = scene.at(310.0)
    assert isinstance(killed, m.Kill)
    assert (killed.number, killed.show) == (1, True)
    assert "300 s" in killed.why
    assert scene.at(311.0) == []  # once
    assert scene.members.next_due(311.0) == 310.0 + stragglers.SHOWING
    (killed,) = scene.at(310.0 + stragglers.SHOWING)
    assert isinstance(killed, m.Kill)
    assert (killed.number, killed.show) == (1, False)
    assert scene.at(400.0) == []
    scene.exit(1)
    assert scene.world.members == (0, 2, 4)


def test_who_is_slow_to_leave_a_world_is_not_ended_when_it_comes_in_time() -> None:
    scene = started(policy(3, stall_warning=60.0, stall_timeout=0.0), a=3)
    scene.exit(2)
    scene.at(membership.RESPITE)
    scene.ready(3)  # the replacement
    scene.ready(0, why="PeerLost", lost=[2])
    assert [type(each) for each in scene.at(1e6)] == [m.Say]
    scene.ready(1, why="PeerLost", lost=[2])
    assert scene.world.members == (0, 1, 3)
    assert not scene.of(m.Kill)


def test_an_end_that_was_good_is_the_end_of_training() -> None:
    scene = started(policy(3), a=4)
    scene.hosts(a=4)
    scene.exit(0, well=True)
    assert scene.hosts(a=8) == []
    (refused,) = scene.ready(1, why="PeerLost")
    assert isinstance(refused, m.Refuse)
    assert [type(each) for each in scene.exit(2)] == [m.Fail]


def test_ranks_that_never_meet_end_one_by_one_undisturbed() -> None:
    scene = Scene(Membership(policy(3)))
    scene.hosts(a=3)
    assert scene.exit(1, well=True) == scene.exit(0, well=True) == scene.exit(2, well=True) == []


def test_a_rank_that_ends_without_init_fails_those_who_wait_for_it_there() -> None:
    scene = Scene(Membership(policy(2)))
    scene.hosts(a=2)
    scene.ready(0)
    assert scene.exit(1, well=True) == [m.Fail(m.NEVER_CAME, None)]


def test_what_was_said_about_an_old_world_changes_nothing() -> None:
    scene = started(policy(3), a=3)
    scene.exit(2)
    scene.ready(0, why="PeerLost")
    scene.ready(1, why="PeerLost")
    assert scene.world.generation == 1
    assert scene.take(scene.members.on_ready(2, 0, 0.0, why="late", lost=[0])) == []


def test_a_host_that_keeps_failing_is_tried_less_and_less_often_and_forgiven() -> None:
    rules = policy()
    assert [cooldown(n, rules) for n in (1, 2, 3, 4, 50)] == [0.0, 1.0, 2.0, 4.0, 300.0]
    there = policy(on_loss="host", cooldown=(1.0, 2.0))
    assert [cooldown(n, there) for n in (1, 2, 9)] == [2.0, 2.0, 2.0]
    assert cooldown(1, policy(on_loss="host")) == math.inf
    scene = started(policy(2), a=2)
    for number, now in ((1, 0.0), (2, 1.0), (3, 5.0)):
        scene.now = now
        scene.at(now)
        scene.exit(number)
    assert scene.members.hosts["a"].avoided_until == 7.0
    scene.at(2000.0)
    scene.exit(4)
    assert scene.members.hosts["a"].avoided_until == 2000.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"start_size": 2, "min_size": 3}, {"start_size": 2, "min_size": 0},
        {"start_size": 4, "min_size": 1, "max_size": 3},
        {"start_size": 1, "min_size": 1, "on_loss": "nobody"},
        {"start_size": 1, "min_size": 1, "on_loss_size": "grow"},
        {"start_size": 1, "min_size": 1, "cooldown": (5.0, 1.0)},
    ],
)  # fmt: skip
def test_a_policy_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Policy(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ random histories

rules = st.builds(
    policy,
    st.just(3),
    least=st.integers(1, 3),
    max_size=st.sampled_from([None, 3, 5]),
    on_loss=st.sampled_from(["rank", "host"]),
    on_loss_size=st.sampled_from(["shrink", "hold"]),
    cooldown=st.sampled_from([None, (1.0, 4.0)]),
    patience=st.just(50.0),
)
events = st.lists(
    st.tuples(
        st.sampled_from(["leave", "start", "lose", "commit", "hosts", "time", "error"]),
        st.integers(0, 30),
    ),
    max_size=60,
)
some_hosts = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), max_size=4), min_size=1, max_size=6
)


def check(scene: Scene, rules: Policy) -> None:
    """What holds at every moment."""
    workers = scene.members.workers
    places = [(each.host, each.slot) for each in workers.values()]
    assert len(set(places)) == len(places)
    assert set(workers) == scene.alive or scene.members.failed
    world = scene.members.world
    if world is not None:
        assert len(set(world.members)) == len(world.members) >= rules.min_size
        assert rules.max_size is None or len(world.members) <= rules.max_size
    generations = [each.world.generation for each in scene.of(m.Publish)]  # type: ignore[union-attr]
    assert generations == list(range(len(generations)))
    ends = [each.generation for each in scene.of(m.End)]  # type: ignore[union-attr]
    assert ends == sorted(set(ends))


def play(scene: Scene, what: str, n: int, hosts: list[dict[str, int]]) -> None:
    def one_of(numbers: set[int]) -> int | None:
        return sorted(numbers)[n % len(numbers)] if numbers else None

    training = scene.alive - scene.waiting - {w for w in scene.alive if scene.generation[w] < 0}
    if what == "leave" and (number := one_of(scene.told_to_leave)) is not None:
        scene.ready(number)
    elif what == "error" and (number := one_of(training)) is not None:
        scene.ready(number, why="PeerLost")
    elif what == "start":
        number = one_of({w for w in scene.alive - scene.waiting if scene.generation[w] < 0})
        if number is not None:
            scene.ready(number)
    elif what == "lose" and (number := one_of(scene.alive)) is not None:
        scene.exit(number)
    elif what == "commit" and training and training == set(scene.world.members):
        for number in training:
            scene.commits[number] += 1
    elif what == "hosts":
        scene.hosts(**hosts[n % len(hosts)])
    elif what == "time":
        scene.at(scene.now + n)


@given(rules, some_hosts, events)
@settings(max_examples=300, deadline=None)
def test_any_history(
    rules: Policy, hosts: list[dict[str, int]], history: list[tuple[str, int]]
) -> None:
    """At every moment the promises hold; and when nothing more goes wrong, training goes on."""
    scene = Scene(Membership(rules))
    scene.hosts(**hosts[0])
    scene.take(scene.members.on_enrolled(0, 0.0))
    for what, n in history:
        play(scene, what, n, hosts)
        check(scene, rules)
    for _ in range(300):
        if scene.members.failed:
            assert isinstance(scene.log[-1], m.Fail) or scene.of(m.Fail)
            return
        scene.obey()
        check(scene, rules)
        due = scene.members.next_due(scene.now)
        if due is not None:
            scene.at(due)
    world = scene.members.world
    if world is None:
        assert sum(hosts[0].values()) == 0 or scene.members.failed
        return
    assert not scene.members.over
    assert set(world.members) & scene.waiting == set()
    assert len(world.members) >= rules.min_size


@given(st.integers(0, 2**32))
@settings(max_examples=3, deadline=None)
def test_ten_thousand_hosts(seed: int) -> None:
    count = 10_000
    names = {f"h{n}": 1 for n in range(count)}
    scene = Scene(Membership(policy(count, least=1)))
    scene.hosts(**names)
    for number in range(count):  # as the driver would: only the last one is worth a look
        scene.members.workers[number].ready_since = 0.0
        scene.members.workers[number].commits = scene.commits[number] = 0
        scene.waiting.add(number)
    scene.at(0.0)
    scene.take(scene.members.on_enrolled(0, 0.0))
    assert len(scene.world.members) == count
    lost = {(seed + 7919 * n) % count for n in range(20)}
    for number in lost:
        scene.exit(number)
    for number in set(range(count)) - lost - {(seed + 1) % count}:
        scene.members.workers[number].ready_since = 0.0
        scene.members.workers[number].commits = scene.commits[number] = 0
        scene.waiting.add(number)
    scene.at(0.0)
    if (seed + 1) % count not in lost:
        assert scene.world.generation == 0
        scene.ready((seed + 1) % count, why="PeerLost")
    assert scene.world.members == tuple(n for n in range(count) if n not in lost)
