"""From ``horovodrun``'s arguments to a job of our launcher's."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable

from farandole.core.config import environment as current_environment
from farandole.core.errors import UsageError
from farandole.horovod.runner.options import Arguments, environment_of, without_effect
from farandole.launch import early, plan
from farandole.launch.task import Task

DISCOVERY_LIMIT = 60.0
"""Seconds that a script which names the hosts may take."""


def task_of(arguments: Arguments, say: Callable[[str], None] | None = None) -> Task:
    """The task that arguments ask for.

    ``say`` (default: standard error) gets a line for each thing in them that has no effect here.
    ``UsageError`` says what is wrong with them.
    """
    say = say or _say
    hosts = arguments.hosts
    if arguments.host_discovery_script:
        if hosts or arguments.hostfile:
            raise UsageError("Name hosts by --host-discovery-script, -H or --hostfile: by one.")
        hosts = discover(arguments.host_discovery_script, arguments.slots)
        say(f"--host-discovery-script is asked once, for the job has a fixed size: {hosts}.")
    for line in without_effect(arguments, current_environment()):
        say(line)
    program = list(arguments.command or ())
    if program[:1] == ["--"]:
        del program[0]
    if not program:
        raise UsageError("There is no program to run.")
    return plan.resolve(
        program,
        ranks=arguments.num_proc,
        env=[f"{name}={text}" for name, text in _variables(arguments, say).items()],
        output_dir=arguments.output_filename,
        hosts=hosts,
        hostfile=arguments.hostfile,
        ssh=_ssh(arguments),
        start_timeout=arguments.start_timeout,
        verbose=bool(arguments.verbose),
    )


def agent_for(task: Task) -> early.Agent:
    """The agent of this host, with a guess of what the task's workers will have in common."""
    given = [
        word for name, text in task.environment.items() for word in ("--env", f"{name}={text}")
    ]
    how = [] if task.fork else ["--no-fork"]
    return early.start_agent([*how, "-np", str(task.size), *given, *task.program.argv])


def discover(script: str, slots: int | None) -> str:
    """The hosts that ``script`` prints, one a line, in the syntax of ``-H``.

    A host without a number of slots has ``slots``. ``UsageError`` when the script fails.
    """
    try:
        done = subprocess.run(
            shlex.split(script),
            capture_output=True,
            text=True,
            check=False,
            timeout=DISCOVERY_LIMIT,
        )
    except OSError as error:
        raise UsageError(f"--host-discovery-script {script}: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        limit = f"{DISCOVERY_LIMIT:g}"
        raise UsageError(f"--host-discovery-script {script} did not end in {limit} s.") from None
    if done.returncode != 0:
        raise UsageError(
            f"--host-discovery-script {script} failed with exit code {done.returncode}: "
            f"{done.stderr.strip()}"
        )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--host-discovery-script {script} names no host.")
    return ",".join(f"{line}:{slots}" if slots and ":" not in line else line for line in lines)


def _ssh(arguments: Arguments) -> str | None:
    port = ["-p", str(arguments.ssh_port)] if arguments.ssh_port else []
    identity = ["-i", arguments.ssh_identity_file] if arguments.ssh_identity_file else []
    return shlex.join(["ssh", *port, *identity]) if port or identity else None


def _variables(arguments: Arguments, say: Callable[[str], None]) -> dict[str, str]:
    variables = dict(environment_of(arguments))
    interfaces = sorted(arguments.nics or ())
    if interfaces:
        variables["HOROVOD_GLOO_IFACE"] = interfaces[0]
        variables["NCCL_SOCKET_IFNAME"] = ",".join(interfaces)
    if len(interfaces) > 1:
        say(f"of the interfaces {', '.join(interfaces)}, CPU tensors use the first.")
    return variables


def _say(line: str) -> None:
    sys.stderr.write(f"horovodrun: {line}\n")
