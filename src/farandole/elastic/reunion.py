"""What a driver that begins finds of an earlier one: the ranks that have outlived it. Pure.

Where agents are started on their own (a job on a cluster), the process with the driver can die
while the ranks of other hosts live. Its replacement has an empty store and no memory. Agents and
ranks look for it; each agent says which processes it runs, and each rank which world it was in. Of
these the latest counts. Then the new driver knows what the old one knew, and what has happened
since is told to it as usual: the members that nobody runs any more are lost.

Nothing is decided, and nothing is started, until the reunion is over:

=======================================  ====================================================
what has come                            it is over when
=======================================  ====================================================
hosts without any process                all hosts are there, or after :data:`FIRST`: this is
                                         the begin of a job; after :data:`LAST` if the driver
                                         knows that it is a replacement
a rank that was in a world               all hosts of the latest world are there, and all its
                                         ranks that live; or after :data:`LAST`
processes, none of which was in a world  after :data:`LAST`
=======================================  ====================================================

What comes later is of an earlier job: it is ended, and begins anew.

The last world that was published may have reached nobody who is here. So the next one's number is
two above the latest that is known: no two worlds ever have the same number. The number of a process
that nobody who lives has heard of may be given again: it has left nothing to be mistaken for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from farandole.core.worlds import Returned, World
from farandole.elastic.decisions import Decision
from farandole.elastic.membership import Membership
from farandole.elastic.policy import Policy
from farandole.elastic.roster import Host, Worker

FIRST = 5.0
"""Seconds for the first processes of an earlier driver to show."""

LAST = 45.0
"""Seconds for the rest of them: an agent that has heard nothing looks for the new one every second,
and names may take half a minute to lead there."""


@dataclass
class Reunion:
    """See the module. ``own`` is the driver's own host, which runs nothing yet."""

    began: float
    own: str
    most_hosts: int
    """With so many hosts, all are there."""
    replaces: bool = False
    """Whether there was an earlier driver for certain; it is not known of one that is merely
    started again where it was."""
    running: dict[str, dict[int, int]] = field(default_factory=dict)
    """By host, the number of each process that runs there and its slot."""
    finished: dict[int, str] = field(default_factory=dict)
    """Processes that have ended well, and where. Of them, a member of the latest world has done its
    training; who was sent away has not."""
    told: dict[int, Returned] = field(default_factory=dict)
    """What ranks have said, by number."""

    def on_host(self, host: str, running: Mapping[int, int], finished: tuple[int, ...]) -> None:
        """An agent has come, and says what it runs and what has ended well there."""
        self.running[host] = dict(running)
        self.finished |= dict.fromkeys(finished, host)

    def on_exit(self, number: int, *, well: bool) -> None:
        """A process has ended."""
        for host, running in self.running.items():
            if running.pop(number, None) is not None and well:
                self.finished[number] = host

    def on_returned(self, message: Returned) -> None:
        """A rank has come."""
        self.told[message.number] = message

    @property
    def world(self) -> World | None:
        """The latest that a rank was in."""
        known = [each.world for each in self.told.values() if each.world is not None]
        return max(known, key=lambda world: world.generation, default=None)

    def next_due(self, now: float) -> float | None:
        """When it may be over although nothing more comes."""
        return min((t for t in (self._first_due, self.began + LAST) if t > now), default=None)

    @property
    def _first_due(self) -> float:
        return self.began + (LAST if self.replaces else FIRST)

    def is_over(self, now: float) -> bool:
        """See the table above."""
        if now >= self.began + LAST:
            return True
        living = {number for running in self.running.values() for number in running}
        if not living:
            return len({*self.running, self.own}) >= self.most_hosts or now >= self._first_due
        world = self.world
        if world is None:
            return False
        awaited = living & set(world.members)
        return awaited <= set(self.told) and set(world.hosts) <= {*self.running, self.own}

    def resume(
        self, policy: Policy, slots: Mapping[str, int], now: float
    ) -> tuple[Membership, list[Decision]]:
        """The membership as it is now, and what follows from what was lost meanwhile.

        ``slots`` are the hosts that are there. To be told to the membership once more afterwards:
        here the driver's own host counts as gone, with all that ran there.
        """
        world = self.world
        places = {n: (host, slot) for host, own in self.running.items() for n, slot in own.items()}
        members = () if world is None else world.members
        finished = {n: host for n, host in self.finished.items() if n in members}
        places |= {number: (host, 0) for number, host in finished.items()}
        gone = [number for number in members if number not in places]
        if world is not None:
            seats = zip(members, world.hosts, world.slots, strict=True)
            places |= {n: (host, slot) for n, host, slot in seats if n in gone}
        elsewhere = {name: n for name, n in slots.items() if name != self.own}
        names = {*elsewhere, *(host for host, _ in places.values())}
        membership = Membership(
            policy,
            workers={n: Worker(n, *places[n], since=now) for n in sorted(places)},
            hosts={name: Host(slots=elsewhere.get(name, 0)) for name in names},
            enrolled=any(each.enrolled for each in self.told.values()),
        )
        membership.go_on_from(world)
        decisions = [
            decision
            for number in gone
            for decision in membership.on_exit(number, well=False, now=now)
        ]
        for number in finished:
            decisions += membership.on_exit(number, well=True, now=now)
        return membership, decisions
