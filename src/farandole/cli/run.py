"""``farandole run``."""

from __future__ import annotations

from typing import Any

import click

from farandole.core.errors import FarandoleError, UsageError
from farandole.launch import early, job, plan


@click.command(
    "run",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    short_help="Start a script on several ranks.",
)
@click.option(
    "-np",
    "-n",
    "ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks. [default: the number of GPUs, or 1 where there is none]",
)
@click.option(
    "-H",
    "--hosts",
    metavar="HOST:N,…",
    help="Hosts and how many ranks each takes; other machines are reached over ssh. "
    "[default: this machine]",
)
@click.option(
    "--hostfile",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="A file that names the hosts, one a line: node1 slots=4.",
)
@click.option(
    "--remote-python",
    metavar="PATH",
    help="The Python of other hosts. [default: the path of this one]",
)
@click.option(
    "--ssh", metavar="COMMAND", help='How to reach other hosts, as in "ssh -p 2222". [default: ssh]'
)
@click.option("-m", "module", is_flag=True, help="The program is a Python module, as in python -m.")
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable for the workers' environment. May be repeated.",
)
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Also write what each rank prints to FOLDER/rank-N.log.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long the first rank in init() waits for the others. [default: 120]",
)
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long ranks wait for another one that lives and does not come. [default: 1800; 0: for "
    "ever]",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long workers may take to end after Ctrl-C or SIGTERM. [default: 30]",
)
@click.option(
    "--min-np",
    type=click.IntRange(min=1),
    metavar="N",
    help="Elastic: go on with as few as N ranks when some are lost.",
)
@click.option(
    "--max-np",
    type=click.IntRange(min=1),
    metavar="N",
    help="Elastic: up to N ranks when hosts come. [default: as many as there are slots]",
)
@click.option(
    "--host-discovery-script",
    metavar="FILE",
    help="Elastic: a program that prints the hosts of now, one a line: node1:4.",
)
@click.option(
    "--slots-per-host",
    type=click.IntRange(min=1),
    metavar="N",
    help="Elastic: ranks of a host that the script names without a number.",
)
@click.option(
    "--on-loss",
    type=click.Choice(["rank", "host"]),
    help="Elastic: what goes when a rank is lost. [default: rank]",
)
@click.option(
    "--on-loss-size",
    type=click.Choice(["shrink", "hold"]),
    help="Elastic: go on with fewer ranks, or wait for the replacement. [default: shrink]",
)
@click.option(
    "--reset-limit",
    type=click.IntRange(min=0),
    metavar="N",
    help="Elastic: how often the ranks may change. [default: any number of times]",
)
@click.option(
    "--elastic-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Elastic: how long to wait for --min-np ranks, or for a replacement. [default: 600]",
)
@click.option(
    "--blacklist-cooldown-range",
    type=float,
    nargs=2,
    metavar="MIN MAX",
    help="Elastic: seconds that a host is avoided that loses ranks again and again, doubled each "
    "time. [default: 1 300; with --on-loss host, after the first loss and for good]",
)
@click.option(
    "--chaos",
    metavar="FAULTS",
    help="Try what the job survives: kill:rank=1@step=30,stop:rank=2@step=50.",
)
@click.option(
    "--timeline-filename",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Record what every rank does in FILE, which chrome://tracing and ui.perfetto.dev show.",
)
@click.option(
    "--timeline-mark-cycles",
    is_flag=True,
    help="Also show there when each cycle of the negotiation began.",
)
@click.option(
    "--autotune",
    is_flag=True,
    help="Begin training with trials of other sizes of buckets, and keep the best.",
)
@click.option(
    "--autotune-log-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write there what was tried and chosen; a choice for the same job is used again.",
)
@click.option(
    "--autotune-warmup-samples",
    type=click.IntRange(min=0),
    metavar="N",
    help="Samples that are thrown away before the first trial. [default: 3]",
)
@click.option(
    "--autotune-steps-per-sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps of a sample. [default: 5]",
)
@click.option(
    "--no-fork",
    is_flag=True,
    help="Start each worker afresh instead of forking it from a process that has torch imported.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing.")
@click.option("--verbose", "-v", is_flag=True, help="Tell how the workers were started.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def command(agent: early.Agent | None, /, program: tuple[str, ...], **options: Any) -> None:
    """Start PROGRAM on N ranks and wait for it.

    \b
    farandole run -np 4 train.py --epochs 3      a Python script
    farandole run -np 4 -m package.train         a module
    farandole run -np 4 -- ./train.sh            any command
    farandole run -H a:4,b:4 train.py            ranks on two machines
    farandole run farandole.yaml                 what the job file says; options override it

    The exit code is 0 when every rank ends with 0, else that of the first rank that failed
    (128 + n for signal n); 130 after Ctrl-C, 143 after SIGTERM.
    """
    try:
        task = plan.resolve(program, **options)
        if options["dry_run"]:
            click.echo(plan.describe(task))
            return
        code = job.run(task, agent or early.start_agent(()))
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    except FarandoleError as error:
        raise click.ClickException(str(error)) from None
    raise SystemExit(code)
