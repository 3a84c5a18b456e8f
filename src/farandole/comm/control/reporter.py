"""A rank's reports to the watch: where its threads are blocked, and that rank 0 listens at all."""

from __future__ import annotations

import logging
import threading

from farandole.comm.control import stacks, wording
from farandole.comm.control.link import Link
from farandole.comm.control.position import Position
from farandole.comm.control.waits import Blocked, Report, Waits
from farandole.core.clock import SYSTEM_CLOCK
from farandole.core.config import Settings

PONG_LIMIT = 2.0
"""Seconds that rank 0 may take to answer, on a machine that is very busy."""

_log = logging.getLogger(__name__)


class Reporter:
    """Sends a report when what it would say has changed. Any thread may call anything.

    Made by the thread that forms the group. Without a ``link`` it only keeps the books.
    """

    def __init__(self, rank: int, settings: Settings) -> None:
        self.link: Link | None = None
        self.waits = Waits(threading.current_thread())
        self._rank = rank
        self._settings = settings
        self._lock = threading.Lock()
        self._told = Report()
        self._answered = 0
        self._heard = SYSTEM_CLOCK.now()
        self._asked: float | None = None
        self._warned = False

    def enter(self, blocked: Blocked) -> None:
        """The calling thread begins to wait."""
        self.waits.enter(blocked)
        if self._told.stuck:
            self._report()  # Another thread of this rank moves: it is not stuck after all.

    def leave(self, blocked: Blocked, *, completed: bool) -> None:
        """It waits no more."""
        self.waits.leave(blocked, completed=completed)
        if blocked.announced:
            self._report()

    def look(self, blocked: Blocked, now: float) -> None:
        """It waits still: say so when that has lasted long enough."""
        waited = now - blocked.since
        if waited >= self._settings.block_notice:
            blocked.announced = True
            self._report()
        if 0 < self._settings.stall_warning <= waited and self.link is not None:
            self._look_after_rank_zero(self.link, blocked.position, waited, now)

    def on_news(self) -> None:
        """Something came from rank 0."""
        self._heard = SYSTEM_CLOCK.now()

    def on_answer(self) -> None:
        """A gather was answered: reports from before are out of date."""
        self._answered += 1
        if self._told.held:
            self._report(anew=True)

    def tell_where(self, question: int) -> None:
        """Rank 0 asks where this rank is."""
        if self.link is not None:
            text = stacks.describe(self.waits.threads())
            self.link.send("stack", ask=question, text=text, begun=self.waits.begun())

    def _report(self, *, anew: bool = False) -> None:
        with self._lock:
            report = self.waits.report()
            if self.link is None or (report == self._told and not anew):
                return
            self._told = report
            now = SYSTEM_CLOCK.now()
            self.link.send(
                "where",
                stuck=report.stuck,
                waits=[blocked.to_json(now) for blocked in report.held],
                begun=self.waits.begun(),
                answered=self._answered,
            )

    def _look_after_rank_zero(
        self, link: Link, position: Position, waited: float, now: float
    ) -> None:
        """Rank 0 would have warned. If it cannot, this rank has to."""
        if self._asked is not None and self._heard < self._asked:
            if not self._warned and now - self._asked > PONG_LIMIT:
                self._warned = True
                _log.warning("%s", wording.silent([(self._rank, position)], waited))
        elif self._asked is None or now - self._asked > self._settings.stall_warning:
            self._asked, self._warned = now, False
            link.send("ping")
