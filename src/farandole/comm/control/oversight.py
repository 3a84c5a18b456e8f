"""The standing watch: keeps what the ranks report, and has ``watch`` judge it while any waits.

Lives under the hub's lock. Without reports of blocked ranks there is no timer, and nothing runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.comm.control import message, watch, wording
from farandole.comm.control.message import Message
from farandole.comm.control.position import Channel, Position
from farandole.core.clock import SYSTEM_CLOCK
from farandole.core.config import Settings
from farandole.core.errors import FarandoleBug, FarandoleError
from farandole.core.server import Timer

ANSWER_LIMIT = 1.0
"""Seconds that a rank may take to say where it is."""

Later = Callable[[float, Callable[[], None]], Timer]
"""Calls after so many seconds."""

_log = logging.getLogger(__name__)


class Oversight:
    """What rank 0 knows of each rank, and what follows from it.

    ``send(rank, frame)`` reaches a rank, ``arrived()`` tells who has come to each open gather, and
    ``fail(error)`` breaks the group.
    """

    def __init__(
        self,
        size: int,
        settings: Settings,
        send: Callable[[int, bytes], None],
        arrived: Callable[[], Mapping[watch.GatherKey, frozenset[int]]],
        fail: Callable[[FarandoleError], None],
    ) -> None:
        self._limits = watch.Limits(
            settings.deadlock_after, settings.stall_warning, settings.stall_timeout
        )
        self._pause = min(0.25, settings.deadlock_after / 4)
        self._send = send
        self._arrived = arrived
        self._fail = fail
        self._views = [watch.RankView() for _ in range(size)]
        self._answered = [0] * size
        self._left: tuple[int, ...] = ()
        self._warned: frozenset[watch.OperationKey] = frozenset()
        self._question: _Question | None = None
        self._questions = 0
        self._later: Later | None = None
        self._timer: Timer | None = None

    def begin(self, later: Later) -> None:
        """Judge from now on; ``later`` makes timers."""
        self._later = later

    def end(self) -> None:
        """Judge no more: the group is broken or closed."""
        self._later = None

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks that have said goodbye."""
        return self._left

    def on_where(self, number: int, received: Message) -> None:
        """A rank reports what it is blocked in, or that it is not any more."""
        now = SYSTEM_CLOCK.now()
        # A report that crossed an answer on its way is out of date: that rank is about to move.
        current = received.integer("answered") == self._answered[number]
        size = len(self._views)
        self._views[number] = watch.RankView(
            stuck=current and received.fields["stuck"] is True,
            waits=tuple(_read_wait(each, now, size) for each in received.fields["waits"]),
            begun=read_begun(received.fields["begun"]),
            changed=now,
        )
        self._tick_later()

    def on_stack(self, number: int, received: Message) -> None:
        """A rank answers where it is."""
        begun, text = read_begun(received.fields["begun"]), received.text("text")
        self._views[number].begun = begun
        question = self._question
        if question is not None and question.number == received.integer("ask"):
            question.answers[number] = text
            if not question.is_open():
                self._warn(question)

    def stirred(self, number: int) -> None:
        """A rank did something, though its blocked threads may still be blocked."""
        self._views[number].changed = SYSTEM_CLOCK.now()

    def answered(self, number: int) -> None:
        """A gather was answered to a rank: it moves, until it reports anew."""
        self._answered[number] += 1
        view = self._views[number]
        view.stuck, view.changed = False, SYSTEM_CLOCK.now()

    def leave(self, number: int, begun: Mapping[Channel, int]) -> None:
        """A rank says goodbye."""
        now = SYSTEM_CLOCK.now()
        self._views[number] = watch.RankView(begun=begun, changed=now, left=True)
        self._left = tuple(sorted({*self._left, number}))

    def _tick_later(self) -> None:
        waiting = any(view.waits for view in self._views)
        if self._later is not None and self._timer is None and waiting:
            self._timer = self._later(self._pause, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._later is None:
            return
        try:
            self._judge()
        except Exception as error:  # noqa: BLE001 - a group without a watch might hang
            _log.error("The watch failed.", exc_info=error)
            self._fail(FarandoleBug(f"The watch in rank 0 failed: {error!r}", ranks=[0]))
        self._tick_later()

    def _judge(self) -> None:
        waits = [wait for view in self._views for wait in view.waits]
        self._warned &= frozenset(wait.operation for wait in waits)
        for verdict in watch.judge(self._state(), SYSTEM_CLOCK.now()):
            if isinstance(verdict, watch.Failure):
                self._fail(verdict.error)
            elif self._question is None:
                self._ask(verdict)

    def _state(self) -> watch.State:
        return watch.State(tuple(self._views), self._arrived(), self._limits, self._warned)

    def _ask(self, stalled: watch.Stalled) -> None:
        self._questions += 1
        self._question = question = _Question(self._questions, stalled.culprits)
        for number in stalled.culprits:
            self._send(number, message.pack("ask", ask=question.number))
        if question.is_open() and self._later is not None:
            self._later(ANSWER_LIMIT, lambda: self._warn(question))
        else:
            self._warn(question)

    def _warn(self, question: _Question) -> None:
        """Look again, now that the ranks have told what they have begun, and warn."""
        if question is not self._question:
            return
        self._question = None
        for verdict in watch.judge(self._state(), SYSTEM_CLOCK.now()):
            # Whoever else turns out to be the culprit is asked at the next look.
            if isinstance(verdict, watch.Stalled) and set(verdict.culprits) <= set(question.asked):
                self._warned |= verdict.operations
                places = [(rank, wait.position) for rank, wait in verdict.waits]
                told = [question.told(number) for number in verdict.culprits]
                text = wording.stalled(places, verdict.culprits, verdict.seconds, told)
                _log.warning("%s", text)


class _Question:
    """Ranks that were asked where they are, and what they have answered."""

    def __init__(self, number: int, asked: Sequence[int]) -> None:
        self.number = number
        self.asked = asked
        self.answers: dict[int, str] = {}

    def is_open(self) -> bool:
        return len(self.answers) < len(self.asked)

    def told(self, number: int) -> str:
        if number in self.answers:
            return f"Rank {number} is here:\n{self.answers[number]}"
        return (
            f"Rank {number} does not answer: its process is stopped, or busy in compiled code that "
            "does not let Python run."
        )


def require_members(members: Sequence[int], size: int) -> None:
    """Raise ``ValueError`` unless ``members`` are different ranks of a group of ``size``."""
    if len(set(members)) < len(members) or not all(0 <= each < size for each in members):
        raise ValueError(f"members {list(members)} of a group of {size}")


def read_begun(data: list[list[Any]]) -> dict[Channel, int]:
    """The highest number begun in each channel, from a message."""
    return {(str(path), str(group)): message.whole(number) for path, group, number in data}


def _read_wait(data: dict[str, Any], now: float, size: int) -> watch.Wait:
    position = Position.from_json(data["position"])
    require_members(position.members, size)
    gather = None
    if "topic" in data:
        members = tuple(map(message.whole, data["members"]))
        require_members(members, size)
        gather = (str(data["topic"]), members)
    return watch.Wait(position, now - message.seconds(data["waited"]), gather)
