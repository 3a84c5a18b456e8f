"""``farandole bench``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from farandole.bench import compare, plot, start
from farandole.bench.compare import Comparison
from farandole.bench.figures import parse_size
from farandole.core.errors import FarandoleError

_SIZES = "4KiB,64KiB,1MiB,4MiB,16MiB,64MiB"
_QUICK_SIZES = "4KiB,1MiB"


class _Listed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Values with commas between them."""

    name = "list"

    def __init__(self, each: Callable[[str], Any], what: str) -> None:
        self._each = each
        self._what = what

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Any]:
        if not isinstance(value, str):
            return list(value)
        try:
            return [self._each(text.strip()) for text in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not {self._what}.", param, ctx)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _among(names: Sequence[str]) -> _Listed:
    def one(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return _Listed(one, f"a list of names among {', '.join(names)}")


_COUNTS = _Listed(_count, "a list of numbers of ranks, as in 2,4")
_BYTES = _Listed(parse_size, f"a list of sizes, as in {_QUICK_SIZES}")
_NAMES = _Listed(str, "a list of names")

_ranks = click.option(
    "-np", "--ranks", type=_COUNTS, default="2", show_default=True, metavar="N,…",
    help="Numbers of ranks.",
)  # fmt: skip
_quick = click.option("--quick", is_flag=True, help="A short run: to see that all works.")
_json = click.option("--json", "as_json", is_flag=True, help="End with the figures in one line.")
_plot = click.option(
    "--plot", "file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png",
    help="Draw what came out.",
)  # fmt: skip


@click.group("bench", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure Farandole and its rivals side by side, on ranks of one thread on this machine.

    All systems take turns in one run. Ratios are ours over the rival's: below 1 we are faster.
    """


@command.command()
@_ranks
@click.option(
    "--sizes", type=_BYTES, metavar="SIZE,…",
    help=f"Sizes of the messages. [default: {_SIZES}]",
)  # fmt: skip
@click.option(
    "--operations", type=_among(compare.OPERATIONS), default="allreduce", show_default=True,
    metavar="NAME,…", help=f"Of {', '.join(compare.OPERATIONS)}.",
)  # fmt: skip
@click.option(
    "--systems", type=_NAMES, metavar="NAME,…",
    help="Ours first: an engine (shm, torch; shm:copied with tensors of any memory), then gloo, "
    "mpi, copy. [default: shm, gloo, mpi where it is installed, copy]",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=3), metavar="N", help="[default: 40]")
@_quick
@_json
@_plot
def collectives(
    ranks: list[int],
    sizes: list[int] | None,
    operations: list[str],
    systems: list[str] | None,
    rounds: int | None,
    quick: bool,
    as_json: bool,
    file: Path | None,
) -> None:
    """Time collectives over sizes: engines, Gloo, MPI, and a plain copy as the machine's limit."""
    chosen = systems or ["shm", "gloo", *["mpi"] * start.mpi_is_installed(), "copy"]
    _show(
        lambda: compare.collectives(
            ranks=ranks,
            systems=chosen,
            operations=operations,
            sizes=sizes
            or [parse_size(text) for text in (_QUICK_SIZES if quick else _SIZES).split(",")],
            rounds=rounds or (6 if quick else 40),
            budget=0.3 if quick else 4.0,
        ),
        as_json,
        file,
    )


@command.command()
@_ranks
@click.option(
    "--models", type=_among(compare.MODELS), default=",".join(compare.MODELS), show_default=True,
    metavar="NAME,…", help="A transformer of 9 M parameters, a ResNet-18 for small images.",
)  # fmt: skip
@click.option(
    "--systems", type=_among(compare.STEP_SYSTEMS), default=",".join(compare.STEP_SYSTEMS),
    show_default=True, metavar="NAME,…",
    help="farandole: DistributedOptimizer; ddp: DistributedDataParallel with Gloo; backend: the "
    "same with backend farandole; local: no communication.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="[default: 60]")
@_quick
@_json
@_plot
def step(
    ranks: list[int],
    models: list[str],
    systems: list[str],
    steps: int | None,
    quick: bool,
    as_json: bool,
    file: Path | None,
) -> None:
    """Time training steps: our optimizer and our backend against DistributedDataParallel."""
    _show(
        lambda: compare.steps(
            ranks=ranks,
            systems=systems,
            models=models[:1] if quick else models,
            steps=steps or (4 if quick else 60),
        ),
        as_json,
        file,
    )


@command.command()
@_ranks
@click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="[default: 9]")
@_quick
@_json
@_plot
def launch(
    ranks: list[int], rounds: int | None, quick: bool, as_json: bool, file: Path | None
) -> None:
    """Time the way from the command to the first allreduce: farandole run against torchrun."""
    _show(lambda: compare.launch(ranks=ranks, rounds=rounds or (1 if quick else 9)), as_json, file)


def _show(measure: Callable[[], Comparison], as_json: bool, file: Path | None) -> None:
    """Measure, print, draw; what is missing for that is told before."""
    try:
        if file is not None:
            plot.require()
        comparison = measure()
        for line in comparison.lines():
            click.echo(line)
        if file is not None:
            plot.draw(comparison, file)
    except (FarandoleError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(comparison.figures()))
