"""Draws a comparison as a PNG: times over sizes where messages have sizes, else bars.

One panel a number of ranks. Lines are medians, the bands around them the quarters of the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farandole.bench.compare import Case, Comparison
from farandole.bench.figures import seconds_label, size_label, spread
from farandole.core.errors import MissingExtraError

_COLOURS = ("#0b6e4f", "#d1495b", "#3066be", "#e3a72f", "#7b5ea7", "#5f6b7a")
_LIMITS = {"copy": "plain copy (limit)", "local": "no communication (limit)"}
"""What is drawn in grey: what no system can be faster than, and how it is called."""

_GREY = "#9aa3ad"

_WIDTH, _HEIGHT, _DOTS = 5.2, 4.2, 150


def require() -> None:
    """Raise ``MissingExtraError`` when there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "Plots are drawn with matplotlib, which is not installed: "
            "pip install 'farandole[plot]' (or leave out --plot)."
        ) from error


def draw(comparison: Comparison, file: Path) -> None:
    """Write ``file``, a PNG. Raises what :func:`require` raises, and ``OSError``."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sized = all(case.size is not None for case in comparison.cases)
    panels = _panels(comparison.cases, sized)
    figure: Any = Figure(figsize=(_WIDTH * len(panels), _HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, cases) in zip(axes, panels.items(), strict=True):
        (_lines if sized else _bars)(axis, cases)
        axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="both" if sized else "y", color="#e6e8eb", linewidth=0.8)
        axis.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )
    figure.savefig(file, dpi=_DOTS, format="png")


def _panels(cases: Sequence[Case], sized: bool) -> dict[str, list[Case]]:
    panels: dict[str, list[Case]] = {}
    for case in cases:
        title = f"{case.what}, {case.ranks} ranks" if sized else f"{case.ranks} ranks"
        panels.setdefault(title, []).append(case)
    return panels


def _colour(system: str, number: int) -> str:
    return _GREY if system in _LIMITS else _COLOURS[number % len(_COLOURS)]


def _lines(axis: Any, cases: Sequence[Case]) -> None:
    sizes = [case.size or 0 for case in cases]
    for number, system in enumerate(cases[0].seconds):
        middles = [spread(case.seconds[system]) for case in cases]
        colour = _colour(system, number)
        axis.plot(
            sizes, [one.median for one in middles], "--" if system in _LIMITS else "-",
            color=colour, label=_LIMITS.get(system, system),
            linewidth=2.4 if number == 0 else 1.6, marker="o", markersize=3.5,
        )  # fmt: skip
        lows, highs = [one.low for one in middles], [one.high for one in middles]
        axis.fill_between(sizes, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [size_label(size) for size in sizes], rotation=45, fontsize=8)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda seconds, _position: _short(seconds))
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel("size of the message", fontsize=9)
    axis.set_ylabel("time of one operation", fontsize=9)


def _short(seconds: float) -> str:
    text, unit = seconds_label(seconds * (1 + 1e-9)).split()
    return f"{float(text):g} {unit}"


def _bars(axis: Any, cases: Sequence[Case]) -> None:
    systems = list(cases[0].seconds)
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        middles = [spread(case.seconds[system]) for case in cases]
        places = [at - 0.4 + (number + 0.5) * width for at in range(len(cases))]
        heights = [one.median for one in middles]
        errors = [
            [one.median - one.low for one in middles],
            [one.high - one.median for one in middles],
        ]
        axis.bar(
            places, heights, 0.8 * width, color=_colour(system, number),
            label=_LIMITS.get(system, system), yerr=errors,
            error_kw={"elinewidth": 1, "ecolor": "#40474f", "capsize": 2},
        )  # fmt: skip
        for place, one in zip(places, middles, strict=True):
            axis.annotate(
                seconds_label(one.median), (place, one.high), xytext=(0, 4),
                textcoords="offset points", fontsize=7.5, ha="center",
            )  # fmt: skip
    axis.set_xticks(range(len(cases)), [case.what for case in cases], fontsize=9)
    axis.yaxis.set_major_formatter(lambda seconds, _position: _short(seconds) if seconds else "0")
    axis.tick_params(axis="y", labelsize=8)
    axis.margins(y=0.1)
