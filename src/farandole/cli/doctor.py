"""``farandole doctor``."""

from __future__ import annotations

import click

from farandole.launch import survey


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Say in a few lines what this machine offers for training, and what is missing for what."""
    found = survey.take()
    for line in survey.lines(found):
        click.echo(line)
    missing = survey.findings(found)
    click.echo("\nmissing:" if missing else "\nnothing is missing")
    for finding in missing:
        click.echo(f"  {finding}")
