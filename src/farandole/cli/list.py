"""``farandole list``."""

from __future__ import annotations

import dataclasses
import datetime

import click

from farandole.cli import clusters


@click.command("list", short_help="The jobs on the cluster.")
@clusters.output
@clusters.options
def command(context: str | None, namespace: str | None, output_format: str) -> None:
    """Show the jobs of a namespace, the newest first."""
    from farandole.launch.kubernetes import jobs, standing

    found = clusters.on_cluster(context, namespace, jobs.everything)
    rows = [each.standing for each in found]
    if output_format == "json":
        clusters.show_json([dataclasses.asdict(row) for row in rows])
        return
    now = datetime.datetime.now(datetime.timezone.utc)
    clusters.show_table(
        ["NAME", "STATE", "NODES", "RUNNING", "AGE", "OWNER", "COMMAND"],
        [
            [row.name, row.state, row.nodes, str(row.running), standing.age(row.created, now),
             row.owner, row.command]
            for row in rows
        ],
    )  # fmt: skip
