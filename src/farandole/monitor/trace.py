"""From events to trace events, the records of Chrome's format that Perfetto reads. Pure.

A rank is a *process* of the trace, ``pid`` its rank. Each name that is reduced, gathered, ... is a
*thread* of it, a row on the screen, in which spans lie one in another::

    NEGOTIATE_ALLREDUCE | ALLREDUCE
                        | QUEUE | MEMCPY_IN_FUSION_BUFFER | GLOO_ALLREDUCE | ...

The names of spans are Horovod's. A span is written when it begins and again when it ends, so one
that never ends shows where its rank was stuck.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from farandole.core import events
from farandole.core.events import Stage

ROOT = "0"
"""The key of the group of all ranks; rows of other groups say which."""

SHORTEST_WAIT = 50_000
"""Nanoseconds below which a wait is not worth a span."""

_INNER = {
    Stage.QUEUED: "QUEUE",
    Stage.PACKING: "MEMCPY_IN_FUSION_BUFFER",
    Stage.UNPACKING: "MEMCPY_OUT_FUSION_BUFFER",
}
_ENDS = (Stage.DONE, Stage.FAILED)


@dataclass
class _Row:
    """A thread of the trace. Nothing in it begins before what was there has ended."""

    tid: int
    free_from: int | None = 0
    """Nanoseconds; ``None`` while it is in use."""


@dataclass
class _Open:
    """A collective under way."""

    row: _Row
    now: int
    """Its last time, in nanoseconds: time in a row never goes backwards."""
    spans: list[str] = field(default_factory=list)
    """Those that have begun, the outer one first."""

    def settle(self) -> None:
        """Leave the row to others."""
        self.row.free_from = self.now


class Translator:
    """Turns one rank's events into trace events, each a line of JSON.

    ``shift`` nanoseconds are added to its clock. Events must come in the order of each
    collective's stages; one whose beginning was not seen is left out.
    """

    def __init__(self, rank: int, *, host: str = "", shift: int = 0) -> None:
        self._rank = rank
        self._host = host
        self._shift = shift
        self._rows: dict[str, list[_Row]] = {}
        self._count = 0
        self._open: dict[tuple[str, str, str], _Open] = {}
        self._left: dict[str, collections.deque[_Open]] = {}
        """Buckets that have left and are not back, by name; the oldest first."""

    def head(self) -> list[str]:
        """What introduces the rank."""
        return [
            self._about("process_name", {"name": f"rank {self._rank}"}),
            self._about("process_labels", {"labels": self._host}),
            self._about("process_sort_index", {"sort_index": self._rank}),
        ]

    def translate(self, event: object, seen: float) -> list[str]:
        """The lines of ``event``, which was heard of at ``seen`` (``time.perf_counter()``)."""
        if isinstance(event, events.RequestStaged):
            return list(self._stage(event))
        return list(self._mark(event, _nanoseconds(seen)))

    def _mark(self, event: object, end: int) -> Iterator[str]:
        if isinstance(event, events.CycleStarted):
            yield from self._instant("cycles", "CYCLE_START", _nanoseconds(event.at))
        elif isinstance(event, events.StepFinished):
            yield from self._instant("steps", "STEP", end, {"optimizer": event.optimizer})
        elif isinstance(event, events.BatchLoaded):
            yield from self._past("data", "DATA", end, event.seconds, {"samples": event.samples})
        elif isinstance(event, events.WaitFinished):
            if _nanoseconds(event.seconds) >= SHORTEST_WAIT:
                yield from self._past("waiting", "WAIT", end, event.seconds, {"for": event.path})
        elif isinstance(event, events.BucketLeft):
            yield from self._leave(event)
        elif isinstance(event, events.CollectiveFinished) and (left := self._left.get(event.name)):
            yield self._pop(left[0], end, {"bytes": event.bytes})
            left.popleft().settle()

    def _leave(self, event: events.BucketLeft) -> Iterator[str]:
        at = _nanoseconds(event.at)
        row, lines = self._find_row(f"gradients: {event.name}", at)
        yield from lines
        row.free_from = None
        self._left.setdefault(event.name, collections.deque()).append(bucket := _Open(row, at))
        yield self._push(bucket, "ALLREDUCE", at, None)

    def _stage(self, event: events.RequestStaged) -> Iterator[str]:
        key = (event.group, event.operation, event.name)
        at = _nanoseconds(event.at)
        known = self._open.get(key)
        if event.stage is Stage.NEGOTIATING:
            if known is not None:
                yield from self._close(key, known, at)
            yield from self._begin(key, at)
        elif known is not None:
            yield from self._advance(key, known, event, at)

    def _begin(self, key: tuple[str, str, str], at: int) -> Iterator[str]:
        group, operation, name = key
        # Each unnamed collective has a number of its own: one row each would be thousands.
        shared = name.startswith("noname.")
        title = f"{operation}.{'noname' if shared else name}"
        if group != ROOT:
            title += f" in {group.removeprefix(ROOT + '/')}"
        row, lines = self._find_row(title, at)
        yield from lines
        row.free_from = None
        self._open[key] = known = _Open(row, at)
        about = {"name": f"{operation}.{name}"} if shared else None
        yield self._push(known, f"NEGOTIATE_{operation.upper()}", at, about)

    def _advance(
        self, key: tuple[str, str, str], known: _Open, event: events.RequestStaged, at: int
    ) -> Iterator[str]:
        operation = event.operation.upper()
        if event.stage is Stage.FAILED:
            known.now = max(known.now, at)
            yield self._line(
                "FAILED", "i", known.row.tid, known.now, s="t", args={"error": event.detail}
            )
        if event.stage in _ENDS:
            yield from self._close(key, known, at)
            return
        if known.spans[0] != operation:
            yield self._pop(known, at)
            yield self._push(known, operation, at, None)
        elif len(known.spans) > 1:
            yield self._pop(known, at)
        if event.stage is Stage.MOVING:
            moved = "BCAST" if operation == "BROADCAST" else operation
            inner = f"{(event.transport or 'engine').upper()}_{moved}"
        else:
            inner = _INNER[event.stage]
        yield self._push(known, inner, at, {"detail": event.detail} if event.detail else None)

    def _close(self, key: tuple[str, str, str], known: _Open, at: int) -> Iterator[str]:
        while known.spans:
            yield self._pop(known, at)
        known.settle()
        del self._open[key]

    def _push(self, known: _Open, name: str, at: int, about: dict[str, Any] | None) -> str:
        known.now = max(known.now, at)
        known.spans.append(name)
        return self._line(name, "B", known.row.tid, known.now, args=about)

    def _pop(self, known: _Open, at: int, about: dict[str, Any] | None = None) -> str:
        known.now = max(known.now, at)
        return self._line(known.spans.pop(), "E", known.row.tid, known.now, args=about)

    def _past(
        self, title: str, name: str, end: int, seconds: float, about: dict[str, Any]
    ) -> Iterator[str]:
        """A span that is told of when it is over."""
        begin = max(0, end - _nanoseconds(seconds))
        row, lines = self._find_row(title, begin)
        row.free_from = end
        yield from lines
        yield self._line(name, "X", row.tid, begin, dur=_micro(end - begin), args=about)

    def _instant(
        self, title: str, name: str, at: int, about: dict[str, Any] | None = None
    ) -> Iterator[str]:
        row, lines = self._find_row(title, None)
        yield from lines
        row.free_from = max(at, row.free_from or 0)
        yield self._line(name, "i", row.tid, row.free_from, s="t", args=about)

    def _find_row(self, title: str, begin: int | None) -> tuple[_Row, list[str]]:
        """A row of that title that is free from ``begin`` on, and what introduces a new one."""
        rows = self._rows.setdefault(title, [])
        for row in rows:
            if begin is None or (row.free_from is not None and row.free_from <= begin):
                return row, []
        self._count += 1
        rows.append(row := _Row(self._count))
        shown = title if len(rows) == 1 else f"{title} #{len(rows)}"
        return row, [
            self._about("thread_name", {"name": shown}, tid=row.tid),
            self._about("thread_sort_index", {"sort_index": row.tid}, tid=row.tid),
        ]

    def _about(self, what: str, said: dict[str, Any], *, tid: int = 0) -> str:
        return json.dumps({"name": what, "ph": "M", "pid": self._rank, "tid": tid, "args": said})

    def _line(
        self,
        name: str,
        phase: str,
        tid: int,
        at: int,
        args: dict[str, Any] | None = None,
        **more: Any,
    ) -> str:
        # Written by hand: of what recording costs, most would be spent in the encoder.
        line = f'{{"name": {_quoted(name)}, "ph": "{phase}", "ts": {_micro(at + self._shift)!r}'
        line += f', "pid": {self._rank}, "tid": {tid}'
        for key, value in more.items():
            line += f', "{key}": {json.dumps(value)}'
        return f'{line}, "args": {json.dumps(args)}}}' if args else f"{line}}}"


def began_at(wall: float, monotonic: float) -> str:
    """The line that ties the trace's time to the calendar: when its ``ts`` 0 was, since 1970."""
    name = "start_time_since_epoch_in_micros"
    said = {name: round((wall - monotonic) * 1e6)}
    return json.dumps({"name": name, "ph": "M", "pid": 0, "tid": 0, "args": said})


@functools.lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _micro(nanoseconds: int) -> float:
    return nanoseconds / 1000
