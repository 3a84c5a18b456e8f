"""Where the time of a training went: computing, communicating, waiting for data.

Each rank keeps a :class:`TimeSheet` of what the events tell it; the launcher gathers the sheets and
prints one table. What is measured is the *training time*: from the request of a training batch to
the last optimizer step before something else begins (a validation, the end). Within it a rank

* *waits for data* while it is blocked in its data loader,
* *communicates* while it is blocked by communication; what travels under the backward pass costs
  nothing here and is not shown,
* *computes* the rest of the time.

Events cost well under a microsecond each; nothing is sent while the training runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from farandole.core import events


@dataclass(kw_only=True, slots=True)
class Totals:
    """What one rank did, in seconds and counts."""

    seconds: float = 0.0
    """Training time."""
    data: float = 0.0
    """Of it, waiting for training batches."""
    communication: float = 0.0
    """Of it, blocked by communication."""
    samples: int = 0
    """Samples of the batches that were trained on."""
    steps: int = 0
    """Optimizer steps taken."""

    @property
    def computing(self) -> float:
        """The rest of the training time."""
        return max(0.0, self.seconds - self.data - self.communication)

    def add(self, other: Totals) -> None:
        """Add up two spans."""
        self.seconds += other.seconds
        self.data += other.data
        self.communication += other.communication
        self.samples += other.samples
        self.steps += other.steps


class TimeSheet:
    """Adds up the events of this process from its creation until :meth:`stop`.

    ``now`` gives seconds; tests pass their own. Events may come from any thread of the process;
    the sums are those of a script that trains in one thread.

    Example::

        sheet = start()
        ...                       # train
        print(render({0: json.loads(sheet.to_json())}))
        sheet.stop()
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._done = Totals()
        self._span = Totals()
        """Since the last step of the span in progress; joins ``_done`` with the next step."""
        self._since: float | None = None
        self._stops = [
            events.subscribe(events.BatchLoaded, self._on_batch),
            events.subscribe(events.WaitFinished, self._on_wait),
            events.subscribe(events.StepFinished, self._on_step),
        ]

    def totals(self) -> Totals:
        """A copy of the sums up to the last step."""
        copy = Totals()
        copy.add(self._done)
        return copy

    def to_json(self) -> str:
        """The sums as JSON, for :func:`render`: the fields of :class:`Totals`."""
        return json.dumps(asdict(self._done))

    def stop(self) -> None:
        """Listen no more. Idempotent."""
        for stop in self._stops:
            stop()
        self._stops = []

    def _on_batch(self, event: events.BatchLoaded) -> None:
        if not event.training:
            self._since, self._span = None, Totals()
            return
        if self._since is None:
            self._since, self._span = self._now() - event.seconds, Totals()
        self._span.data += event.seconds
        self._span.samples += event.samples

    def _on_wait(self, event: events.WaitFinished) -> None:
        if self._since is not None:
            self._span.communication += event.seconds

    def _on_step(self, event: events.StepFinished) -> None:
        now = self._now()
        if self._since is not None:
            self._span.seconds = now - self._since
        self._span.steps = 1
        self._done.add(self._span)
        self._since, self._span = now, Totals()


def start(now: Callable[[], float] = time.perf_counter) -> TimeSheet:
    """Begin a time sheet of this process."""
    return TimeSheet(now)


def render(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """The table of a job, from each rank's report (the parsed :meth:`TimeSheet.to_json`).

    Returns the empty string when no rank has trained. Samples of all ranks count per second of the
    slowest rank.

    Example::

        >>> print(render({0: {"seconds": 4.0, "data": 0.4, "communication": 0.6,
        ...                   "samples": 8000, "steps": 250}}))
        trained on 8,000 samples in 4.0 s: 2,000 samples/s on 1 rank
        rank     computing  communicating  waiting for data
           0   3.0 s  75 %    0.6 s  15 %       0.4 s  10 %
    """
    ranks = {rank: Totals(**report) for rank, report in sorted(reports.items())}
    seconds = max((one.seconds for one in ranks.values()), default=0.0)
    if seconds <= 0.0:
        return ""
    count = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    samples = sum(one.samples for one in ranks.values())
    if samples:
        head = (
            f"trained on {samples:,} samples in {seconds:.1f} s: "
            f"{samples / seconds:,.0f} samples/s on {count}"
        )
    else:
        steps = max(one.steps for one in ranks.values())
        head = f"trained for {steps:,} steps in {seconds:.1f} s on {count}"
    lines = [head, "rank     computing  communicating  waiting for data"]
    lines += [
        f"{rank:>4}{_share(one.computing, one.seconds, 14)}"
        f"{_share(one.communication, one.seconds, 15)}"
        f"{_share(one.data, one.seconds, 18) if one.samples else 'not measured':>18}"
        for rank, one in ranks.items()
    ]
    return "\n".join(lines)


def _share(part: float, whole: float, width: int) -> str:
    percent = 100.0 * part / whole if whole > 0.0 else 0.0
    return f"{part:.1f} s {percent:3.0f} %".rjust(width)
