"""The agent of a pod that is not node 0: it looks for node 0, and runs ranks for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import FarandoleError, SetupError
from farandole.core.secret import Secret
from farandole.launch import environment, link
from farandole.launch.agent import Agent
from farandole.launch.arrivals import SAY_EVERY
from farandole.launch.channel import Message
from farandole.launch.pod_job import TERMINATED, TRY_AGAIN

PAUSE = 1.0
"""Seconds between two attempts to reach node 0."""

_ATTEMPT = 5.0
"""Seconds for one attempt."""


class PodAgent(Agent):
    """The agent, which knows what it is to run before it knows for whom."""

    def __init__(self, channel: link.Link, task: dict[str, Any], secret: Secret) -> None:
        super().__init__(channel, None, {environment.SECRET: secret.hex()})
        self._known = task
        self.began = False
        """Whether ranks were started."""
        self.told_to_end = False
        """Whether this pod was."""
        self.ended_well = False
        """Whether the whole job did."""

    def _prepare(self, message: Message) -> None:
        shared = self._known["environment"] if self._known["fork"] else None
        super()._prepare(message._replace(fields={**message.fields, "environment": shared}))

    def _start(self, message: Message) -> None:
        self.began = True
        super()._start(message._replace(fields={**message.fields, **self._known}))

    def _finish(self, message: Message) -> None:
        self.ended_well = message.fields["well"]
        super()._finish(message)

    def _on_told_to_end(self) -> None:
        if self.told_to_end:
            return
        self.told_to_end = True
        if self.began:
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
    search = _Search(find, secret, patience)
    while True:
        signal.signal(signal.SIGTERM, on_signal)
        found = search.connect()
        found.send("ready", index=index, address=found.own_address, port=0)
        agent = PodAgent(found, task, secret)
        agent.run()
        found.close()
        if agent.ended_well:
            return 0
        if agent.told_to_end:
            return TERMINATED
        if agent.began:
            _say("the job has ended elsewhere, or node 0 is lost; this node is to be tried again")
            return TRY_AGAIN
        search.note("it is there, and does not take this node in yet")
        time.sleep(PAUSE)


class _Search:
    """For node 0, within one deadline, with a word now and then."""

    def __init__(self, find: Callable[[], Address], secret: Secret, patience: float) -> None:
        self._find = find
        self._secret = secret
        self._deadline = Deadline.after(patience)
        self._patience = patience
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

    def connect(self) -> link.Link:
        """A connection to whoever has the secret there."""
        while not self._deadline.expired():
            try:
                limit = min(_ATTEMPT, max(0.1, self._deadline.remaining() or _ATTEMPT))
                return link.connect(self._find(), self._secret, Deadline.after(limit))
            except FarandoleError as error:
                self.note(error.message)
            time.sleep(PAUSE)
        raise SetupError(
            f"Node 0 did not answer within {self._patience:g} s (start_timeout): {self._why}. Does "
            "its pod run, and may this one connect to it?"
        )


def _say(text: str) -> None:
    os.write(2, f"farandole: {text}\n".encode())
