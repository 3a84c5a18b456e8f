"""What a rank that has joined does for the plans that the others still run: passes of zeros.

A plan is never negotiated again, so nobody tells a rank that has joined when the others begin a
pass. It need not know: it begins one itself, with zeros for everything, at once and on every plan
of its groups. Its buckets wait in the engine until those of the others come. The guard of a pass
that comes back says how many ranks had part in it. When none had, the plan is over: all have
joined, or those who have not have agreed on another one. As many passes have run on each rank.

When the others begin a new plan, rank 0 tells this one that it is missed (``comm.control.hub``),
and it takes part in that agreement as it would have done before, but for the order of the
parameters, which it leaves to the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from farandole.comm.control.channel import Control
from farandole.comm.control.position import Position
from farandole.comm.engines.base import Work
from farandole.comm.fusion.reducer import Reducer
from farandole.core.errors import FarandoleBug, FarandoleError


class PlanLog:
    """How far one plan is on this rank; the numbers are the same on all ranks.

    ``build`` makes a reducer for the plan with buffers of its own.
    """

    def __init__(
        self, path: str, group: str, members: tuple[int, ...], build: Callable[[], Reducer]
    ) -> None:
        self.path = path
        self.group = group
        """The group's key."""
        self.members = members
        self.build = build
        self.absences = 0
        """How often this rank has been absent from it."""
        self._sequence = 0
        # Counted from the first one here: ranks that joined an elastic job later have taken fewer.
        self._first_step: int | None = None

    def next(self, count: int = 1) -> int:
        """The number of the next bucket to wait for, or of the first of the next ``count``."""
        first = self._sequence + 1
        self._sequence += count
        return first

    def after(self, count: int) -> int:
        """The number of the last of the next ``count`` buckets."""
        return self._sequence + count

    def step(self, steps: int) -> int:
        """Steps since the ranks last joined, of ``steps`` that the optimizer has taken."""
        if self._first_step is None:
            self._first_step = steps
        return steps - self._first_step

    def begin_anew(self) -> None:
        """All ranks have joined: from here on they count their steps alike again."""
        self._first_step = None
        self.absences += 1


class PlanBook:
    """The plans that the ranks of a group have agreed on. Kept when an optimizer is gone: it may
    live on elsewhere."""

    def __init__(self, group: str, members: tuple[int, ...]) -> None:
        self._group = group
        self._members = members
        self._lock = threading.Lock()
        self._logs: dict[str, PlanLog] = {}

    def register(self, path: str, build: Callable[[], Reducer]) -> PlanLog:
        """A plan was agreed on for ``path``; it takes the place of an earlier one."""
        with self._lock:
            log = self._logs.get(path)
            if log is None:
                log = self._logs[path] = PlanLog(path, self._group, self._members, build)
            log.build = build
            return log

    def find(self, path: str) -> PlanLog | None:
        """The plan of now for ``path``."""
        with self._lock:
            return self._logs.get(path)

    def logs(self) -> list[PlanLog]:
        """All plans of now."""
        with self._lock:
            return list(self._logs.values())


def release(control: Control, log: PlanLog) -> None:
    """Let the ranks that have joined go from the plan of ``log``, which another one replaces.

    Called, before that one is registered, on all ranks of the group that have not joined.
    """
    _pass_without(control, log, log.build())


def _pass_without(control: Control, log: PlanLog, reducer: Reducer) -> bool:
    """A pass in which this rank has no part; whether any rank had one."""
    plan = reducer.plan
    first = log.next(len(plan.buckets))

    def position(place: int) -> Position:
        return Position(
            path=log.path,
            group=log.group,
            sequence=first + place,
            what=f"bucket {place} of a pass without this rank",
            detail=plan.names(place),
            plan=plan.digest,
            members=log.members,
        )

    def wait_for(work: Work, place: int) -> None:
        if not work.wait(0.0):
            control.wait_for(work.wait, position(place))

    if plan.buckets:
        control.note_begun(position(len(plan.buckets) - 1))
    return reducer.abstain(wait_for)


Answer = Callable[[str], PlanLog | None]
"""Has part, for a rank that has joined, in the agreement on a plan that begins with the gather of
a topic. Blocks. The plan, or ``None`` when that is no topic which this rank knows."""


def no_answer(topic: str) -> PlanLog | None:
    """Knows no topic."""
    return None


Found = tuple[PlanLog, Callable[[], Reducer]]
"""A plan to be absent from. Its way to build a reducer is kept apart from ``log.build``: the others
may agree on another plan at any moment."""


class Absences:
    """The plans that this rank, which has joined, is absent from."""

    def __init__(self, control: Control, answer: Answer) -> None:
        self._control = control
        self._answer = answer
        self._lock = threading.Lock()
        self._absences: list[Absence] = []

    def begin(self, log: PlanLog) -> None:
        """Be absent from a plan that there is."""
        found = log, log.build
        self._add(lambda: found, log.path)

    def on_missed(self, topic: str) -> None:
        """The others gather for ``topic``; if that begins a plan, be absent from it."""
        before = self._all()

        def find() -> Found | None:
            log = self._answer(topic)
            if log is None:
                return None
            found = log, log.build
            for absence in before:
                if absence.log is log:
                    absence.join()
            return found

        self._add(find, topic)

    def wait(self) -> None:
        """Until no rank has part in any plan. Raises what went wrong."""
        for absence in self._all():
            absence.wait()

    def _add(self, find: Callable[[], Found | None], label: str) -> None:
        absence = Absence(self._control, find, label)
        with self._lock:
            self._absences.append(absence)

    def _all(self) -> list[Absence]:
        with self._lock:
            return list(self._absences)


class Absence:
    """Runs passes of zeros for the plan that ``find`` gives, in a thread of its own, until no rank
    has part in them."""

    def __init__(self, control: Control, find: Callable[[], Found | None], label: str) -> None:
        self.log: PlanLog | None = None
        self._control = control
        self._find = find
        self._label = label
        self._ended = threading.Event()
        self._error: FarandoleError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"farandole-joined-{label}", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Until it has ended, well or not."""
        self._thread.join()

    def wait(self) -> None:
        """Until no rank has part. Raises what went wrong."""
        if not self._ended.is_set():
            what = f"the last pass of {self._label}, which all ranks have joined"
            group, members = ("0", ()) if self.log is None else (self.log.group, self.log.members)
            position = Position("join", group, 0, what, members=members)
            self._control.wait_for(self._ended.wait, position)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            found = self._find()
            if found is None:
                return
            self.log, build = found
            reducer = build()
            while _pass_without(self._control, self.log, reducer):
                pass
            self.log.begin_anew()
        except FarandoleError as error:
            self._error = self._control.fail(error)
        except Exception as error:  # noqa: BLE001 - raised in join(), and on the other ranks
            bug = FarandoleBug(f"Joining failed on rank {self._control.rank}: {error!r}")
            self._error = self._control.fail(bug)
        finally:
            self._ended.set()
