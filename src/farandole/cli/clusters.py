"""What the commands for clusters have in common: their options, and how their answers are shown."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

from farandole.core.errors import FarandoleError, UsageError


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--context`` and ``--namespace``; what goes wrong is shown as one error."""
    context = click.option(
        "--context", metavar="NAME", help="The kubeconfig's context. [default: current]"
    )
    namespace = click.option(
        "--namespace", "-n", metavar="NAME", help="[default: that of the context]"
    )
    return context(namespace(one_error(command)))


def one_error(command: Callable[..., Any]) -> Callable[..., Any]:
    """What goes wrong is shown as one error, with the exit code of its kind."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except UsageError as error:
            raise click.UsageError(str(error)) from None
        except FarandoleError as error:
            raise click.ClickException(str(error)) from None

    return wrapper


output = click.option(
    "--output", "-o", "output_format", type=click.Choice(["text", "json"]), default="text",
    help="How to show it.",
)  # fmt: skip


def on_cluster(
    context: str | None, namespace: str | None, do: Callable[[Any], Awaitable[Any]]
) -> Any:
    """Run ``do(cluster)`` and return what it returns."""
    import asyncio

    from farandole.launch.kubernetes import client

    async def run() -> Any:
        return await do(await client.connect(context, namespace))

    with client.leaving_no_keys():
        return asyncio.run(run())


def show_json(value: Any) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, indent=2))


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns, as wide as what is in them."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())
