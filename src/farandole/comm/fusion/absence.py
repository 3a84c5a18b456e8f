"""What a rank that has joined does for the plans that the others still run: passes of zeros.

A plan is never negotiated again, so nobody tells a rank that has joined when the others begin a
pass. It need not know: it begins one itself, with zeros for everything, at once and on every plan
of its groups. Its buckets wait in the engine until those of the others come. The guard of a pass
that comes back says how many ranks had part in it; when none had, all have joined, and as many
passes have run on each rank.
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

    def __init__(self, path: str, build: Callable[[], Reducer]) -> None:
        self.path = path
        self.build = build
        self._sequence = 0
        self._first_step: int | None = 0

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


class PlanBook:
    """The plans that the ranks of a group have agreed on. Kept when an optimizer is gone: it may
    live on elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[str, PlanLog] = {}

    def register(self, path: str, build: Callable[[], Reducer]) -> PlanLog:
        """A plan was agreed on for ``path``; it takes the place of an earlier one."""
        with self._lock:
            log = self._logs.get(path)
            if log is None:
                log = self._logs[path] = PlanLog(path, build)
            log.build = build
            return log

    def logs(self) -> list[PlanLog]:
        """All plans of now."""
        with self._lock:
            return list(self._logs.values())


class Absence:
    """Runs passes of zeros for one plan, in a thread of its own, until no rank has part in them."""

    def __init__(
        self, control: Control, group: str, members: tuple[int, ...], log: PlanLog
    ) -> None:
        self._control = control
        self._group = group
        self._members = members
        self._log = log
        self._first = 0
        self._ended = threading.Event()
        self._error: FarandoleError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"farandole-joined-{log.path}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until all ranks have joined. Raises what went wrong."""
        if not self._ended.is_set():
            what = f"the last pass of {self._log.path}, which all ranks have joined"
            position = Position("join", self._group, 0, what, members=self._members)
            self._control.wait_for(self._ended.wait, position)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            reducer = self._log.build()
            count = len(reducer.plan.buckets)
            while True:
                self._first = self._log.next(count)
                self._control.note_begun(self._position(count - 1, reducer))
                if not reducer.abstain(lambda work, place: self._wait_for(work, place, reducer)):
                    break
            self._log.begin_anew()
        except FarandoleError as error:
            self._error = self._control.fail(error)
        except Exception as error:  # noqa: BLE001 - raised in join(), and on the other ranks
            bug = FarandoleBug(f"Joining failed on rank {self._control.rank}: {error!r}")
            self._error = self._control.fail(bug)
        finally:
            self._ended.set()

    def _wait_for(self, work: Work, place: int, reducer: Reducer) -> None:
        if not work.wait(0.0):
            self._control.wait_for(work.wait, self._position(place, reducer))

    def _position(self, place: int, reducer: Reducer) -> Position:
        return Position(
            path=self._log.path,
            group=self._group,
            sequence=self._first + place,
            what=f"bucket {place} of a pass without this rank, which has joined",
            detail=reducer.plan.names(place),
            plan=reducer.plan.digest,
            members=self._members,
        )
