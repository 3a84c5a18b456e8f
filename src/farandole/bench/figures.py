"""What measured seconds say: medians, their spread, and ratios of paired measurements. Pure.

A *series* holds the seconds of one system, one for each round of a run. Rounds are paired: in each
of them every system had its turn, close together, so that a noise of the machine met all. A ratio
is therefore the median of the rounds' ratios, not the ratio of the medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Series = Sequence[float]

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class Spread:
    """The middle of a series, and the quarters around it."""

    low: float
    """A quarter of the rounds took less."""
    median: float
    high: float
    """A quarter of the rounds took more."""


def spread(series: Series) -> Spread:
    """The quartiles of ``series``, which has at least one value.

    Example::

        spread([1.0, 2.0, 3.0]).median      # 2.0
    """
    if len(series) == 1:
        return Spread(series[0], series[0], series[0])
    low, median, high = statistics.quantiles(series, n=4, method="inclusive")
    return Spread(low, median, high)


def ratio(ours: Series, theirs: Series) -> float:
    """The median of the rounds' ratios, ours over theirs: below 1 we are faster."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def slowest(ranks: Sequence[Sequence[Series]]) -> list[list[float]]:
    """Of every series of every rank, round by round the slowest rank's seconds."""
    return [
        [max(seconds) for seconds in zip(*series, strict=True)]
        for series in zip(*ranks, strict=True)
    ]


def size_label(size: int) -> str:
    """``size`` bytes as people write it: ``64KiB``, ``1MiB``."""
    for unit, bytes_ in _UNITS:
        if size >= bytes_ and size % bytes_ == 0:
            return f"{size // bytes_}{unit}"
    return f"{size}B"


def parse_size(text: str) -> int:
    """The bytes of ``64KiB``, ``1MiB`` or ``512``; ``ValueError`` for anything else."""
    number = text.strip()
    factor = 1
    for unit, bytes_ in _UNITS:
        if number.lower().endswith(unit.lower()):
            number, factor = number[: -len(unit)], bytes_
            break
    size = int(number) * factor
    if size <= 0:
        raise ValueError(f"{text!r} is no size")
    return size


def seconds_label(seconds: float) -> str:
    """``seconds`` with three digits and a fitting unit: ``17.3 µs``, ``4.20 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor or unit == "µs":
            value = seconds / factor
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError(seconds)


def summary(ratios: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """``ratios`` as a final line carries them, with their inverses as ``speedups``."""
    return {
        "ratios": {key: round(value, 4) for key, value in ratios.items()},
        "speedups": {key: round(1 / value, 3) for key, value in ratios.items()},
    }
