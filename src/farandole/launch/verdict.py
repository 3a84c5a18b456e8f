"""When a job has failed, who is to blame, and when the others are to be stopped. Pure.

Events go in with the time at which they came; :meth:`Verdict.due` says what is to be done.

========================  ====================================================================
event                     what follows
========================  ====================================================================
a rank ends with an       it has failed; the others are stopped at once
error
a rank reports an         it has failed; the others are stopped when it has shown its
uncaught exception        traceback and ended, at the latest after :data:`PRINTING`
the failed rank was       the others are stopped after :data:`CAUSE`, so that the cause, which
only a victim             may be about to end by itself, can show
a rank ends with 0        nothing; but if others are, or later come, in ``init()`` and it never
                          was there, it has failed
a rank's host is gone     it has failed; the others are stopped at once
start timeout             a rank that is missing shows its stack, which ends it: it has failed
========================  ====================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from farandole.core.errors import describe_ranks
from farandole.launch import failure
from farandole.launch.failure import Failure

CAUSE = 2.0
"""Seconds to wait for the cause when the first rank to fail was only a victim."""

PRINTING = 1.0
"""Seconds for a rank that has reported an exception, or shows its stack, to end."""

_TAIL = 32 * 1024
"""Bytes of each rank's last output that are kept for the message at the end."""


@dataclass
class Rank:
    """What is known of a rank."""

    number: int
    code: int | None = None
    """How it ended: exit code, negative for a signal; ``None`` while it runs."""
    report: dict[str, Any] | None = None
    """The uncaught exception that it told of."""
    in_init: bool = False
    stopped: bool = False
    """Whether it ended after it was told to."""
    done_without: bool = False
    """Whether it failed, and the job went on without it."""
    tail: deque[bytes] = field(default_factory=deque)

    def remember(self, chunk: bytes) -> None:
        """Keep the end of what it wrote to standard error."""
        self.tail.append(chunk)
        while sum(map(len, self.tail)) - len(self.tail[0]) > _TAIL:
            self.tail.popleft()

    def last_output(self) -> bytes:
        """The end of what it wrote to standard error."""
        return b"".join(self.tail)[-_TAIL:]


@dataclass(frozen=True)
class Stop:
    """Tell the ranks that still run to end."""


@dataclass(frozen=True)
class ShowStack:
    """Make a rank show where it is, which ends it."""

    rank: int


class Verdict:
    """The judgement of one job of ``size`` ranks."""

    def __init__(self, size: int, start_timeout: float) -> None:
        self.ranks = [Rank(number) for number in range(size)]
        self._start_timeout = start_timeout
        self._failures: dict[int, Failure] = {}
        self._stop_at: float | None = None
        self._stopping = False
        self._accused: int | None = None
        """The rank that did not come to ``init()`` in time."""
        self._first_init: float | None = None

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return all(rank.code is not None for rank in self.ranks)

    @property
    def cause(self) -> Failure | None:
        """The failure to show; ``None`` when every rank did its part."""
        failures = list(self._failures.values())
        return failure.root_cause(failures) if failures else None

    def on_init(self, number: int, now: float) -> None:
        """A rank has called ``init()``."""
        self.ranks[number].in_init = True
        if self._first_init is None:
            self._first_init = now
        self._judge_absent(now)

    def on_report(self, number: int, report: dict[str, Any], now: float) -> None:
        """A rank is about to end by an uncaught exception."""
        rank = self.ranks[number]
        rank.report = report
        told = Failure(
            rank=number,
            at=now,
            code=1,  # Python's, should it be stopped before it has ended by itself
            reason=f"raised {report['exception']}",
            victim=report["victim"],
            details=failure.shortened(report["traceback"].splitlines()),
        )
        self._fail(told, respite=PRINTING)

    def on_unstarted(self, number: int, why: str, now: float) -> None:
        """A rank's process could not be started."""
        reason = f"could not be started: {why}"
        self._fail(Failure(rank=number, at=now, code=127, reason=reason))

    def on_lost(self, number: int, why: str, now: float) -> None:
        """A rank's host is gone, and the rank with it."""
        rank = self.ranks[number]
        rank.code = 1
        rank.stopped = self._stopping
        self._fail(Failure(rank=number, at=now, code=1, reason=why))

    def on_exit(self, number: int, code: int, now: float) -> None:
        """A rank's process has ended; its output came before."""
        rank = self.ranks[number]
        rank.code = code
        rank.stopped = self._stopping
        known = self._failures.get(number)
        if number == self._accused:
            self._failures[number] = self._absence(
                rank, now, failure.last_words(rank.last_output())
            )
            self._stop_at = now
        elif known is not None and rank.report is not None:
            if not self._stopping:
                self._failures[number] = replace(known, code=code)
            if not known.victim:
                self._stop_at = now
        elif code != 0:
            stderr = rank.last_output()
            self._fail(
                Failure(
                    rank=number,
                    at=now,
                    code=code,
                    victim=failure.looks_like_victim(stderr),
                    details=failure.last_words(stderr),
                )
            )
        else:
            self._judge_absent(now)

    # In an elastic job others decide what is a failure of the job.

    def expect(self, number: int) -> None:
        """One more process; its number is the next."""
        assert number == len(self.ranks)
        self.ranks.append(Rank(number))

    def note_report(self, number: int, report: dict[str, Any]) -> None:
        """A process is about to end by an uncaught exception; whether that matters is open."""
        self.ranks[number].report = report

    def note_exit(self, number: int, code: int) -> None:
        """A process has ended; whether that matters is open."""
        rank = self.ranks[number]
        rank.code = code
        rank.stopped = self._stopping
        rank.done_without = code != 0 and not self._stopping

    def condemn(self, number: int, now: float) -> None:
        """The end of this process is the failure of the job."""
        rank = self.ranks[number]
        rank.done_without = False
        said = rank.report
        traceback = said["traceback"].splitlines() if said else None
        self._failures[number] = Failure(
            rank=number,
            at=now,
            code=rank.code,
            reason=f"raised {said['exception']}" if said else "",
            details=failure.shortened(traceback)
            if traceback
            else failure.last_words(rank.last_output()),
        )
        self._stop_at = now

    def call_off(self, now: float) -> None:
        """The job has failed by nobody's fault."""
        self._stop_at = now

    def stop(self) -> None:
        """The job is being stopped: what ranks do from now on is no failure."""
        self._stopping = True

    def next_due(self) -> float | None:
        """When :meth:`due` has something to say if nothing else happens; ``None``: never."""
        times = [self._stop_at, self._start_limit()]
        return None if self._stopping else min((t for t in times if t is not None), default=None)

    def due(self, now: float) -> Stop | ShowStack | None:
        """What is to be done now."""
        if self._stopping:
            return None
        if self._stop_at is not None and now >= self._stop_at:
            self._stopping = True
            return Stop()
        limit = self._start_limit()
        if limit is None or now < limit:
            return None
        rank = self._missing()[0]
        self._accused = rank.number
        # Should it not end by that, it is stopped like the others.
        self._failures[rank.number] = self._absence(rank, now, ["It did not show its stack."])
        self._stop_at = now + PRINTING
        return ShowStack(rank.number)

    def fates(self) -> dict[str, list[int]]:
        """What became of the ranks other than the cause."""
        cause = self.cause
        fates: dict[str, list[int]] = {
            "failed in the same way": [], "failed because of it": [], "failed too": [],
            "had finished": [], "stopped": [], "lost before": [],
        }  # fmt: skip
        if cause is None:
            return fates
        said = self.ranks[cause.rank].report
        for rank in self.ranks:
            own = self._failures.get(rank.number)
            if rank.number == cause.rank:
                continue
            if said and rank.report and rank.report["text"] == said["text"]:
                fates["failed in the same way"].append(rank.number)
            elif own is not None:
                fate = "failed because of it" if own.victim else "failed too"
                fates[fate].append(rank.number)
            elif rank.done_without:
                victim = rank.report is not None and rank.report["victim"]
                fates["failed because of it" if victim else "lost before"].append(rank.number)
            elif rank.code == 0 and not rank.stopped:
                fates["had finished"].append(rank.number)
            else:
                fates["stopped"].append(rank.number)
        return fates

    def _fail(self, new: Failure, *, respite: float = 0.0) -> None:
        if self._stopping:
            return
        self._failures.setdefault(new.rank, new)
        moment = new.at + (max(respite, CAUSE) if new.victim else respite)
        self._stop_at = moment if self._stop_at is None else min(self._stop_at, moment)

    def _missing(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.in_init]

    def _start_limit(self) -> float | None:
        """When the ranks that are not in ``init()`` are late; ``None``: none can be."""
        if self._first_init is None or self._accused is not None or not self._missing():
            return None
        return self._first_init + self._start_timeout

    def _judge_absent(self, now: float) -> None:
        """A rank that has ended well without ``init()`` fails those who wait for it there."""
        left = [rank for rank in self._missing() if rank.code == 0]
        if self._first_init is not None and left:
            reason = (
                f"ended without calling init() while {self._inside()} waited for it there. "
                "Every rank has to call init(), or none"
            )
            self._fail(Failure(rank=left[0].number, at=now, reason=reason))

    def _absence(self, rank: Rank, now: float, details: Iterable[str]) -> Failure:
        missing = [each.number for each in self._missing()]
        others = "" if len(missing) == 1 else f" (nor have others of {describe_ranks(missing)})"
        reason = (
            f"has not called init() within {self._start_timeout:g} s of the first one{others} "
            f"while {self._inside()} waited for it there; see --start-timeout"
        )
        return Failure(rank=rank.number, at=now, reason=reason, details=list(details))

    def _inside(self) -> str:
        return describe_ranks(rank.number for rank in self.ranks if rank.in_init)
