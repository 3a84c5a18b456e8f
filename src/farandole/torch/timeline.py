"""The timeline of a process: ``start_timeline``, ``stop_timeline``, and the one of the settings."""

from __future__ import annotations

import os
import threading
import weakref

from farandole.comm import group as groups
from farandole.comm.group import Group
from farandole.core.store import PrefixStore
from farandole.monitor import timeline
from farandole.monitor.timeline import Place, Timeline


class _Recordings:
    """Those of one group on this rank, one after another."""

    def __init__(self) -> None:
        self.count = 0
        self.current: Timeline | None = None


_of: weakref.WeakKeyDictionary[Group, _Recordings] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record what this rank does; Chrome and Perfetto show the file.

    Rank 0 writes ``file_path``, with the events of every rank that calls this; the other ranks
    send theirs to it, and their ``file_path`` is not looked at. The file exists when this returns
    on rank 0, replaces one that was there, and is valid JSON at any moment. ``mark_cycles`` shows
    when each cycle of the negotiation began.

    Does nothing while this very file is recorded; a recording in another file ends. Nobody waits
    for another rank here. Works whatever ``HOROVOD_TIMELINE`` was at ``init()``.

    Raises ``NotInitializedError`` before ``init()``, and on rank 0 ``UsageError`` when the file
    cannot be written.

    Example::

        hvd.start_timeline("/tmp/timeline.json")
        train(steps=20)
        hvd.stop_timeline()
    """
    _start(groups.root().current, os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording; what happened before is in the file when rank 0's call returns.

    Rank 0 waits for the ranks that record and have not ended it too, one second at most. Does
    nothing when nothing is recorded. ``NotInitializedError`` before ``init()``.

    Example::

        hvd.stop_timeline()
    """
    group = groups.root().current
    _stop(group, patience=timeline.LAST_CALL)


def follow(group: Group) -> None:
    """Record ``group`` from its beginning if the settings say so."""
    settings = group.settings
    if settings.timeline is not None:
        _start(group, settings.timeline, settings.timeline_mark_cycles)


def leave(group: Group, *, failing: bool) -> None:
    """End what is recorded of ``group``, which this rank is about to leave.

    A rank that fails waits for nobody: the others shall hear of it at once.
    """
    _stop(group, patience=0.0 if failing or group.broken else timeline.LAST_CALL)


def _start(group: Group, path: str, mark_cycles: bool) -> None:
    with _lock:
        mine = _of.setdefault(group, _Recordings())
    if mine.current is not None and mine.current.path == path:
        return
    _stop(group, patience=timeline.LAST_CALL)
    meeting = groups.root().meeting
    assert meeting is not None  # it is where the group was formed
    place = Place(
        rank=group.rank,
        hosts=group.topology.hosts,
        # Under the group's own keys, which go when the next generation has formed.
        store=PrefixStore(meeting.store, f"group/{group.generation}/timeline/"),
    )
    mine.count += 1
    mine.current = timeline.start(path, mine.count, place, mark_cycles=mark_cycles)


def _stop(group: Group, patience: float) -> None:
    with _lock:
        mine = _of.get(group)
    if mine is not None and mine.current is not None:
        current, mine.current = mine.current, None
        current.stop(patience)
