"""``farandole events``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


@click.command("events", short_help="What the cluster has to say of a job.")
@clusters.output
@clusters.options
@click.argument("name")
def command(name: str, context: str | None, namespace: str | None, output_format: str) -> None:
    """Show the cluster's events about the job NAME and its pods, oldest first."""
    from farandole.launch.kubernetes import jobs

    async def ask(cluster: Any) -> Any:
        return await jobs.events(cluster, await jobs.find(cluster, name))

    found = clusters.on_cluster(context, namespace, ask)
    rows = [
        {
            "time": jobs.when(each),
            "about": each["involvedObject"].get("name", ""),
            "reason": each.get("reason", ""),
            "message": each.get("message", ""),
        }
        for each in found
    ]
    if output_format == "json":
        clusters.show_json(rows)
        return
    clusters.show_table(
        ["TIME", "ABOUT", "REASON", "MESSAGE"],
        [[row["time"], row["about"], row["reason"], row["message"]] for row in rows],
    )
