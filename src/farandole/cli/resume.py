"""``farandole resume``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


@click.command("resume", short_help="Let a stopped job go on.")
@clusters.options
@click.argument("name")
def command(name: str, context: str | None, namespace: str | None) -> None:
    """Let the stopped job NAME go on, from its last checkpoint if it keeps some."""
    from farandole.launch.kubernetes import jobs

    async def act(cluster: Any) -> str:
        found = await jobs.find(cluster, name)
        await jobs.stop(cluster, found, on=False)
        return found.standing.name

    click.echo(f"{clusters.on_cluster(context, namespace, act)} resumed")
