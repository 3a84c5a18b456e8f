"""The process's place among the ranks: ``init``, ``shutdown``, and who am I."""

from __future__ import annotations

import atexit
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence

from farandole.comm import group as groups
from farandole.core import log
from farandole.core.config import Settings
from farandole.core.errors import (
    ConnectionLost,
    DeadlineError,
    NotInitializedError,
    UsageError,
    UsageTypeError,
)
from farandole.core.topology import assigned
from farandole.monitor import report
from farandole.torch import chaos, timeline
from farandole.torch.process_sets import ProcessSet, add_process_set

_log = logging.getLogger(__name__)

_followed: weakref.WeakKeyDictionary[groups.GroupRef, groups.Group] = weakref.WeakKeyDictionary()
"""The group of each ref whose timeline was begun last."""

_at_exit = False
_sheet: report.TimeSheet | None = None
"""Where this process's time goes; ranks that are threads keep none."""


def init(
    comm: Sequence[int] | None = None, process_sets: str | Sequence[ProcessSet] | None = None
) -> None:
    """Join the job's other ranks; blocks until all have called it. Does nothing when repeated.

    Rank and size come from whoever started the process: ``farandole run``, torchrun, mpiexec,
    srun, Horovod's variables, Kubernetes' completion index; else the process is alone, with size
    1. Settings (``FARANDOLE_*``, ``HOROVOD_*``) are read now. :func:`shutdown` is called when the
    process ends; after it ``init()`` may be called again.

    ``process_sets`` are registered at once, the same on all ranks, as :func:`add_process_set` does;
    ``"dynamic"``, for scripts of Horovod, registers none. ``comm`` is Horovod's choice of ranks: it
    must be all of them.

    Raises ``DeadlineError`` after ``FARANDOLE_START_TIMEOUT`` (120) seconds, with the ranks that
    are missing, and ``UsageError`` when a setting or the place cannot be understood, when process
    sets repeat or differ between ranks, or ``comm`` is anything but all ranks.

    Example::

        import farandole.torch as hvd

        hvd.init()
        print(hvd.rank(), "of", hvd.size())
    """
    global _at_exit, _sheet
    fresh = not is_initialized()
    settings = Settings.from_environment()
    log.configure(settings.log_level)
    groups.form_root(settings)
    if _sheet is None and assigned.get() is None:
        _sheet = report.start()
    if not _at_exit:
        _at_exit = True
        atexit.register(_leave_at_exit)
    if fresh:
        try:
            if settings.chaos is not None:
                chaos.follow(settings.chaos)
            follow()
            _begin(comm, process_sets)
        except UsageError:
            shutdown()
            raise


def _begin(comm: Sequence[int] | None, sets: str | Sequence[ProcessSet] | None) -> None:
    """What ``init`` does once, with the group formed."""
    size = current().size
    if comm is not None and (not isinstance(comm, Sequence) or sorted(comm) != list(range(size))):
        raise UsageError(
            f"init() got comm={comm!r}, but Farandole uses no MPI communicators: all {size} ranks "
            "take part. Leave out comm, and use process sets for collectives among some ranks."
        )
    if isinstance(sets, str):
        if sets.lower() != "dynamic":
            raise UsageError(f'process_sets must be a list of sets, or "dynamic"; got {sets!r}.')
        return
    for process_set in sets or ():
        if not isinstance(process_set, ProcessSet):
            raise UsageTypeError(
                f"process_sets must hold hvd.ProcessSet objects, not {process_set!r}: write "
                "hvd.ProcessSet([0, 1])."
            )
        add_process_set(process_set)


def follow() -> None:
    """The root group has a successor: go on with what is recorded of this process."""
    ref = groups.root()
    before = _followed.get(ref)
    if before is not None and before is not ref.current:
        timeline.leave(before, failing=True)
    _followed[ref] = ref.current
    timeline.follow(ref.current)


def shutdown() -> None:
    """Leave the job. Collectives in flight raise ``ShutDownError``; repeating does nothing.

    Example::

        hvd.shutdown()
    """
    _leave(None)


def reason_of_end() -> str | None:
    """The error with which this process ends, if it does; for the other ranks to quote."""
    error = getattr(sys, "last_value", None)  # what Python has printed as the program's end
    return None if error is None else "".join(traceback.format_exception_only(error)).strip()


def _leave_at_exit() -> None:
    _leave(reason_of_end())


def before_shutdown(settle: Callable[[], None]) -> None:
    """Have ``settle`` called before this process leaves a job well, as long as there is a group.

    Example::

        before_shutdown(checkpoints.wait)
    """
    _settling.append(settle)


_settling: list[Callable[[], None]] = []


def _leave(reason: str | None) -> None:
    if is_initialized():
        if reason is None and current().broken is None:
            for settle in _settling:
                settle()
        timeline.leave(current(), failing=reason is not None)
        if _sheet is not None:
            _hand_in(_sheet)
    groups.leave_root(reason)


def _hand_in(sheet: report.TimeSheet) -> None:
    """Leave the time sheet where the launcher, if one started us, looks for it."""
    meeting, group = groups.root().meeting, current()
    if meeting is None or group.settings.store_address is None:
        return
    try:
        meeting.store.set(f"report/{group.rank}", sheet.to_json().encode())
    except (ConnectionLost, DeadlineError) as error:
        _log.info("The launcher is gone; the time sheet of rank %d is lost: %s", group.rank, error)


def is_initialized() -> bool:
    """Whether this process is between :func:`init` and :func:`shutdown`.

    Example::

        if not hvd.is_initialized():
            hvd.init()
    """
    try:
        groups.root()
    except NotInitializedError:
        return False
    return True


def current() -> groups.Group:
    """The root group of now. ``NotInitializedError`` before :func:`init`."""
    return groups.root().current


def rank() -> int:
    """This process's number among all, from 0. Raises ``NotInitializedError`` before ``init()``.

    Example::

        if hvd.rank() == 0:
            torch.save(model.state_dict(), "model.pt")
    """
    return current().rank


def size() -> int:
    """How many processes there are. Raises ``NotInitializedError`` before ``init()``.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    """
    return current().size


def local_rank() -> int:
    """This process's number among those on the same machine: the index of its GPU.

    Raises ``NotInitializedError`` before ``init()``.

    Example::

        torch.cuda.set_device(hvd.local_rank())
    """
    return current().local_rank


def local_size() -> int:
    """How many processes are on this machine. Raises ``NotInitializedError`` before ``init()``.

    Example::

        threads = os.cpu_count() // hvd.local_size()
    """
    return current().local_size


def cross_rank() -> int:
    """This machine's number among those that have a process with this :func:`local_rank`.

    Raises ``NotInitializedError`` before ``init()``.

    Example::

        shard = shards[hvd.cross_rank()]
    """
    return current().cross_rank


def cross_size() -> int:
    """How many machines have a process with this :func:`local_rank`.

    Raises ``NotInitializedError`` before ``init()``.

    Example::

        nodes = hvd.cross_size()
    """
    return current().cross_size
