"""From ``horovodrun``'s arguments to a job of our launcher's."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any

from farandole.core.config import environment as current_environment
from farandole.core.errors import UsageError
from farandole.horovod.runner.options import Arguments, environment_of, without_effect
from farandole.launch import early, plan
from farandole.launch.task import Task


def task_of(arguments: Arguments, say: Callable[[str], None] | None = None) -> Task:
    """The task that arguments ask for.

    ``say`` (default: standard error) gets a line for each thing in them that has no effect here.
    ``UsageError`` says what is wrong with them.
    """
    say = say or _say
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
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        ssh=_ssh(arguments),
        start_timeout=arguments.start_timeout,
        verbose=bool(arguments.verbose),
        **(_elastic(arguments) if is_elastic(arguments) else {}),
    )


def is_elastic(arguments: Arguments) -> bool:
    """Whether the number of ranks may change."""
    return bool(arguments.host_discovery_script or arguments.min_num_proc or arguments.max_num_proc)


def _elastic(arguments: Arguments) -> dict[str, Any]:
    timeout = arguments.elastic_timeout or current_environment().get("HOROVOD_ELASTIC_TIMEOUT")
    return {
        "min_np": arguments.min_num_proc or arguments.num_proc,
        "max_np": arguments.max_num_proc,
        "host_discovery_script": arguments.host_discovery_script,
        "slots_per_host": arguments.slots,
        "reset_limit": arguments.reset_limit,
        "elastic_timeout": float(timeout) if timeout else None,
        "blacklist_cooldown_range": arguments.cooldown_range,
        "on_loss": arguments.on_loss or "host",
        "discovery_interval": arguments.discovery_interval,
        "awaits_newcomers": True,
    }


def agent_for(task: Task) -> early.Agent:
    """The agent of this host, with a guess of what the task's workers will have in common."""
    given = [
        word for name, text in task.environment.items() for word in ("--env", f"{name}={text}")
    ]
    how = [] if task.fork else ["--no-fork"]
    return early.start_agent([*how, "-np", str(task.size), *given, *task.program.argv])


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
