"""``farandole submit``."""

from __future__ import annotations

from typing import Any

import click

from farandole.cli import clusters


class _Submit(click.Command):
    """``--dry-run`` alone is whole: click would take the job file after it for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        flags = {
            name
            for each in self.get_params(ctx)
            if isinstance(each, click.Option) and each.is_flag
            for name in each.opts
        }
        given, rest = [], list(args)
        while rest and rest[0].startswith("-") and rest[0] != "--":
            word = rest.pop(0)
            if word == "--dry-run":
                given.append("--dry-run=client")
                continue
            given.append(word)
            if rest and "=" not in word and word not in flags:
                given.append(rest.pop(0))
        return super().parse_args(ctx, [*given, *rest])


@click.command(
    "submit",
    cls=_Submit,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a job on a Kubernetes cluster.",
)
@click.option("--nodes", metavar="N|MIN:MAX", help="Nodes; two numbers for an elastic job.")
@click.option("--gpus", type=int, metavar="N", help="GPUs of each node.")
@click.option("--ranks-per-node", type=int, metavar="N", help="[default: one for each GPU, or 1]")
@click.option("--image", metavar="IMAGE", help="A container image with Python and torch.")
@click.option("--cpu", metavar="N", help="Cores of each node.")
@click.option("--memory", metavar="AMOUNT", help="Memory of each node, as 64Gi.")
@click.option("--name", metavar="NAME", help="The beginning of the job's name.")
@click.option("--queue", metavar="NAME", help="Kueue's LocalQueue.")
@click.option("--priority", metavar="CLASS", help="The priority class.")
@click.option("--backend", type=click.Choice(["job", "jobset", "trainjob", "mpijob"]))
@click.option("--code", metavar="WHERE", help="archive, image, claim:NAME/FOLDER or git:URL@REV.")
@click.option("--datasets", metavar="PLACE", help="A path, or claim:NAME (seen as /data).")
@click.option("--checkpoints", metavar="PLACE", help="A path, or claim:NAME (as /checkpoints).")
@click.option("--logs", metavar="PLACE", help="A path, or claim:NAME (as /logs).")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable. May be repeated.")
@click.option("--start-timeout", metavar="TIME", help="Until all nodes are there. [default: 30m]")
@click.option("--time-limit", metavar="TIME", help="The job saves and ends after that.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait and show what the job prints.")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    help="Print what would be created; `--dry-run=server` has the cluster check it.",
)
@click.option("--print-rbac", is_flag=True, help="Print the Role that submitting needs.")
@clusters.options
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(
    program: tuple[str, ...],
    context: str | None,
    namespace: str | None,
    env: tuple[str, ...],
    detach: bool,
    dry_run: str | None,
    print_rbac: bool,
    **given: Any,
) -> None:
    """Run PROGRAM, or what a job file says, on a cluster, and show what it prints.

    \b
    farandole submit --nodes 4 --gpus 8 --image IMAGE train.py --epochs 90
    farandole submit farandole.yaml

    Ctrl-C ends the showing, not the job: `farandole logs -f`, `stop` and `delete` take its name.
    The exit code is 0 when the job succeeds, and 1 when it fails.
    """
    if print_rbac:
        _print_role(given["backend"] or "job", queue=bool(given["queue"]))
        return
    fields = {name: _number(name, value) for name, value in given.items()}
    if dry_run == "client":
        _print_manifests(program, fields, namespace or "default", env)
        return

    submitted: list[str] = []

    async def run(cluster: Any) -> int:
        from farandole.launch.kubernetes import preflight, resolving, submitting

        submission = resolving.resolve(program, fields, namespace=cluster.namespace, env=env)
        await preflight.check(cluster, submission)
        if dry_run == "server":
            await submitting.dry_run(cluster, submission)
            click.echo(f"{cluster.server} accepts the job; nothing was created.")
            return 0
        await submitting.submit(cluster, submission)
        submitted.append(submission.name)
        click.echo(f"submitted {submission.name} to {cluster.namespace}", err=True)
        return 0 if detach else await _show(cluster, submission)

    try:
        code = clusters.on_cluster(context, namespace, run)
    except KeyboardInterrupt:
        click.echo(
            "\nThe job goes on: farandole logs -f, stop and delete take its name."
            if submitted
            else "\nNothing was submitted.",
            err=True,
        )
        code = 130
    raise SystemExit(code)


async def _show(cluster: Any, submission: Any) -> int:
    from farandole.launch.kubernetes import watching

    end = await watching.watch(
        cluster,
        submission.name,
        start_timeout=submission.start_timeout,
        show=lambda line: click.echo(line.text),
        say=lambda text: click.echo(text, err=True),
    )
    click.echo(f"{submission.name}: {end.state}", err=True)
    for cause in end.causes:
        click.echo(f"  {cause}", err=True)
    return 0 if end.state == "succeeded" else 1


def _print_manifests(
    program: tuple[str, ...], fields: dict[str, Any], namespace: str, env: tuple[str, ...]
) -> None:
    from farandole.launch.kubernetes import render, resolving

    submission = resolving.resolve(program, fields, namespace=namespace, env=env)
    click.echo(render.as_yaml(render.manifests(submission)), nl=False)


def _print_role(backend: str, *, queue: bool) -> None:
    import yaml

    from farandole.launch.kubernetes import rights

    click.echo(yaml.safe_dump(rights.role(backend, queue=queue), sort_keys=False), nl=False)


def _number(name: str, value: Any) -> Any:
    """``--nodes 4`` is a number, ``--nodes 2:4`` a text."""
    return int(value) if name == "nodes" and value is not None and value.isdigit() else value
