"""``farandole init``."""

from __future__ import annotations

import click

from farandole.cli import clusters


@click.command("init", short_help="Write a job file to begin with.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of job files instead.")
@click.argument("file", default="farandole.yaml", type=click.Path(dir_okay=False))
def command(file: str, schema: bool) -> None:
    """Write FILE (farandole.yaml), a job file in which every field is explained."""
    from farandole.launch import spec, template

    if schema:
        clusters.show_json(spec.schema())
        return
    try:
        with open(file, "x", encoding="utf-8") as made:
            made.write(template.text())
    except FileExistsError:
        raise click.UsageError(f"{file} is there already: name another file.") from None
    except OSError as error:
        raise click.UsageError(f"{file} cannot be written: {error.strerror}.") from None
    click.echo(f"wrote {file}")
