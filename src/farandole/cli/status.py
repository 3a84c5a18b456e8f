"""``farandole status``."""

from __future__ import annotations

import dataclasses
import datetime

import click

from farandole.cli import clusters


@click.command("status", short_help="How a job on the cluster stands.")
@clusters.output
@clusters.options
@click.argument("name")
def command(name: str, context: str | None, namespace: str | None, output_format: str) -> None:
    """Show how the job NAME and its pods stand. The beginning of a name will do."""
    from farandole.launch.kubernetes import jobs, standing

    found = clusters.on_cluster(context, namespace, lambda cluster: jobs.find(cluster, name))
    job, pods = found.standing, standing.pods_of(found.pods)
    if output_format == "json":
        clusters.show_json(
            {**dataclasses.asdict(job), "pods": [dataclasses.asdict(row) for row in pods]}
        )
        return
    now = datetime.datetime.now(datetime.timezone.utc)
    age = standing.age(job.created, now)
    click.echo(f"{job.name}: {job.state}, {job.running} of {job.nodes} nodes run, {age} old")
    click.echo(f"  {job.command}")
    clusters.show_table(
        ["NODE", "POD", "STATE", "REASON", "MACHINE", "AGE"],
        [
            [str(row.index), row.name, row.phase, row.reason, row.node,
             standing.age(row.started, now)]
            for row in pods
        ],
    )  # fmt: skip
