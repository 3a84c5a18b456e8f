"""``farandole logs``."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import click

from farandole.cli import clusters
from farandole.core.errors import UsageError

_RANKS = re.compile(rb"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\] ")
"""The prefix of a line: the ranks that said it, as in ``[0-2,5]``."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@click.command("logs", short_help="What a job on the cluster prints.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job is over.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank's lines.")
@click.option(
    "--since", metavar="TIME", help="Only from then on: 10m ago, or 2026-12-01T10:00:00Z."
)
@clusters.options
@click.argument("name")
def command(
    name: str,
    context: str | None,
    namespace: str | None,
    follow: bool,
    rank: int | None,
    since: str | None,
) -> None:
    """Show what all ranks of the job NAME have printed, in order; earlier attempts too."""
    from farandole.launch.kubernetes import following, jobs, watching

    shown = _filter(rank, None if since is None else _moment(since))

    def complain(text: str) -> None:
        click.echo(text, err=True)

    async def show(cluster: Any) -> None:
        found = await jobs.find(cluster, name)
        if not follow:
            for line in await following.past(cluster, found.standing.name, complain):
                shown(line)
            return
        await watching.watch(
            cluster,
            found.standing.name,
            start_timeout=math.inf,
            show=shown,
            say=complain,
        )

    try:
        clusters.on_cluster(context, namespace, show)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _moment(since: str) -> str:
    """A time as those of lines, without the Z: one with fractions of a second is later."""
    if _TIME.fullmatch(since):
        return since.rstrip("Z")
    from farandole.launch.cluster import read_duration

    try:
        ago = float(read_duration(since))
    except ValueError:
        raise UsageError(
            f"--since {since}: how long ago is needed, as 90s, 10m or 2h, or a time in UTC, as "
            "2026-12-01T10:00:00Z."
        ) from None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - ago))


def _filter(rank: int | None, since: str | None) -> Callable[[Any], None]:
    def show(line: Any) -> None:
        if since is not None and line.time.rstrip("Z") < since:
            return
        if rank is None or _says(rank, line.text):
            click.echo(line.text)

    return show


def _says(rank: int, text: bytes) -> bool:
    found = _RANKS.match(text)
    if found is None:
        return False
    parts = [part.split(b"-") for part in found[1].split(b",")]
    return any(int(part[0]) <= rank <= int(part[-1]) for part in parts)
