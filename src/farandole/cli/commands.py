"""The commands, each loaded when it is called for."""

from __future__ import annotations

import importlib
from typing import Any

import click

_COMMANDS = {
    "run": "Train on all of this machine: start a script on several ranks.",
    "init": "Write a job file to begin with.",
    "image": "Build an image with your program and Farandole.",
    "submit": "Run a job on a Kubernetes cluster.",
    "list": "The jobs on the cluster.",
    "status": "How a job on the cluster stands.",
    "logs": "What a job on the cluster prints.",
    "explain": "Why a job on the cluster does not run, or failed.",
    "events": "What the cluster has to say of a job.",
    "shell": "Open a shell in a pod of a job.",
    "stop": "Stop a job on the cluster; it can be resumed.",
    "resume": "Let a stopped job go on.",
    "scale": "Change the number of nodes of an elastic job.",
    "delete": "Delete a job and all that belongs to it.",
    "bench": "Measure Farandole and its rivals side by side on this machine.",
    "doctor": "Say what this machine offers for training, and what is missing.",
}


class _Lazy(click.Group):
    """A group whose commands are modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"farandole.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _version(ctx: click.Context, _parameter: click.Parameter, wanted: Any) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"farandole {version('farandole')}")
        ctx.exit()


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version,
    help="Show the version and exit.",
)  # fmt: skip
def cli() -> None:
    """Distributed deep-learning training."""
