"""The driver and workers that are threads, in one store: who is told what, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from farandole.comm.summons import Removed, Summons
from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost, DeadlineError, PeerLost, StallError
from farandole.core.store import LocalStore
from farandole.core.worlds import World
from farandole.elastic import decisions
from farandole.elastic.driver import Driver
from farandole.elastic.policy import Policy

LIMIT = 20.0


@dataclass
class Hands:
    """Remembers what it was told to do."""

    spawned: list[decisions.Spawn] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def spawn(self, spawn: decisions.Spawn) -> None:
        self.spawned.append(spawn)

    def kill(self, number: int, *, show: bool) -> None:
        self.killed.append(number)

    def say(self, text: str) -> None:
        self.said.append(text)


class Job:
    """A driver whose loop is the test's."""

    def __init__(self, **rules: object) -> None:
        self.store = LocalStore()
        self.hands = Hands()
        self.woken = threading.Event()
        policy = Policy(**{"start_size": 2, "min_size": 1, **rules})  # type: ignore[arg-type]
        self.driver = Driver(policy, self.store, self.hands, self.woken.set)
        self.waiting: dict[int, threading.Thread] = {}
        self.answers: dict[int, World | Exception] = {}
        self.summons: dict[int, Summons] = {}

    def turn(self, until: int) -> None:
        """Turn the loop until so many workers have their answers."""
        end = Deadline.after(LIMIT)
        while len(self.answers) < until:
            assert self.woken.wait(0.01) or not end.expired()
            self.woken.clear()
            self.driver.pump(0.0)

    def ask(self, number: int, error: Exception | None = None) -> None:
        """Have a worker leave, because of an error or not, and ask for its next world."""
        summons = self.summons.setdefault(number, Summons(self.store, number))
        self.answers.pop(number, None)
        summons.leave(error)  # type: ignore[arg-type]

        def wait() -> None:
            try:
                self.answers[number] = summons.next_world()
            except (Removed, PeerLost, ConnectionLost) as refusal:
                self.answers[number] = refusal
            self.woken.set()

        self.waiting[number] = threading.Thread(target=wait, daemon=True)
        self.waiting[number].start()

    def started(self) -> World:
        self.driver.hosts_are({"a": 2}, 0.0)
        for number in (0, 1):
            self.ask(number)
        self.turn(2)
        self.summons[0].enrol()
        self.driver.pump(0.0)
        world = self.answers[0]
        assert isinstance(world, World)
        return world


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.store.close()


def test_workers_are_told_their_world_when_all_are_ready(job: Job) -> None:
    world = job.started()
    assert (world.generation, world.members, world.hosts) == (0, (0, 1), ("a", "a"))
    assert job.answers[1] == world
    assert world.local_rank(1) == 1
    assert world.local_size(1) == 2


def test_a_loss_poisons_the_generation_for_who_is_told_by_no_socket(job: Job) -> None:
    job.started()
    told = threading.Event()
    errors: list[PeerLost] = []
    listener = job.summons[0].listener

    def on_end(error: PeerLost) -> None:
        errors.append(error)
        told.set()

    listener.on_end(on_end)
    job.driver.exited(1, -9, 0.0)
    assert told.wait(LIMIT)
    assert errors[0].ranks == (1,)
    assert "worker 1 was lost" in errors[0].message
    # Who looks later is told at once, and nobody waits for a key of this generation.
    with pytest.raises(PeerLost, match="worker 1 was lost"):
        listener.patient(job.store).get("never", Deadline.after(LIMIT))
    listener.on_end(errors.append)
    assert len(errors) == 2
    job.ask(0, errors[0])
    job.turn(2)
    world = job.answers[0]
    assert isinstance(world, World)
    assert (world.generation, world.members) == (1, (0,))
    assert job.hands.said == ["farandole: training goes on with 1 rank (generation 1)."]


def test_members_hear_that_newcomers_wait(job: Job) -> None:
    job.started()
    told = threading.Event()
    job.summons[1].listener.on_update(lambda word: told.set())
    job.driver.hosts_are({"a": 2, "b": 1}, 0.0)
    assert job.hands.spawned[-1].host == "b"
    job.ask(2)
    while not told.is_set():
        assert job.woken.wait(LIMIT)
        job.woken.clear()
        job.driver.pump(0.0)
        told.wait(0.1)
    update = job.summons[1].listener.update
    assert update is not None
    assert not update.removed_only
    job.ask(0)
    job.ask(1)
    job.turn(3)
    world = job.answers[2]
    assert isinstance(world, World)
    assert (world.members, world.fresh) == ((0, 1, 2), (2,))


def test_who_has_no_place_any_more_is_dismissed(job: Job) -> None:
    job.started()
    job.driver.hosts_are({"a": 1}, 0.0)
    job.ask(0)
    job.ask(1)
    job.turn(2)
    assert isinstance(job.answers[1], Removed)
    assert isinstance(job.answers[0], World)


def test_when_training_is_done_nobody_is_given_a_world(job: Job) -> None:
    job.started()
    job.driver.exited(0, 0, 0.0)
    job.ask(1, PeerLost("Rank 0 left.", ranks=[0]))
    job.turn(2)
    answer = job.answers[1]
    assert isinstance(answer, PeerLost)
    assert "a rank has ended its training" in answer.message
    job.driver.exited(1, 0, 0.0)
    assert job.driver.over
    assert job.driver.failure is None


@pytest.mark.parametrize("kind", [StallError, DeadlineError])
def test_who_is_said_to_be_stuck_is_ended(job: Job, kind: type[Exception]) -> None:
    job.started()
    job.ask(0, kind("rank 1 did not come", ranks=[1]))  # type: ignore[call-arg]
    while not job.hands.killed:
        assert job.woken.wait(LIMIT)
        job.woken.clear()
        job.driver.pump(0.0)
    assert job.hands.killed == [1]
