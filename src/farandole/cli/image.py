"""``farandole image``."""

from __future__ import annotations

from pathlib import Path

import click

from farandole.cli import clusters
from farandole.core.errors import UsageError


@click.group("image", short_help="Build an image with your program and Farandole.")
def command() -> None:
    """Container images, for those who want one: `farandole submit` works without."""


@command.command("build", short_help="Write a Dockerfile for this folder and build it.")
@click.option(
    "--tag", "-t", metavar="IMAGE", help="The image's name, as registry.example/me/train:1."
)
@click.option(
    "--base", metavar="IMAGE", help="Any image with torch, by version. [default: PyTorch's]"
)
@click.option("--mpi", is_flag=True, help="With an ssh server and client: for backend mpijob.")
@click.option(
    "--builder", type=click.Choice(["docker", "podman", "buildah"]), help="[default: any]"
)
@click.option("--push", is_flag=True, help="Send it to its registry.")
@click.option("--print", "show", is_flag=True, help="Print the Dockerfile and build nothing.")
@clusters.one_error
def build(
    tag: str | None, base: str | None, mpi: bool, builder: str | None, push: bool, show: bool
) -> None:
    """Build an image with this folder, what its requirements.txt or pyproject.toml asks for, and
    Farandole, by docker, podman or buildah, whichever is there.

    \b
    farandole image build --tag registry.example/me/train:1 --push

    The folder's files are those that `farandole submit` sends. The image's user is 1000, no root.
    """
    from farandole.launch.kubernetes import building, image

    project = Path.cwd()
    dockerfile = building.plan(project, base or image.BASE, ssh=mpi)
    if show:
        click.echo(dockerfile, nl=False)
        return
    if tag is None:
        raise UsageError("--tag is missing: name the image, as registry.example/me/train:1.")

    def say(line: str) -> None:
        click.echo(line, err=True)

    builder = building.find_builder(builder)
    building.build(builder, tag, project, dockerfile, say)
    if push:
        building.push(builder, tag, say)
    click.echo(f"{'built and pushed' if push else 'built'} {tag}")
    say("A job whose file says the following runs it:")
    backend = ["backend: mpijob"] if mpi else []
    for line in (f"image: {tag}", "code: image", "restricted: true", *backend):
        say(f"  {line}")
