"""The driver of an elastic job: hears the workers, has ``membership`` decide, and acts on it.

There is one by construction: it belongs to the job loop, and ends with it. It is the only one that
writes what workers act on (:mod:`farandole.core.worlds`). All of it runs in the job loop's thread;
only the inbox is filled by another one.

Where ranks can outlive it, a driver begins with a reunion (:mod:`farandole.elastic.reunion`), and
goes on from what is there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from farandole.core import worlds
from farandole.core.store import LocalStore
from farandole.core.worlds import Call, Enrolled, Ready, Returned, Word, World
from farandole.elastic import decisions
from farandole.elastic.decisions import Decision
from farandole.elastic.membership import Membership
from farandole.elastic.policy import Policy
from farandole.elastic.reunion import Reunion

_log = logging.getLogger(__name__)


class Hands(Protocol):
    """What the job loop does for the driver. Nothing of it waits."""

    def spawn(self, spawn: decisions.Spawn) -> None:
        """Start a worker; how it ends comes back by :meth:`Driver.exited`."""
        ...

    def kill(self, number: int, *, show: bool) -> None:
        """End a worker's process at once; with ``show`` it first shows where it is."""
        ...

    def say(self, text: str) -> None:
        """Show a line to the user."""
        ...


class Driver:
    """See the module. ``wake`` has the job loop call :meth:`pump`; any thread calls it."""

    def __init__(
        self,
        policy: Policy,
        store: LocalStore,
        hands: Hands,
        wake: Callable[[], None],
        reunion: Reunion | None = None,
    ) -> None:
        self.failure: decisions.Fail | None = None
        """Why the job has failed, once it has."""
        self.reunion = reunion
        """While what an earlier driver has left comes together."""
        self._policy = policy
        self._slots: Mapping[str, int] = {}
        self._membership = Membership(policy)
        self._store = store
        self._hands = hands
        self._wake = wake
        self._arrived: deque[bytes] = deque()
        self._calls: dict[int, int] = {}
        """The number of the ``Ready`` of each worker that waits for its answer."""
        self._words: dict[int, int] = {}
        """How many words each generation has had."""
        self._due: float | None = None
        self._place = 0
        self._read_on()

    @property
    def world(self) -> World | None:
        """The members of the latest generation."""
        return self._membership.world

    @property
    def over(self) -> bool:
        """Whether no worker lives and none will."""
        m = self._membership
        return not m.workers and (m.finishing or m.failed)

    def next_due(self, now: float) -> float | None:
        """When :meth:`pump` is to be called if nothing else happens; ``None``: never."""
        return self._due if self.reunion is None else self.reunion.next_due(now)

    def stop(self) -> None:
        """The job is being ended: decide nothing any more."""
        self._membership.failed = True

    def hosts_are(self, slots: Mapping[str, int], now: float) -> None:
        """The hosts and their slots, from now on."""
        self._slots = slots
        if self.reunion is None:
            self._act(self._membership.on_hosts(slots, now), now)

    def exited(self, number: int, code: int, now: float) -> None:
        """A worker's process has ended."""
        if self.reunion is not None:
            self.reunion.on_exit(number, well=code == 0)
            return
        self._act(self._membership.on_exit(number, well=code == 0, now=now), now)

    def expects_end_of(self, number: int) -> bool:
        """Whether a worker was told to end."""
        worker = self._membership.workers.get(number)
        return worker is None or worker.going

    def pump(self, now: float) -> None:
        """Take in what workers have said, and what time has brought."""
        self._reunite(now)
        while self._arrived and self.reunion is None:
            message = worlds.unpack_message(self._arrived.popleft())
            if isinstance(message, Returned):
                self._on_returned(message)
                continue
            if message.number not in self._membership.workers or self._is_of_another(message):
                continue
            if isinstance(message, Enrolled):
                self._act(self._membership.on_enrolled(message.number, now), now)
                continue
            self._calls[message.number] = message.call
            self._act(
                self._membership.on_ready(
                    message.number,
                    message.generation,
                    now,
                    commits=message.commits,
                    why=message.why,
                    lost=message.lost,
                    stuck=message.stuck,
                ),
                now,
            )
        if self._due is not None and now >= self._due:
            self._act(self._membership.on_tick(now), now)

    # ---- what an earlier driver has left

    def _reunite(self, now: float) -> None:
        """Hear who is there, and go on from that when it is enough."""
        if self.reunion is None:
            return
        for message in map(worlds.unpack_message, self._arrived.copy()):
            if isinstance(message, Returned):
                self.reunion.on_returned(message)
        if self.reunion.is_over(now):
            self._membership, decided = self.reunion.resume(self._policy, self._slots, now)
            self.reunion = None
            world = self._membership.world
            if world is not None:
                living = len(self._membership.workers)
                found = "1 process" if living == 1 else f"{living} processes"
                self._hands.say(
                    f"farandole: node 0 has begun anew, and found {found} of generation "
                    f"{world.generation}."
                )
            self._act(decided, now)
            self._act(self._membership.on_hosts(self._slots, now), now)

    def _on_returned(self, message: Returned) -> None:
        """Of a rank that had lost the store: it may be in a world that nobody else knows."""
        worker = self._membership.workers.get(message.number)
        members = () if self.world is None else self.world.members
        if worker is not None and message.world is not None and message.number not in members:
            self._hands.kill(message.number, show=False)

    def _is_of_another(self, message: Ready | Enrolled) -> bool:
        """Whether it is about a world of another driver's, that is not known here."""
        known = -1 if self.world is None else self.world.generation
        return isinstance(message, Ready) and message.generation > known

    # ---- the inbox

    def _read_on(self) -> None:
        """Wait for the next message. In whatever thread brought the one before."""
        self._place += 1
        self._store.watch(worlds.inbox_key(self._place), self._on_message)

    def _on_message(self, value: bytes | None) -> None:
        if value is None:
            return  # the store is closed: the job is over
        self._store.delete(worlds.inbox_key(self._place))
        self._arrived.append(value)
        self._read_on()
        self._wake()

    # ---- acting

    def _act(self, decided: list[Decision], now: float) -> None:
        for decision in decided:
            _log.info("%s", decision)
            self._carry_out(decision)
        self._due = self._membership.next_due(now)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, decisions.Spawn):
            self._hands.spawn(decision)
        elif isinstance(decision, decisions.Kill):
            if decision.show:
                self._hands.say(f"farandole: process {decision.number} is ended: {decision.why}.")
            self._hands.kill(decision.number, show=decision.show)
        elif isinstance(decision, decisions.Say):
            self._hands.say(f"farandole: {decision.text}")
        elif isinstance(decision, decisions.Publish):
            self._publish(decision.world)
        elif isinstance(decision, decisions.Update):
            self._tell(decision.generation, Word(kind="update", removed_only=decision.removed_only))
        elif isinstance(decision, decisions.End):
            self._tell(decision.generation, Word(kind="end", why=decision.why, lost=decision.lost))
        elif isinstance(decision, decisions.Dismiss):
            self._answer(decision.number, Call(removed=decision.why))
        elif isinstance(decision, decisions.Refuse):
            self._answer(decision.number, Call(ended=decision.why))
        else:
            self.failure = decision

    def _publish(self, world: World) -> None:
        self._store.set(worlds.world_key(world.generation), world.to_bytes())
        for number in world.members:
            self._answer(number, Call(generation=world.generation))
        self._forget(world.generation - 1)
        if world.generation > 0:
            new = f", {len(world.fresh)} of them new" if world.fresh else ""
            count = "1 rank" if len(world.members) == 1 else f"{len(world.members)} ranks"
            self._hands.say(
                f"farandole: training goes on with {count}{new} (generation {world.generation})."
            )

    def _answer(self, number: int, call: Call) -> None:
        self._store.set(worlds.call_key(number, self._calls.pop(number)), call.to_bytes())

    def _tell(self, generation: int, word: Word) -> None:
        place = self._words.get(generation, 0)
        self._words[generation] = place + 1
        self._store.set(worlds.word_key(generation, place), word.to_bytes())

    def _forget(self, generation: int) -> None:
        """All members of a generation have left it: its keys are of no more use.

        The last word stays: a worker's listener may only now be about to read it.
        """
        self._store.delete(worlds.world_key(generation))
        last = self._words.pop(generation, 0) - 1
        for place in range(last):
            self._store.delete(worlds.word_key(generation, place))
