"""``farandole scale``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


@click.command("scale", short_help="Change the number of nodes of an elastic job.")
@clusters.options
@click.argument("name")
@click.argument("nodes", type=click.IntRange(min=1))
def command(name: str, nodes: int, context: str | None, namespace: str | None) -> None:
    """Let the elastic job NAME have up to NODES nodes; training goes on meanwhile."""
    from farandole.launch.kubernetes import jobs

    async def act(cluster: Any) -> str:
        found = await jobs.find(cluster, name)
        await jobs.scale(cluster, found, nodes)
        return found.standing.name

    click.echo(f"{clusters.on_cluster(context, namespace, act)} scaled to {nodes} nodes")
