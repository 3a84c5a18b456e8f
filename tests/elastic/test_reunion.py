"""A driver that begins where another has died: the ranks that live go on with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_driver import LIMIT, Hands
from test_membership import Scene, events, play, policy, rules, some_hosts

from farandole.comm.summons import Summons
from farandole.core.clock import Deadline
from farandole.core.errors import PeerLost
from farandole.core.secret import Secret
from farandole.core.store import LocalStore, ReturningStore, StoreServer
from farandole.core.worlds import Returned, World
from farandole.elastic import decisions as m
from farandole.elastic.driver import Driver
from farandole.elastic.membership import Membership
from farandole.elastic.policy import Policy
from farandole.elastic.reunion import FIRST, LAST, Reunion

WORLD = World(
    generation=5, members=(0, 2, 3), hosts=("node 0", "node 1", "node 2"), slots=(0, 0, 0)
)


def returned(number: int, world: World | None = WORLD) -> Returned:
    return Returned(number=number, enrolled=True, world=world)


def reunion(most: int = 3) -> Reunion:
    return Reunion(began=0.0, own="node 0", most_hosts=most)


def of(kind: type[m.Decision], decided: list[m.Decision]) -> list[m.Decision]:
    return [each for each in decided if isinstance(each, kind)]


def test_a_job_that_begins_waits_for_its_hosts_and_not_for_long() -> None:
    new = reunion(most=2)
    assert not new.is_over(0.0)
    assert new.next_due(0.0) == FIRST
    new.on_host("node 1", {}, ())
    assert new.is_over(0.0)
    alone = reunion(most=2)
    assert alone.is_over(FIRST)
    members, decided = alone.resume(policy(1), {"node 0": 1}, FIRST)
    assert (members.world, decided) == (None, [])


def test_who_replaces_another_gives_the_ranks_of_that_time_to_find_it() -> None:
    new = Reunion(began=0.0, own="node 0", most_hosts=3, replaces=True)
    assert new.next_due(0.0) == LAST
    new.on_host("node 1", {}, ())
    assert not new.is_over(LAST - 1)
    new.on_host("node 2", {}, ())
    assert new.is_over(LAST - 1)
    assert Reunion(began=0.0, own="node 0", most_hosts=3, replaces=True).is_over(LAST)


def test_it_waits_for_the_ranks_and_hosts_of_the_latest_world() -> None:
    new = reunion()
    new.on_host("node 1", {2: 0}, ())
    assert not new.is_over(FIRST)
    new.on_returned(returned(2))
    assert not new.is_over(FIRST)  # node 2 is not there
    new.on_host("node 2", {3: 0}, ())
    assert not new.is_over(FIRST)  # its rank is not
    new.on_returned(returned(3, None))
    assert new.is_over(FIRST)
    assert not reunion().is_over(FIRST - 1)


@pytest.mark.parametrize("missing", ["host", "rank", "world"])
def test_it_does_not_wait_for_ever(missing: str) -> None:
    new = reunion()
    new.on_host("node 1", {2: 0}, ())
    if missing != "world":
        new.on_returned(returned(2))
    if missing != "host":
        new.on_host("node 2", {3: 0}, ())
    assert not new.is_over(LAST - 1)
    assert new.next_due(LAST - 1) == LAST
    assert new.is_over(LAST)


def resumed(new: Reunion, **slots: int) -> tuple[Scene, list[m.Decision]]:
    """As the driver does it."""
    hosts = {name.replace("_", " "): n for name, n in slots.items()}
    members, decided = new.resume(policy(1), hosts, 0.0)
    return Scene(members), [*decided, *members.on_hosts(hosts, 0.0)]


def test_the_lost_end_the_world_and_the_survivors_are_first_in_the_next() -> None:
    new = reunion()
    new.on_host("node 1", {2: 0}, ())
    new.on_host("node 2", {3: 0}, ())
    new.on_returned(returned(2))
    new.on_returned(returned(3))
    scene, decided = resumed(new, node_0=1, node_1=1, node_2=1)
    (end,) = of(m.End, decided)
    assert (end.generation, end.lost) == (5, (0,))  # type: ignore[union-attr]
    (spawn,) = of(m.Spawn, decided)
    assert (spawn.number, spawn.host) == (4, "node 0")  # type: ignore[union-attr]
    ready = scene.members.on_ready
    assert not of(m.Publish, ready(2, 5, 0.0, commits=7, why="rank 0 is gone"))
    (first,) = of(m.Publish, ready(3, 5, 0.0, commits=7, why="rank 0 is gone"))
    assert first.world.generation == 7  # type: ignore[union-attr]
    assert first.world.members == (2, 3)  # type: ignore[union-attr]
    (update,) = of(m.Update, ready(4, -1, 0.0))
    assert not update.removed_only  # type: ignore[union-attr]
    assert scene.members.resets == 6


def test_a_world_without_a_loss_goes_on() -> None:
    new = reunion()
    new.on_host("node 1", {2: 0}, ())
    new.on_returned(returned(2, World(generation=1, members=(2,), hosts=("node 1",), slots=(0,))))
    scene, decided = resumed(new, node_0=1, node_1=1)
    assert not of(m.End, decided)
    assert len(of(m.Spawn, decided)) == 1
    assert not scene.members.over


def test_of_two_worlds_the_later_one_counts_and_who_missed_it_ends_it() -> None:
    new = reunion()
    later = World(generation=6, members=(2, 3), hosts=("node 1", "node 2"), slots=(0, 0))
    new.on_host("node 1", {2: 0}, ())
    new.on_host("node 2", {3: 0}, ())
    new.on_returned(returned(2))
    new.on_returned(returned(3, later))
    scene, decided = resumed(new, node_0=0, node_1=1, node_2=1)
    assert not of(m.End, decided)
    (end,) = of(m.End, scene.members.on_ready(2, 5, 0.0, commits=7))
    assert end.generation == 6  # type: ignore[union-attr]


def test_a_member_that_has_ended_well_is_the_end_of_training() -> None:
    new = reunion()
    new.on_host("node 1", {2: 0}, ())
    new.on_host("node 2", {}, (3,))
    new.on_returned(returned(2))
    scene, decided = resumed(new, node_0=1, node_1=1, node_2=1)
    assert scene.members.finishing
    assert not of(m.Spawn, decided)


def test_the_good_end_of_who_was_sent_away_is_not_the_end_of_training() -> None:
    new = reunion()
    new.on_host("node 1", {2: 0}, (1,))
    new.on_host("node 2", {3: 0}, ())
    new.on_returned(returned(2))
    new.on_exit(1, well=True)
    scene, _ = resumed(new, node_0=1, node_1=1, node_2=1)
    assert not scene.members.finishing


def test_what_ends_while_it_waits_is_lost_or_has_finished() -> None:
    new = reunion()
    new.on_host("node 1", {2: 0, 3: 1}, ())
    new.on_returned(returned(2))
    new.on_exit(3, well=False)
    new.on_exit(2, well=True)
    assert new.running == {"node 1": {}}
    assert new.finished == {2: "node 1"}


@given(rules, some_hosts, events, st.integers(0, 2))
@example(  # a newcomer that was in no world dies with the driver
    policy(3, least=1, on_loss="rank", on_loss_size="hold", patience=50.0),
    [{"b": 2, "a": 1}],
    [("start", 0), ("lose", 1), ("start", 0), ("start", 0), ("lose", 1)],
    0,
)
@settings(max_examples=200, deadline=None)
def test_after_any_history_training_goes_on_with_who_lives(
    wanted: Policy, hosts: list[dict[str, int]], history: list[tuple[str, int]], own: int
) -> None:
    scene = Scene(Membership(wanted))
    scene.hosts(**hosts[0])
    scene.take(scene.members.on_enrolled(0, 0.0))
    for what, n in history:
        play(scene, what, n, hosts)
    if scene.members.failed or scene.members.world is None:
        return
    worlds = {each.world.generation: each.world for each in scene.of(m.Publish)}  # type: ignore[union-attr]
    home = sorted(scene.members.hosts)[own % len(scene.members.hosts)]
    new = Reunion(began=scene.now, own=home, most_hosts=9)
    old = scene.members.workers
    scene.alive = {n for n in scene.alive if old[n].host != home and not old[n].going}
    for n in scene.alive:
        new.running.setdefault(old[n].host, {})[n] = old[n].slot
        new.on_returned(returned(n, worlds.get(scene.generation[n])))
    slots = {name: host.slots for name, host in scene.members.hosts.items()}
    known = new.world
    again = [n for n in sorted(scene.alive) if n in scene.waiting]
    scene.waiting.clear()
    scene.told_to_leave.clear()
    scene.members, decided = new.resume(wanted, slots, scene.now)
    scene.log.clear()
    if known is None:
        # Nobody has the state: all begin anew, under numbers of their own.
        scene.generation = dict.fromkeys(scene.alive, -1)
    else:
        # A number that nobody who lives has heard of may be given again.
        heard_of = {*scene.alive, *known.members}
        scene.generation = {n: of for n, of in scene.generation.items() if n in heard_of}
    scene.take(decided)
    scene.hosts(**slots)
    for n in again:
        if n in scene.members.workers:
            scene.ready(n)
    for _ in range(300):
        if scene.members.failed:
            return
        scene.obey()
        due = scene.members.next_due(scene.now)
        if due is not None:
            scene.at(due)
    now = scene.members.world
    if known is not None:
        assert now is not None
        assert now is known or now.generation >= known.generation + 2
    if now is not None:
        assert set(now.members) <= scene.alive
        assert not scene.members.over


# ---- with real stores


@dataclass
class Cluster:
    """Workers that are threads, and a driver whose loop is the test's, and which dies."""

    secret: Secret = field(default_factory=Secret.new)
    summons: dict[int, Summons] = field(default_factory=dict)
    answers: dict[int, World | Exception] = field(default_factory=dict)
    stores: list[ReturningStore] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self.begin(Reunion(began=0.0, own="a", most_hosts=2))

    def begin(self, first: Reunion) -> None:
        self.store, self.hands, self.woken = LocalStore(), Hands(), threading.Event()
        self.server = StoreServer(self.secret, "127.0.0.1", self.port, self.store)
        self.port = self.server.address.port
        rules = Policy(start_size=2, min_size=1)
        self.driver = Driver(rules, self.store, self.hands, self.woken.set, first)

    def die(self) -> None:
        self.server.close()
        self.store.close()

    def turn(self, until: Callable[[], object]) -> None:
        end = Deadline.after(LIMIT)
        while not until():
            assert not end.expired()
            self.woken.wait(0.01)
            self.woken.clear()
            self.driver.pump(0.0)

    def ask(self, number: int, error: PeerLost | None = None) -> None:
        if number not in self.summons:
            store = ReturningStore(
                self.server.address, self.secret, Deadline.after(LIMIT), patience=LIMIT
            )
            self.stores.append(store)
            self.summons[number] = Summons(store, number)
        self.answers.pop(number, None)
        self.summons[number].leave(error)

        def wait() -> None:
            self.answers[number] = self.summons[number].next_world()

        threading.Thread(target=wait, daemon=True).start()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for store in made.stores:
        store.close()
    made.die()


def test_ranks_find_the_new_driver_also_those_that_wait_for_a_world(cluster: Cluster) -> None:
    cluster.driver.reunion.on_host("b", {}, ())  # type: ignore[union-attr]
    cluster.driver.hosts_are({"a": 1, "b": 2}, 0.0)
    cluster.driver.pump(0.0)
    for number in range(3):
        cluster.ask(number)
    cluster.turn(lambda: len(cluster.answers) == 3)
    world = cluster.answers[1]
    assert isinstance(world, World)
    cluster.summons[1].enrol()
    heard = threading.Event()
    cluster.summons[2].listener.on_end(lambda error: heard.set())
    # One has left its world and waits, the other one trains.
    lost = PeerLost("Rank 0 is gone.", ranks=[0])
    cluster.ask(1, lost)
    cluster.die()
    new = Reunion(began=0.0, own="a", most_hosts=2)
    new.on_host("b", {1: 0, 2: 1}, ())
    cluster.begin(new)
    cluster.driver.hosts_are({"a": 1, "b": 2}, 0.0)
    cluster.turn(heard.is_set)  # the new driver ends the old world
    cluster.ask(2, lost)
    cluster.turn(lambda: 2 in cluster.answers and 1 in cluster.answers)
    again = cluster.answers[1]
    assert isinstance(again, World)
    assert (again.generation, again.members) == (world.generation + 2, (1, 2))
    assert cluster.answers[2] == again
    assert "and found 2 processes of generation 0." in cluster.hands.said[0]
    assert [spawn.number for spawn in cluster.hands.spawned] == [3]


def test_who_is_in_a_world_that_nobody_else_knows_is_ended(cluster: Cluster) -> None:
    new = Reunion(began=0.0, own="a", most_hosts=3)
    new.on_host("b", {1: 0}, ())
    new.on_host("c", {7: 0}, ())
    cluster.die()
    cluster.begin(new)
    new.on_returned(returned(1, World(generation=0, members=(1,), hosts=("b",), slots=(0,))))
    cluster.driver.hosts_are({"a": 1, "b": 1, "c": 1}, 0.0)
    cluster.driver.pump(0.0)
    assert cluster.driver.reunion is None
    unknown = World(generation=1, members=(1, 7), hosts=("b", "c"), slots=(0, 0))
    Summons._post(cluster.store, returned(7, unknown))
    cluster.turn(lambda: cluster.hands.killed)
    assert cluster.hands.killed == [7]
