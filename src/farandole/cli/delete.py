"""``farandole delete``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


@click.command("delete", short_help="Delete a job and all that belongs to it.")
@clusters.options
@click.argument("name")
def command(name: str, context: str | None, namespace: str | None) -> None:
    """Delete the job NAME, its pods and all that belongs to it. Volumes stay."""
    from farandole.launch.kubernetes import jobs

    async def act(cluster: Any) -> str:
        found = await jobs.find(cluster, name)
        await jobs.delete(cluster, found)
        return found.standing.name

    click.echo(f"{clusters.on_cluster(context, namespace, act)} deleted")
