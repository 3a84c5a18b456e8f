"""From a command line and a job file to a task."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from farandole.core import faults, route, topology
from farandole.core.config import Settings
from farandole.core.config import environment as current_environment
from farandole.core.errors import UsageError, describe_ranks
from farandole.launch import elastic_plan, environment, host
from farandole.launch import hosts as host_list
from farandole.launch.hosts import Share
from farandole.launch.task import GRACE, Program, Task

_JOB_FILES = (".yaml", ".yml")


def resolve(
    program: Sequence[str],
    *,
    ranks: int | None = None,
    module: bool = False,
    env: Sequence[str] = (),
    output_dir: str | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    remote_python: str | None = None,
    ssh: str | None = None,
    start_timeout: float | None = None,
    stall_timeout: float | None = None,
    grace: float | None = None,
    timeline_filename: str | None = None,
    timeline_mark_cycles: bool = False,
    autotune: bool = False,
    autotune_log_file: str | None = None,
    autotune_warmup_samples: int | None = None,
    autotune_steps_per_sample: int | None = None,
    chaos: str | None = None,
    no_fork: bool = False,
    dry_run: bool = False,
    verbose: bool = False,
    **elastic: Any,
) -> Task:
    """The task that options and, if ``program`` begins with one, a job file ask for.

    An option that is not given (``None``, empty or False) leaves the job file's word, else the
    default. Arguments after a job file are added to its command. ``elastic`` are the options of
    :mod:`farandole.launch.elastic_plan`. ``UsageError`` says what is wrong.
    """
    variables = dict(_variable(text) for text in env)
    spec = None
    if program[0].endswith(_JOB_FILES) and not module:
        from farandole.launch import spec as spec_module

        spec = spec_module.load(program[0])
        what = recognise([*spec.words(), *program[1:]])
        variables = {**spec.env, **variables}
    else:
        what = Program(form="module", argv=tuple(program)) if module else recognise(program)
    timeline = timeline_filename or (spec.timeline if spec else None)
    if timeline:
        variables["FARANDOLE_TIMELINE"] = os.path.abspath(timeline)
    if chaos:
        faults.parse(chaos)
        variables["FARANDOLE_CHAOS"] = chaos
    if stall_timeout is None and spec:
        stall_timeout = spec.stall_timeout
    if stall_timeout is not None:
        variables["FARANDOLE_STALL_TIMEOUT"] = f"{stall_timeout:g}"
    if timeline_mark_cycles or (spec and spec.timeline_mark_cycles):
        variables["FARANDOLE_TIMELINE_MARK_CYCLES"] = "1"
    log = autotune_log_file or (spec.autotune_log_file if spec else None)
    tuning = {
        "AUTOTUNE": 1 if autotune or (spec and spec.autotune) else None,
        "AUTOTUNE_LOG": log and os.path.abspath(log),
        "AUTOTUNE_WARMUP_SAMPLES": autotune_warmup_samples,
        "AUTOTUNE_STEPS_PER_SAMPLE": autotune_steps_per_sample,
    }
    variables |= {f"FARANDOLE_{n}": str(each) for n, each in tuning.items() if each is not None}
    settings = Settings.from_environment({**current_environment(), **variables})
    ranks = ranks or (spec.ranks if spec else None)
    if spec and not (hosts or hostfile):
        hosts, hostfile = spec.hosts, spec.hostfile
    start_timeout = _first(
        start_timeout, spec.start_timeout if spec else None, settings.start_timeout
    )
    changing = elastic_plan.resolve(
        spec, ranks, hosts, hostfile, **elastic, start_timeout=start_timeout,
        stall_warning=settings.stall_warning, stall_timeout=settings.stall_timeout,
    )  # fmt: skip
    shares = () if changing else _deal(hosts, hostfile, ranks)
    return Task(
        program=what,
        size=(shares[-1].ranks.stop if shares else ranks)
        or (changing.policy.start_size if changing else 0)
        or host.visible_gpus(current_environment())
        or 1,
        elastic=changing,
        hosts=() if all(route.is_own(share.host) for share in shares) else shares,
        remote_python=remote_python or (spec and spec.remote_python) or sys.executable,
        ssh=tuple(shlex.split(ssh or (spec.ssh if spec else "ssh"))),
        environment=variables,
        fork=not no_fork and (spec is None or spec.fork) and what.form != "command",
        output_dir=output_dir or (spec.output_dir if spec else None),
        start_timeout=start_timeout,
        grace=_first(grace, spec.grace if spec else None, GRACE),
        verbose=verbose,
    )


def _deal(text: str | None, path: str | None, size: int | None) -> tuple[Share, ...]:
    """Which host runs which ranks; nothing when no hosts are named."""
    if not text and not path:
        return ()
    if text and path:
        raise UsageError("Name hosts by -H or by --hostfile, not both.")
    found = host_list.parse(text) if text else host_list.read_file(str(path))
    shares = host_list.assign(found, size)
    here = [share.host for share in shares if route.is_own(share.host)]
    if 1 < len(here) < len(shares):
        raise UsageError(f"{' and '.join(here)} are all this machine: name it once.")
    return shares


def recognise(words: Sequence[str]) -> Program:
    """What kind of program these words are: ``python`` of this environment is taken apart."""
    words = list(words)
    if not words:
        raise UsageError("There is no program to run.")
    if _is_this_python(words[0]) and len(words) > 1:
        if words[1] == "-m" and len(words) > 2:
            return Program(form="module", argv=tuple(words[2:]))
        if not words[1].startswith("-"):
            words = words[1:]
    if words[0].endswith(".py"):
        if not os.path.exists(words[0]):
            raise UsageError(f"There is no file {words[0]} in {os.getcwd()}.")
        return Program(form="script", argv=tuple(words))
    if shutil.which(words[0]) is None:
        if os.path.isfile(words[0]):
            if os.access(words[0], os.X_OK):
                raise UsageError(f"{words[0]} is not on the PATH. Did you mean ./{words[0]}?")
            raise UsageError(
                f"{words[0]} is neither a Python script (its name does not end in .py) nor "
                f"executable. Write `-- python {words[0]}`, or make it executable."
            )
        raise UsageError(f"There is no command {words[0]} on the PATH, and no such file.")
    return Program(form="command", argv=tuple(words))


def describe(task: Task) -> str:
    """What :func:`farandole.launch.job.run` would do, for people."""
    shared = environment.shared(
        current_environment(), task.environment, local_size=task.size, cores=host.usable_cores()
    )
    before = current_environment()
    lines = [
        f"program        {shlex.join(_shown(task.program))}",
        f"ranks          {task.size}{elastic_plan.describe(task.elastic)}",
        *(f"  {share.host:13}{describe_ranks(share.ranks)}" for share in task.hosts),
        f"started by     {'fork, where possible' if task.fork else 'exec'}",
        f"start timeout  {task.start_timeout:g} s",
        f"grace          {task.grace:g} s",
        f"output         {task.output_dir + '/rank-N.log' if task.output_dir else 'shown here'}",
        "environment of every rank, besides this one's:",
    ]
    changed = {name: text for name, text in shared.items() if before.get(name) != text}
    lines += [f"  {name}={shlex.quote(text)}" for name, text in sorted(changed.items())]
    lines.append("environment of rank 0:")
    address = "ADDRESS" if task.hosts else "127.0.0.1"
    own = environment.own(
        0, task.size, store=f"{address}:PORT", secret="hidden",
        start_timeout=task.start_timeout, master=(address, 0),
    )  # fmt: skip
    if task.hosts:
        sits_on = [share.host for share in task.hosts for _ in share.ranks]
        own |= environment.seat(topology.topology_of(0, sits_on))
    lines += [f"  {name}={text}" for name, text in own.items() if name != "MASTER_PORT"]
    lines.append("  MASTER_PORT=a free port")
    return "\n".join(lines)


def _shown(program: Program) -> list[str]:
    how = {"script": ["python"], "module": ["python", "-m"], "command": []}[program.form]
    return [*how, *program.argv]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {text}: write it as --env NAME=VALUE.")
    return name, value


def _is_this_python(word: str) -> bool:
    """Whether a command's first word starts the Python that runs here."""
    name = os.path.basename(word)
    if not (name == "python" or name.startswith("python3")):
        return False
    found = shutil.which(word)
    return found is not None and _same_environment(found, sys.executable)


def _same_environment(one: str, other: str) -> bool:
    # Only the file is resolved at the end: a virtual environment is told by its folder.
    folders = {os.path.realpath(os.path.dirname(os.path.abspath(path))) for path in (one, other)}
    return len(folders) == 1 and os.path.realpath(one) == os.path.realpath(other)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
