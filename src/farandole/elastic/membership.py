"""Who is in: from what happens to workers and hosts, what is to be done. Pure.

Events go in with the time at which they came, decisions come out; the driver acts on them, tests
replay them. Nothing here waits, reads a clock, or talks to anybody.

Theory
    Training is a sequence of **worlds**, each the fixed members of one generation. Between two
    worlds there is a moment at which nobody is in a group: every living member of the old one has
    said that it is *ready* for the next. Only then is the next one published, so it has exactly
    those who can come, and whatever happened meanwhile (a second loss, a new host, a host that
    vanished again) is in it. A loss after that ends the new world in the same way. Therefore there
    is no order of events in which two worlds are formed at once, and no vote: one driver, one
    decision.

    A worker is known by its number, never by rank or host, and numbers are not used again. So what
    a worker says about a generation that it is not in any more is recognised, and ignored.

    A member that is alive but computes holds up the next world, as it would hold up any collective;
    it is not lost before the same limit has passed. Who is frozen is for the agent to see, who is
    stuck in a world for the watch (:mod:`farandole.comm.control.watch`); both come in as losses.

A worker::

    starting ──ready──▶ waiting ──published──▶ member ──ready──▶ waiting …
        │                  │                     │
        └────── exit ──────┴─────── exit ────────┴──▶ gone (numbers are not used again)

The world::

    event                              what follows
    ---------------------------------  ----------------------------------------------------------
    a member ends with an error, or    the world ends; a replacement is started when its host may
    is frozen, or its host is gone     have one (see ``policy.cooldown``)
    a member left with an error        the world ends; nobody is lost but whom it names
    a member ends well                 no more worlds: training is done; who is new is sent away
    a newcomer is ready                ``Update``: the members leave at their next commit
    a host is gone from the list, or   ``Update``: as above; its ranks are left out of the next
    has fewer slots                    world and end in good order
    all living members are ready       the next world is published, if it is large enough
    … and it is too small, or a rank   wait for replacements and new hosts, ``patience`` seconds
    is to be replaced (``hold``)
    nobody who has the state lives     the job fails
    a worker does not come to init()   it is ended, as a loss
    in time while others wait there
    a member does not leave a world    it is named after ``policy.stall_warning``, and ended, as a
    that others have left              loss, after ``policy.stall_timeout``

The order of ranks: those who hold the last commit before those who missed it, then as before, then
newcomers by number. So rank 0 is the oldest survivor with the newest state. With ``hold`` everybody
keeps its rank, and newcomers take the ranks of the lost; ``World.source`` says whose state counts.
The last member that has the state stays, even if its host is gone from the list, until another has
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from farandole.core.worlds import World
from farandole.elastic import stragglers
from farandole.elastic.decisions import (
    NEVER_CAME,
    NOT_ELASTIC,
    RESET_LIMIT_EXCEEDED,
    STATE_LOST,
    Decision,
    Dismiss,
    End,
    Fail,
    Kill,
    Publish,
    Refuse,
    Spawn,
    Update,
)
from farandole.elastic.policy import FORGIVEN_AFTER, HOLD, HOST, Policy, cooldown
from farandole.elastic.roster import Host, Worker

SETTLE = 5.0
"""Seconds that a newcomer who is ready waits for others who are being started."""

RESPITE = 0.5
"""Seconds that survivors who go on without a lost rank have its host for themselves: a replacement
that starts on cores which are all in use would hold up their next step."""

ENROL = 30.0
"""Seconds after a loss for the survivors to call ``elastic.run``, if none has so far."""


@dataclass
class Membership:
    """See the module. Every ``on_…`` returns what is to be done, in order."""

    policy: Policy
    workers: dict[int, Worker] = field(default_factory=dict)
    """Those that live, by number."""
    hosts: dict[str, Host] = field(default_factory=dict)
    world: World | None = None
    """The latest that was published."""
    over: bool = False
    """Whether that world has ended, and the next is being prepared."""
    resets: int = 0
    finishing: bool = False
    """Whether a member has ended well."""
    failed: bool = False
    enrolled: bool = False
    """Whether a worker has called ``elastic.run``."""
    _numbers: int = 0
    _generations: int = 0
    """The number of the next world."""
    _member_numbers: frozenset[int] = frozenset()
    _told: bool = False
    """Whether the members have been told to leave at a commit."""
    _short_since: float | None = None
    """Since when the next world has too few ranks."""
    _first_lost: int | None = None
    """The first that was lost since the latest world was published."""
    _broken: bool = False
    """Whether the latest world has ended by a loss or an error."""
    _lost_at: float = -math.inf
    _losses_at_start: int = 0
    """Workers that were lost before there was a world."""
    _trained: bool = False
    """Whether a member of some world has had state."""
    _held: tuple[int, ...] = ()
    """With ``hold``, the seats of the world by rank, of which some may be empty."""

    # ---- events

    def go_on_from(self, world: World | None) -> None:
        """``world`` is the latest that is known of an earlier driver, and :attr:`workers` live.

        See :mod:`farandole.elastic.reunion`.
        """
        self._numbers = 1 + max([*self.workers, *(world.members if world else ())], default=-1)
        if world is not None:
            self.world, self.resets = world, world.generation
            self._generations = world.generation + 2
            self._held, self._member_numbers = world.members, frozenset(world.members)

    def on_hosts(self, slots: Mapping[str, int], now: float) -> list[Decision]:
        """The hosts and their slots, as they are from now on.

        A host that had been gone, with all its workers, is another machine by the same name: its
        past is forgotten.
        """
        busy = {worker.host for worker in self.workers.values()}
        for name in slots:
            known = self.hosts.get(name)
            if known is None or (known.slots == 0 and name not in busy):
                self.hosts[name] = Host()
        for name, host in self.hosts.items():
            host.slots = slots.get(name, 0)
        return self._settle(now)

    def on_enrolled(self, number: int, now: float) -> list[Decision]:
        """A worker has called ``elastic.run``."""
        self.enrolled = True
        return self._settle(now)

    def on_ready(
        self,
        number: int,
        generation: int,
        now: float,
        *,
        commits: int = -1,
        why: str = "",
        lost: Iterable[int] = (),
        stuck: bool = False,
    ) -> list[Decision]:
        """A worker has left ``generation`` (-1: it is new) and waits for the next world.

        ``lost`` are those whom it holds for lost or, with ``stuck``, for alive but not coming.
        What a worker says of a world that it is not in changes nothing.
        """
        worker = self.workers.get(number)
        if worker is None or self.failed:
            return []
        worker.ready_since = now
        worker.commits = commits
        decisions: list[Decision] = []
        standing = not self.over and not self.finishing
        if self._is_member(number) and standing and self.world is not None:
            if generation != self.world.generation:
                # It came too late for the world that counts it in: that cannot form.
                why = why or f"worker {number} had not come"
            if why:
                gone = [each for each in lost if each in self.workers] if stuck else []
                why_gone = "it did not come to a collective that the others waited in"
                decisions += [stragglers.show(self.workers[each], why_gone, now) for each in gone]
                decisions += self._end(why, tuple(lost), now)
        return decisions + self._settle(now)

    def on_exit(self, number: int, *, well: bool, now: float) -> list[Decision]:
        """A worker's process has ended; ``well``: with exit code 0."""
        worker = self.workers.pop(number, None)
        if worker is None or self.failed:
            return []
        member = self._is_member(number)
        if worker.going:
            if member and not self.over:
                return self._end("a rank has left", (number,), now) + self._settle(now)
            return self._settle(now)
        if well and (member or self.world is None):
            self.finishing = True
            return self._settle(now)
        if self.finishing:
            return [self._fail("A rank failed after others had finished.", number)]
        return self._lose(worker, now, member=member) + self._settle(now)

    def on_tick(self, now: float) -> list[Decision]:
        """Time has passed: call it when :meth:`next_due` says."""
        return self._settle(now)

    def next_due(self, now: float) -> float | None:
        """When :meth:`on_tick` has something to say if nothing else happens; ``None``: never."""
        if self.failed or self.finishing:
            return None
        times = [host.avoided_until for host in self.hosts.values() if host.slots]
        times += [
            worker.ready_since + SETTLE
            for worker in self.workers.values()
            if worker.ready_since is not None
        ]
        times += [worker.since + self.policy.start_timeout for worker in self._starting()]
        times += stragglers.times(self.workers.values(), self._members(), self.policy)
        if self._short_since is not None:
            times.append(self._short_since + self.policy.patience)
        if self.over and not self.enrolled:
            times.append(self._lost_at + ENROL)
        return min((time for time in times if now < time < math.inf), default=None)

    # ---- losses

    def _lose(self, worker: Worker, now: float, *, member: bool) -> list[Decision]:
        host = self.hosts.setdefault(worker.host, Host())
        if now - host.last_loss > FORGIVEN_AFTER:
            host.losses = 0
        host.losses += 1
        host.last_loss = now
        respite = RESPITE if member and self._goes_on() else 0.0
        host.avoided_until = now + max(cooldown(host.losses, self.policy), respite)
        decisions: list[Decision] = []
        if self.policy.on_loss == HOST:
            decisions += self._clear(worker.host)
        if self._first_lost is None:
            self._first_lost = worker.number
        if self.world is None:
            self._losses_at_start += 1
            if self._losses_at_start > self.policy.start_size:
                count = self._losses_at_start
                why = f"The job did not get under way: {count} of its processes have failed."
                decisions.append(self._fail(why, self._first_lost))
        if member:
            decisions += self._end(f"worker {worker.number} was lost", (worker.number,), now)
        return decisions

    def _goes_on(self) -> bool:
        """Whether the members that are left train on without waiting for anybody."""
        waits = self.policy.on_loss_size == HOLD or self.policy.awaits_newcomers
        return not waits and len(self._members()) >= self.policy.min_size

    def _clear(self, host: str) -> list[Decision]:
        """End all other workers of a host."""
        decisions: list[Decision] = []
        for each in self.workers.values():
            if each.host == host and not each.going:
                each.going = True
                decisions.append(Kill(each.number, f"another rank of {host} was lost"))
        return decisions

    def _end(
        self, why: str, lost: tuple[int, ...], now: float, *, broken: bool = True
    ) -> list[Decision]:
        if self.world is None or self.over:
            return []
        self.over = True
        self._broken = broken
        self._told = False
        self._lost_at = now
        return [End(self.world.generation, why, lost)]

    # ---- what follows

    def _settle(self, now: float) -> list[Decision]:
        if self.failed:
            return []
        if self.finishing:
            return self._send_home()
        decisions = self._remove_unwanted() + self._heed_stragglers(now)
        decisions += self._spawn(now)
        if self.world is not None and not self.over:
            if all(worker.ready_since is not None for worker in self._members()):
                decisions += self._end("all ranks have left", (), now, broken=False)
            else:
                return decisions + self._update(now)
        return decisions + self._next_world(now)

    def _send_home(self) -> list[Decision]:
        """Training is done."""
        decisions: list[Decision] = []
        if self.world is None:
            # Ranks that never meet are no business of ours, unless others wait for them.
            if any(worker.ready_since is not None for worker in self.workers.values()):
                return [self._fail(NEVER_CAME, None)]
            return decisions
        for worker in self.workers.values():
            if worker.going:
                continue
            if not self._is_member(worker.number):
                worker.going = True
                decisions.append(Kill(worker.number, "training is done"))
            elif worker.ready_since is not None:
                worker.ready_since = None
                why = "a rank has ended its training, so nobody trains on with this one"
                decisions.append(Refuse(worker.number, why))
        return decisions

    def _wanted(self) -> set[int]:
        """The workers that have a place: on each host the oldest, up to its slots."""
        wanted: set[int] = set()
        taken: dict[str, int] = {}
        most = self.policy.max_size
        for number in sorted(self.workers):
            worker = self.workers[number]
            if worker.going or (most is not None and len(wanted) >= most):
                continue
            if taken.get(worker.host, 0) < self.hosts[worker.host].slots:
                taken[worker.host] = taken.get(worker.host, 0) + 1
                wanted.add(number)
        return wanted

    def _heed_stragglers(self, now: float) -> list[Decision]:
        """Those that live and do not come while others wait."""
        decisions = stragglers.end_for_good(self.workers.values(), now)
        if any(worker.ready_since is not None for worker in self.workers.values()):
            decisions += stragglers.end_latecomers(self._starting(), self.policy, now)
        if self.world is not None:
            decisions += stragglers.end_stuck(self.world, self._members(), self.policy, now)
        return decisions

    def _remove_unwanted(self) -> list[Decision]:
        """Newcomers without a place go at once, members when a world without them is made."""
        wanted = self._wanted()
        decisions: list[Decision] = []
        for worker in self.workers.values():
            if worker.number in wanted or worker.going or self._is_member(worker.number):
                continue
            worker.going = True
            decisions.append(Kill(worker.number, "its place is gone"))
        return decisions

    def _spawn(self, now: float) -> list[Decision]:
        if self.world is not None and not self.enrolled:
            return []  # nobody could take a newcomer in
        first = len(self._wanted())
        places = self._free_places(now)
        most = math.inf if self.policy.max_size is None else self.policy.max_size
        count = int(min(most - first, len(places)))
        decisions: list[Decision] = []
        for rank, (host, slot) in enumerate(places[: max(0, count)], first):
            number, self._numbers = self._numbers, self._numbers + 1
            self.workers[number] = Worker(number, host, slot, now)
            decisions.append(Spawn(number, host, slot, self.hosts[host].slots, rank, first + count))
        return decisions

    def _free_places(self, now: float) -> list[tuple[str, int]]:
        """Slots that may get a new worker, as ``(host, slot)``."""
        taken = {(worker.host, worker.slot) for worker in self.workers.values()}
        return [
            (name, slot)
            for name, host in self.hosts.items()
            if host.takes(now)
            for slot in range(host.slots)
            if (name, slot) not in taken
        ]

    def _update(self, now: float) -> list[Decision]:
        """Ask the members to leave at their next commit, if that changes anything."""
        assert self.world is not None
        if self._told:
            return []
        wanted = self._wanted()
        leaving = [w for w in self._members() if w.number not in wanted]
        coming = bool(self._newcomers())
        worth_it = self._settled_newcomers(now)
        if self.policy.awaits_newcomers and self._starting():
            coming = worth_it = True
        if not leaving and not worth_it:
            return []
        if leaving and not coming and len(leaving) == len(self._members()):
            return []  # nobody else has the state yet
        if not coming and len(self._members()) - len(leaving) < self.policy.min_size:
            return []  # training would only wait; should the host go, it is a loss
        self._told = True
        return [Update(self.world.generation, removed_only=not coming)]

    def _settled_newcomers(self, now: float) -> bool:
        """Whether newcomers are ready, and nobody who is about to be is worth a wait."""
        ready = [worker.ready_since for worker in self._newcomers()]
        since = [time for time in ready if time is not None]
        return bool(since) and (not self._starting() or now >= min(since) + SETTLE)

    # ---- the next world

    def _next_world(self, now: float) -> list[Decision]:
        members = self._members()
        if self.world is not None and not members:
            if not self.enrolled:
                return [self._fail(NOT_ELASTIC, self._first_lost)]
            return [self._fail(STATE_LOST, self._first_lost)]
        if self.over and not self.enrolled and now >= self._lost_at + ENROL:
            return [self._fail(NOT_ELASTIC, self._first_lost)]
        if any(worker.ready_since is None for worker in members):
            return []
        if self._some_are_ending():
            return []
        if self._trained and all(worker.commits < 0 for worker in members):
            return [self._fail(STATE_LOST, self._first_lost)]
        order = self._order(now)
        if self._is_enough(order, now):
            return self._publish(order)
        return self._wait_for_more(order, now)

    def _some_are_ending(self) -> bool:
        """Whether a member that was told to end still lives."""
        return self.world is not None and any(
            number in self.workers and self.workers[number].going for number in self.world.members
        )

    def _order(self, now: float) -> list[int]:
        """The ranks of the next world, as far as there is somebody for them."""
        wanted = self._wanted()
        members = self._members()
        newest = max((worker.commits for worker in members), default=-1)
        staying = [w for w in members if w.number in wanted]
        if members and not any(w.commits == newest for w in staying):
            staying.append(next(w for w in members if w.commits == newest))
        newcomers = sorted(w.number for w in self._newcomers() if w.ready_since is not None)
        if self.policy.on_loss_size == HOLD and self.world is not None:
            return self._reseated({w.number for w in staying}, newcomers)
        staying.sort(key=lambda w: w.commits != newest)  # stable: otherwise as before
        room = None if self.policy.max_size is None else self.policy.max_size
        return [*(w.number for w in staying), *newcomers][:room]

    def _reseated(self, staying: set[int], newcomers: list[int]) -> list[int]:
        """With ``hold``: everybody in its seat, newcomers in those that are empty."""
        left = list(newcomers)
        seats = []
        for number in self._held:
            if number in self.workers and number not in staying:
                continue  # it leaves in good order, and its seat with it
            if number in staying:
                seats.append(number)
            elif left:
                seats.append(left.pop(0))
        room = None if self.policy.max_size is None else self.policy.max_size
        return [*seats, *left][:room]

    def _is_enough(self, order: list[int], now: float) -> bool:
        if self.world is None:
            late = self._short_since is not None and (
                now >= self._short_since + self.policy.patience
            )
            least = self.policy.min_size if late else self.policy.start_size
            return len(order) >= least and not self._starting()
        if len(order) < self.policy.min_size:
            return False
        if self.policy.awaits_newcomers and self._starting():
            return False
        lost = sum(number not in self.workers for number in self._held)
        filled = sum(not self._is_member(number) for number in order)
        if self.policy.on_loss_size == HOLD and filled < lost:
            return self._short_since is not None and (
                now >= self._short_since + self.policy.patience
            )
        return True

    def _wait_for_more(self, order: list[int], now: float) -> list[Decision]:
        if self._starting() and (self.world is None or self.policy.awaits_newcomers):
            return []  # for how long is said by start_timeout
        if self._short_since is None:
            self._short_since = now
        wanted = max(self.policy.min_size, self.policy.start_size if self.world is None else 0)
        if not self._starting() and self._is_barren():
            return [self._fail(
                f"{len(order)} of at least {wanted} ranks are left, and all hosts are blacklisted, "
                "since ranks were lost on each of them. (--blacklist-cooldown-range brings hosts "
                "back.)", self._first_lost)]  # fmt: skip
        if now < self._short_since + self.policy.patience:
            return []
        return [self._fail(
            f"{len(order)} of at least {wanted} ranks could be had within "
            f"{self.policy.patience:g} s (--elastic-timeout).", self._first_lost)]  # fmt: skip

    def _is_barren(self) -> bool:
        """Whether hosts are named, and all of them are avoided for good."""
        named = [host for host in self.hosts.values() if host.slots]
        return bool(named) and all(host.avoided_until == math.inf for host in named)

    def _publish(self, order: list[int]) -> list[Decision]:
        limit = self.policy.reset_limit
        if self.world is not None:
            if limit is not None and self.resets >= limit:
                return [self._fail(RESET_LIMIT_EXCEEDED.format(limit), self._first_lost)]
            self.resets += 1
        before = self.world
        known = set() if before is None else set(before.members)
        newest = max(self.workers[number].commits for number in order)
        holders = [n for n in order if n in known and self.workers[n].commits == newest]
        fresh = () if before is None else tuple(n for n in order if n not in known)
        holds = self.policy.on_loss_size == HOLD
        lost = [number for number in self._held if number not in self.workers]
        decisions: list[Decision] = []
        chosen = frozenset(order)
        for worker in self._members():
            if worker.number not in chosen:
                worker.going = True
                decisions.append(Dismiss(worker.number, "its place in the job is gone"))
        self.world = World(
            generation=self._generations,
            members=tuple(order),
            hosts=tuple(self.workers[number].host for number in order),
            slots=tuple(self.workers[number].slot for number in order),
            fresh=fresh,
            source=order.index(holders[0]) if holders else 0,
            holds=holds,
            heirs=tuple(zip(lost, fresh, strict=False)) if holds else (),
            removed_only=chosen <= known and not self._broken,
        )
        for number in order:
            worker = self.workers[number]
            worker.ready_since = None
            worker.named = False
        self._generations += 1
        self._trained = self._trained or newest >= 0
        self._held, self._member_numbers = self.world.members, chosen
        self.over = self._told = False
        self._short_since = self._first_lost = None
        return [*decisions, Publish(self.world)]

    def _fail(self, why: str, culprit: int | None) -> Fail:
        self.failed = True
        return Fail(why, culprit)

    # ---- who is who

    def _is_member(self, number: int) -> bool:
        return number in self._member_numbers

    def _members(self) -> list[Worker]:
        """The members of the latest world that live and may stay, by rank."""
        if self.world is None:
            return []
        living = (self.workers.get(number) for number in self.world.members)
        return [worker for worker in living if worker is not None and not worker.going]

    def _newcomers(self) -> list[Worker]:
        """Workers that wait for their first world and have a place."""
        return [
            worker
            for worker in self.workers.values()
            if worker.ready_since is not None
            and not worker.going
            and not self._is_member(worker.number)
        ]

    def _starting(self) -> list[Worker]:
        """Workers that are on their way to their first world."""
        return [
            worker
            for worker in self.workers.values()
            if worker.ready_since is None
            and not worker.going
            and not self._is_member(worker.number)
        ]
