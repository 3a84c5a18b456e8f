"""Runs a benchmark and tells what came out: as lines of text, as figures, as a plot.

A :class:`Comparison` has cases (an operation of one size on so many ranks, a model, ...), and of
each case the seconds of every system, round by round. The first system is ours.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.bench import launches, start
from farandole.bench.figures import Series, ratio, seconds_label, size_label, spread, summary

OPERATIONS = ("allreduce", "allgather", "reducescatter", "broadcast", "alltoall")
MODELS = ("transformer", "resnet18")
STEP_SYSTEMS = ("farandole", "ddp", "backend", "local")

RUN_LIMIT = 1800.0
"""Seconds after which ranks that still measure are taken for stuck."""


@dataclass(frozen=True)
class Case:
    """What all systems did."""

    ranks: int
    what: str
    """The operation, or the model."""
    size: int | None
    """Bytes of the message, where there is one."""
    seconds: Mapping[str, Series]
    """By system."""
    pairs: Mapping[str, tuple[str, str]]
    """What is compared: our system and its rival, by what the ratio is called."""

    @property
    def label(self) -> str:
        """As in ``2 ranks 1MiB``; the operation stands there unless it is the allreduce."""
        what = "" if self.what in ("allreduce", "launch") else f"{self.what} "
        size = "" if self.size is None else f" {size_label(self.size)}"
        return f"{what}{self.ranks} ranks{size}"

    def ratios(self) -> dict[str, float]:
        """Ours over the rival's of each pair, by ``NAME LABEL``."""
        return {
            f"{name} {self.label}": ratio(self.seconds[ours], self.seconds[rival])
            for name, (ours, rival) in self.pairs.items()
        }


@dataclass
class Comparison:
    """What a run has measured."""

    title: str
    cases: list[Case] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """What the final line of ``--json`` holds; seconds are medians."""
        ratios = {key: value for case in self.cases for key, value in case.ratios().items()}
        seconds = {
            f"{system} {case.label}": float(f"{spread(series).median:.4g}")
            for case in self.cases
            for system, series in case.seconds.items()
        }
        return {**summary(ratios), "seconds": seconds, "versions": self.versions}

    def lines(self) -> Iterator[str]:
        """A table: each case's medians with the quarters around them, then the ratios."""
        width = max((len(case.label) for case in self.cases), default=0)
        shown: Sequence[str] = ()
        for case in self.cases:
            systems = list(case.seconds)
            if systems != shown:
                shown = systems
                rivals = "".join(f"{f'vs {rival}':>12}" for rival in case.pairs)
                yield f"{'':{width}}" + "".join(f"{name:>25}" for name in systems) + rivals
            cells = "".join(f"{_cell(series):>25}" for series in case.seconds.values())
            ratios = "".join(f"{1 / value:>11.2f}x" for value in case.ratios().values())
            yield f"{case.label:{width}}{cells}{ratios}"
        yield "seconds: median (quarter … three quarters); vs: how many times faster we are"


def _cell(series: Series) -> str:
    middle = spread(series)
    median, unit = seconds_label(middle.median).split()
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    return f"{median} ({middle.low / scale:.3g} … {middle.high / scale:.3g}) {unit}"


def collectives(
    *,
    ranks: Sequence[int],
    systems: Sequence[str],
    operations: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    budget: float,
) -> Comparison:
    """Time ``operations`` of ``sizes`` bytes with ``systems``, of which the first is ours."""
    found = Comparison("Collectives", versions=_versions())
    options = {
        "systems": list(systems),
        "operations": list(operations),
        "sizes": list(sizes),
        "rounds": rounds,
        "budget": budget,
    }
    for count in ranks:
        result = start.run("collectives", count, options, mpi="mpi" in systems, limit=RUN_LIMIT)
        found.versions["torch"] = result["torch"]
        names = {name: result["mpi"] if name == "mpi" else name for name in systems}
        for operation, by_size in result["seconds"].items():
            for size, by_system in by_size.items():
                seconds = {names[name]: series for name, series in by_system.items()}
                ours, *rivals = seconds
                pairs = {rival: (ours, rival) for rival in rivals}
                found.cases.append(Case(count, operation, int(size), seconds, pairs))
    return found


def steps(
    *, ranks: Sequence[int], systems: Sequence[str], models: Sequence[str], steps: int
) -> Comparison:
    """Time steps of ``models``: our optimizer, and our backend, each against DDP with Gloo."""
    found = Comparison("Training step", versions=_versions())
    options = {"models": list(models), "systems": list(systems), "steps": steps}
    for count in ranks:
        result = start.run("step", count, options, limit=RUN_LIMIT)
        found.versions["torch"] = result["torch"]
        for model, seconds in result["seconds"].items():
            found.cases.append(Case(count, model, None, seconds, _pairs_of_steps(seconds)))
    return found


def _pairs_of_steps(seconds: Mapping[str, Series]) -> dict[str, tuple[str, str]]:
    if "ddp" not in seconds:
        return {}
    pairs = {"ddp": ("farandole", "ddp"), "backend": ("backend", "ddp")}
    return {name: pair for name, pair in pairs.items() if pair[0] in seconds}


def launch(*, ranks: Sequence[int], rounds: int) -> Comparison:
    """Time ``farandole run`` against ``torchrun``."""
    found = Comparison("Launch", versions=_versions())
    for count in ranks:
        seconds = launches.measure(count, rounds)
        ours, *rivals = seconds
        pairs = {rival: (ours, rival) for rival in rivals}
        found.cases.append(Case(count, "launch", None, seconds, pairs))
    return found


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"farandole": version("farandole"), "python": platform.python_version()}
