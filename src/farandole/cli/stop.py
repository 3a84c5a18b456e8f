"""``farandole stop``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


@click.command("stop", short_help="Stop a job on the cluster; it can be resumed.")
@clusters.options
@click.argument("name")
def command(name: str, context: str | None, namespace: str | None) -> None:
    """Stop the job NAME: its pods get SIGTERM and the grace period to save."""
    from farandole.launch.kubernetes import jobs

    async def act(cluster: Any) -> str:
        found = await jobs.find(cluster, name)
        await jobs.stop(cluster, found)
        return found.standing.name

    click.echo(f"{clusters.on_cluster(context, namespace, act)} stopped")
