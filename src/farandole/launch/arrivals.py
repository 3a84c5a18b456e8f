"""The agents of hosts that come by themselves, as one: the pods of a job on a cluster.

Nobody is fetched. Each agent connects, proves that it holds the job's secret, and says which host
it is; it is told to get ready, and to start when all are there. One that goes before that may come
again; one that comes again later shows that what ran there is lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from farandole.core.errors import FarandoleBug, FarandoleError, SetupError
from farandole.core.server import Peer
from farandole.launch import early, environment
from farandole.launch.channel import Channel, Message
from farandole.launch.fleet import Fleet, Member
from farandole.launch.task import Task

SAY_EVERY = 30.0
"""Seconds between two words on who is awaited."""


class Arrivals(Fleet):
    """See the module. To be used as a ``Channel``."""

    def __init__(self, task: Task, local: early.Agent) -> None:
        if task.meeting is None:
            raise FarandoleBug("This task has no place to meet.")
        self._meeting = task.meeting
        self._task = task
        self._members = [Member(share, task.meeting.address) for share in task.hosts]
        self._open(task.meeting.address, task.meeting.secret, task.meeting.port)
        self._local = self._members[0]
        self._local.channel = Channel(local.socket)
        self._since = time.monotonic()

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        """See ``core.server.Handler``. Nobody else knows more of the reason, so nothing waits."""
        self._post(lambda: self._on_left(peer))

    def _begin(self, start: dict[str, Any]) -> None:
        self._start = start
        for member in self._members:
            member.running = set(member.share.ranks)
        assert self._local is not None
        self._prepare_local(self._local)
        self._later(self._meeting.patience, self._on_late)
        self._later(SAY_EVERY, self._say_who_is_missing)
        self._go_if_complete()

    def _go_if_complete(self) -> None:
        if self._start is not None and not self._missing():
            self._go(self._start)

    def _missing(self) -> list[Member]:
        return [member for member in self._members if member.master is None]

    def _start_elsewhere(
        self, member: Member, start: Mapping[str, Any], master: Mapping[str, str]
    ) -> None:
        """What is to be run the agent knows, and the secret, which does not travel here."""
        ranks = [{**own, **master} for own in self._own(member, start)]
        for own in ranks:
            del own[environment.SECRET]
        member.send("start", ranks=ranks)

    # ---- coming and going

    def _on_ready(self, peer: Peer, index: int, address: str, port: int) -> None:
        member = self._members[index]
        if self._start is None:
            peer.close()  # it tries again, and finds the job's next attempt
            if member.peer is not None:
                self._lose(member, "it has begun anew")
            return
        if member.peer is not None:
            del self._by_peer[member.peer]
            member.peer.close()
        self._by_peer[peer] = member
        member.peer = peer
        member.master = address, port
        member.send("prepare", stdin=False, environment=None)
        self._go_if_complete()

    def _on_left(self, peer: Peer) -> None:
        if self._start is None:
            super()._on_left(peer)
            return
        member = self._by_peer.pop(peer, None)
        if member is not None:
            member.peer = member.master = None
            self._tell(f"{member.share.host} has gone again before the start")

    def _say_who_is_missing(self) -> None:
        if self._start is not None:
            self._tell(f"waiting for {self._names()} ({time.monotonic() - self._since:.0f} s)")
            self._later(SAY_EVERY, self._say_who_is_missing)

    def _on_late(self) -> None:
        if self._start is not None:
            raise SetupError(
                f"{self._names()} did not come within {self._meeting.patience:g} s "
                "(start_timeout). Nothing was started. Do these pods run, and may they connect to "
                f"port {self._meeting.port} of node 0?"
            )

    def _names(self) -> str:
        return ", ".join(member.share.host for member in self._missing())

    def _tell(self, text: str) -> None:
        self._messages.append(Message("said", {"text": text}, b""))

    def _translate(self, member: Member, message: Message) -> None:
        if message.kind == "terminated":
            fields = {"node": member.share.host}
            self._messages.append(Message("terminated", fields, b""))
        else:
            super()._translate(member, message)
