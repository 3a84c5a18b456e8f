"""The agents of pods that come and go, as one: each is a host of an elastic job while it is there.

A pod that comes is a new host, one whose connection ends is a lost one, and one that is told to end
is taken off the list, so that its ranks leave at their next commit; then it may go.

An agent that has outlived an earlier job loop brings what it runs with it. That is told by
``returned`` (host, running: pairs of process and slot, well: processes that have ended well), until
the job loop says :data:`REUNITED`; what comes later is ended. So is what an agent still runs whose
connection broke while this job loop was there: it counts as lost.
"""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from typing import Any

from farandole.core.errors import FarandoleBug, FarandoleError, SetupError
from farandole.core.server import Peer
from farandole.launch import early
from farandole.launch.channel import Channel, Message
from farandole.launch.elastic_fleet import ElasticFleet, Guest
from farandole.launch.fleet import Member
from farandole.launch.hosts import Share
from farandole.launch.task import Task

REUNITED = "reunited"
"""The message by which the job loop says that it goes on with what has come back."""


class ElasticArrivals(ElasticFleet):
    """See the module. To be used as a ``Channel``."""

    def __init__(self, task: Task, local: early.Agent) -> None:
        if task.meeting is None or task.elastic is None:
            raise FarandoleBug("This task has no place to meet, or is not elastic.")
        self._meeting = task.meeting
        ((self._first, self._slots),) = task.elastic.first.items()
        self._leaving: set[Member] = set()
        """Those that were told to end, or are lost: nothing is started there any more."""
        self._reunited = False
        super().__init__(task, local)

    def send(self, kind: str, /, **fields: Any) -> None:
        """See :class:`ElasticFleet`."""
        if kind == REUNITED:
            self._reunited = True
        else:
            super().send(kind, **fields)

    def _open(self, listen: str, *_: Any) -> None:
        meeting = self._meeting
        super()._open(meeting.address, meeting.secret, meeting.port)

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        """See ``core.server.Handler``. Nobody else knows more of the reason, so nothing waits."""
        self._post(lambda: self._on_left(peer))

    # ---- hosts

    def _guest(self, host: str, *_slots: int) -> Guest:
        known = self._guests.get(host)
        if known is not None:
            return known
        if host != self._first:
            raise SetupError(f"{host} is not there any more")
        guest = Guest(Share(host, range(0)), self._meeting.address, ready=True)
        guest.channel = Channel(self._agent.socket)
        self._local = guest
        self._guests[host] = guest
        self._members.append(guest)
        self._selector.register(guest.channel, selectors.EVENT_READ)
        guest.send("start", **self._wish)
        return guest

    def _on_ready(
        self,
        peer: Peer,
        index: int,
        address: str,
        port: int,
        running: Sequence[tuple[int, int]] = (),
        well: Sequence[int] = (),
    ) -> None:
        host = f"node {index}"
        known = self._guests.get(host)
        if known is not None:
            self._lose(known, "it has begun anew")
        if self._finishing or not self._wish:
            peer.close()
            return
        guest = Guest(Share(host, range(0)), self._meeting.address, ready=True)
        guest.peer = peer
        self._by_peer[peer] = guest
        self._guests[host] = guest
        self._members.append(guest)
        guest.send("prepare", stdin=False, environment=None)
        guest.send("start", ranks=[], replaces=True)
        self._take_back(guest, running, well)
        self._tell_hosts()

    def _take_back(
        self, guest: Guest, running: Sequence[tuple[int, int]], well: Sequence[int]
    ) -> None:
        if self._reunited:
            for number, _ in running:
                guest.send("end", rank=number)
            return
        guest.running = {number for number, _ in running}
        self._numbers |= dict.fromkeys(guest.running, guest)
        fields = {"host": guest.share.host, "running": running, "well": well}
        self._messages.append(Message("returned", fields, b""))

    def _lose(self, member: Member, why: str) -> None:
        if member in self._leaving:
            why = "it was told to end"
        elif not member.gone:
            # First, so that nothing is started anew there.
            self._leaving.add(member)
            self._tell_hosts()
        super()._lose(member, why)

    def _tell_hosts(self) -> None:
        if self._finishing:
            return
        names = {self._first, *self._guests}
        staying = sorted(name for name in names if self._guests.get(name) not in self._leaving)
        slots = dict.fromkeys(staying, self._slots)
        self._messages.append(Message("hosts", {"slots": slots}, b""))
        self._post(lambda: None)  # there is something to receive

    # ---- what agents say

    def _translate(self, member: Member, message: Message) -> None:
        rank = message.fields.get("rank")
        if rank is not None and self._numbers.get(rank) is not member:
            return  # of what was ended, see above
        if message.kind == "terminated":
            self._leaving.add(member)
            self._tell_hosts()
        else:
            super()._translate(member, message)
        if member in self._leaving and not member.running:
            member.send("finish", well=False)
