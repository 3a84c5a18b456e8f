"""The agent of a pod that is not node 0: it looks for node 0, and runs ranks for it.

When node 0 is lost, the ranks of an elastic job go on, and the agent looks for whoever is node 0
next: it tells that one what it runs. The ranks of other jobs end then.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import FarandoleError, SetupError
from farandole.core.secret import Secret
from farandole.launch import environment, link
from farandole.launch.absent import Absent
from farandole.launch.agent import Agent
from farandole.launch.arrivals import SAY_EVERY
from farandole.launch.channel import Channel, Message
from farandole.launch.pod_job import TERMINATED, TRY_AGAIN
from farandole.launch.pulse import Pulse

PAUSE = 1.0
"""Seconds between two attempts to reach node 0."""

_NOT_YET = "it is there, and does not take this node in yet"

_ATTEMPT = 5.0
"""Seconds for one attempt."""


class PodAgent(Agent):
    """The agent, which knows what it is to run before it knows for whom."""

    def __init__(self, index: int, channel: link.Link, task: dict[str, Any], node_0: Node0) -> None:
        super().__init__(channel, None, {environment.SECRET: node_0.secret.hex()})
        self._index = index
        self._known = task
        self._node_0 = node_0
        self._search: _Search | None = None
        """While there is no node 0 that has taken this node in."""
        self.began = False
        """Whether ranks were started."""
        self.told_to_end = False
        """Whether this pod was."""
        self.ended_well = False
        """Whether the whole job did."""

    def close(self) -> None:
        """Give up the connection."""
        self._channel.close()

    # ---- without node 0

    def _is_over(self) -> bool:
        goes_on = self._replaces and not isinstance(self._channel, Absent)
        return self._finished or (self._channel.closed and not goes_on)

    def _turn(self) -> None:
        if self._channel.closed:
            self._look_for_node_0()
        super()._turn()
        if isinstance(self._channel, Absent) and self._channel.found is not None:
            self._come_back(self._channel.found)

    def _look_for_node_0(self) -> None:
        if self._search is None:
            _say("node 0 is lost; what runs here goes on, and waits for the next one")
            self._search = self._node_0.search()
        else:
            self._search.note(_NOT_YET)
        self._held = False  # there is nobody any more whose output is full
        self._go_on_with(Absent(self._search.connect_again))

    def _come_back(self, found: link.Link) -> None:
        self._go_on_with(found)
        self._pulse = Pulse()  # who is frozen is to be told once more
        workers = self._workers.values()
        found.send(
            "ready",
            index=self._index,
            address=found.own_address,
            port=0,
            running=[(w.rank, int(w.own["LOCAL_RANK"])) for w in workers if w.code is None],
            well=[w.rank for w in workers if w.code == 0],
        )

    def _go_on_with(self, channel: Channel) -> None:
        self._selector.unregister(self._channel)
        self._channel.close()
        self._channel = channel
        self._selector.register(channel, selectors.EVENT_READ, self._on_channel)

    # ---- messages

    def _prepare(self, message: Message) -> None:
        if self.began:
            return
        shared = self._known["environment"] if self._known["fork"] else None
        super()._prepare(message._replace(fields={**message.fields, "environment": shared}))

    def _start(self, message: Message) -> None:
        self.began = True
        self._search = None
        super()._start(message._replace(fields={**message.fields, **self._known}))

    def _spawn(self, message: Message) -> None:
        """The ranks, too, find a new node 0 by its name."""
        ranks = []
        for own in message.fields["ranks"]:
            store = Address(self._node_0.find().host, Address.parse(own["FARANDOLE_STORE"]).port)
            patience = {"FARANDOLE_DRIVER_TIMEOUT": f"{self._node_0.patience:g}"}
            ranks.append({**own, "FARANDOLE_STORE": str(store), **patience})
        super()._spawn(message._replace(fields={**message.fields, "ranks": ranks}))

    def _finish(self, message: Message) -> None:
        self.ended_well = message.fields["well"]
        super()._finish(message)

    def _on_told_to_end(self) -> None:
        if self.told_to_end:
            return
        self.told_to_end = True
        if self.began and not isinstance(self._channel, Absent):
            self._channel.send("terminated")
        else:
            self._finished = True


def serve(
    index: int,
    find: Callable[[], Address],
    secret: Secret,
    task: dict[str, Any],
    patience: float,
    on_signal: Callable[[int, object], None],
) -> int:
    """Run ranks for node 0, which ``find`` looks up; returns the pod's exit code.

    ``task``: form, argv, environment, fork. ``on_signal`` is the handler while nobody is reached.
    Raises ``SetupError`` when node 0 was not there for ``patience`` seconds.
    """
    node_0 = Node0(find, secret, patience)
    search = node_0.search()
    while True:
        signal.signal(signal.SIGTERM, on_signal)
        found = search.connect()
        found.send("ready", index=index, address=found.own_address, port=0)
        agent = PodAgent(index, found, task, node_0)
        agent.run()
        agent.close()
        if agent.ended_well:
            return 0
        if agent.told_to_end:
            return TERMINATED
        if agent.began:
            _say("the job has ended elsewhere, or node 0 is lost; this node is to be tried again")
            return TRY_AGAIN
        search.note(_NOT_YET)
        time.sleep(PAUSE)


@dataclass(frozen=True)
class Node0:
    """How it is found: where it is looked up, how it is known, and for how many seconds at most."""

    find: Callable[[], Address]
    secret: Secret
    patience: float

    def search(self) -> _Search:
        """A new one."""
        return _Search(self)


class _Search:
    """For node 0, within one deadline, with a word now and then."""

    def __init__(self, node_0: Node0) -> None:
        self._node_0 = node_0
        self._deadline = Deadline.after(node_0.patience)
        self._since = time.monotonic()
        self._said = self._since
        self._why = "not tried yet"

    def note(self, why: str) -> None:
        """Why it is not found yet; said every :data:`SAY_EVERY` seconds."""
        self._why = why
        now = time.monotonic()
        if now - self._said >= SAY_EVERY:
            self._said = now
            _say(f"waiting for node 0 ({now - self._since:.0f} s): {why}")

    def connect_again(self) -> link.Link:
        """Like :meth:`connect`, when whoever was there is gone, or does not take this node in."""
        time.sleep(PAUSE)
        return self.connect()

    def connect(self) -> link.Link:
        """A connection to whoever has the secret there."""
        while not self._deadline.expired():
            try:
                limit = min(_ATTEMPT, max(0.1, self._deadline.remaining() or _ATTEMPT))
                node_0 = self._node_0
                return link.connect(node_0.find(), node_0.secret, Deadline.after(limit))
            except FarandoleError as error:
                self.note(error.message)
            time.sleep(PAUSE)
        raise SetupError(
            f"Node 0 did not answer within {self._node_0.patience:g} s (start_timeout): "
            f"{self._why}. Does its pod run, and may this one connect to it?"
        )


def _say(text: str) -> None:
    os.write(2, f"farandole: {text}\n".encode())
