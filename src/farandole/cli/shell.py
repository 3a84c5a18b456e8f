"""``farandole shell``."""

from __future__ import annotations

import os
import shutil
from typing import Any

import click

from farandole.cli import clusters
from farandole.core.errors import SetupError, UsageError


@click.command(
    "shell",
    context_settings={"allow_interspersed_args": False},
    short_help="Open a shell in a pod of a job.",
)
@click.option("--node", type=click.IntRange(min=0), default=0, show_default=True, metavar="N")
@clusters.options
@click.argument("name")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(
    name: str, program: tuple[str, ...], context: str | None, namespace: str | None, node: int
) -> None:
    """Run PROGRAM (a shell) beside the ranks of node N of the job NAME, by `kubectl exec`."""
    from farandole.launch.kubernetes import jobs, standing

    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise SetupError(
            "A shell in a pod needs kubectl, which is not on the PATH: see "
            "https://kubernetes.io/docs/tasks/tools/."
        )

    async def ask(cluster: Any) -> Any:
        return await jobs.find(cluster, name), cluster.namespace

    found, place = clusters.on_cluster(context, namespace, ask)
    running = [row for row in standing.pods_of(found.pods) if row.phase == "Running"]
    pod = next((row.name for row in running if row.index == node), None)
    if pod is None:
        nodes = ", ".join(str(row.index) for row in running) or "none"
        raise UsageError(f"Node {node} of {found.standing.name} does not run. Running: {nodes}.")
    where = ["--context", context] if context else []
    words = [kubectl, *where, "--namespace", place, "exec", "-it", pod, "--"]
    os.execv(kubectl, [*words, *(program or ("sh",))])
