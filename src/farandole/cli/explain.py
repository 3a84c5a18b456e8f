"""``farandole explain``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


@click.command("explain", short_help="Why a job on the cluster does not run, or failed.")
@clusters.output
@clusters.options
@click.argument("name")
def command(name: str, context: str | None, namespace: str | None, output_format: str) -> None:
    """Say why the job NAME does not run or has failed, and what to do; most likely cause first."""
    from farandole.launch.kubernetes import jobs

    async def ask(cluster: Any) -> Any:
        found = await jobs.find(cluster, name)
        return found, await jobs.why(cluster, found)

    found, causes = clusters.on_cluster(context, namespace, ask)
    if output_format == "json":
        clusters.show_json(
            [{"cause": each.what, "remedy": each.remedy, "where": each.where} for each in causes]
        )
        return
    if not causes:
        click.echo(f"{found.standing.name} is {found.standing.state}; nothing looks wrong.")
    for cause in causes:
        click.echo(str(cause))
