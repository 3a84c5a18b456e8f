"""``horovodrun``: its command line, its configuration file, and starting the job they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from farandole.core.errors import FarandoleError, UsageError
from farandole.horovod import __version__
from farandole.horovod.common.util import (
    ccl_built,
    ddl_built,
    extension_available,
    gloo_built,
    mpi_built,
    nccl_built,
)
from farandole.horovod.runner import jobs
from farandole.horovod.runner.calling import run_job as _run
from farandole.horovod.runner.common.util import config_parser
from farandole.horovod.runner.elastic import driver
from farandole.horovod.runner.options import OPTIONS, Arguments, Option

__all__ = [
    "_run",
    "_run_elastic",
    "check_build",
    "gloo_built",
    "mpi_built",
    "parse_args",
    "run_commandline",
]

_TITLES = {
    "hosts": "hosts and ssh",
    "params": "parameters",
    "autotune": "autotuning",
    "elastic": "elastic jobs",
    "timeline": "timeline",
    "stall_check": "missing ranks",
    "library_options": "libraries",
    "logging": "logging",
    "controller": "controllers",
}


def parse_args() -> Arguments:
    """Read ``sys.argv``, and the configuration file that it names.

    What is wrong with single options ends the program as a command line does; values out of range
    and a configuration that cannot be read raise ``UsageError``.
    """
    arguments = _parser().parse_args(namespace=Arguments(num_proc=None))
    if arguments.config_file:
        given = {option.name for option in OPTIONS if getattr(arguments, option.name) is not None}
        config = _load(arguments.config_file)
        for line in config_parser.set_args_from_config(arguments, config, given):
            sys.stderr.write(f"horovodrun: {arguments.config_file}: {line}\n")
    config_parser.validate_config_args(arguments)
    return arguments


def run_commandline() -> None:
    """Be ``horovodrun``: run the job and exit as ``farandole run`` does."""
    from farandole.launch import job

    try:
        arguments = parse_args()
        if arguments.check_build:
            check_build(bool(arguments.verbose))
        task = jobs.task_of(arguments)
        code = job.run(task, jobs.agent_for(task))
    except FarandoleError as error:
        sys.stderr.write(f"horovodrun: {error}\n")
        code = 2 if isinstance(error, UsageError) else 1
    raise SystemExit(code)


def _run_elastic(args: Arguments) -> list[Any] | None:
    """Run an elastic job, as patient as :mod:`~farandole.horovod.runner.elastic.driver` says."""
    args.discovery_interval = driver.DISCOVER_HOSTS_FREQUENCY_SECS
    args.elastic_timeout = args.elastic_timeout or driver.ELASTIC_TIMEOUT_SECS
    return _run(args)


def check_build(verbose: bool) -> None:
    """Show what can be used, in the form in which Horovod shows it, and exit."""
    parts: dict[str, dict[str, object]] = {
        "Available Frameworks": {
            "TensorFlow": extension_available("tensorflow", verbose),
            "PyTorch": extension_available("torch", verbose),
            "MXNet": extension_available("mxnet", verbose),
        },
        "Available Controllers": {"MPI": mpi_built(verbose), "Gloo": gloo_built(verbose)},
        "Available Tensor Operations": {
            "NCCL": nccl_built(verbose),
            "DDL": ddl_built(verbose),
            "CCL": ccl_built(verbose),
            "MPI": mpi_built(verbose),
            "Gloo": gloo_built(verbose),
        },
    }
    lines = [f"Horovod v{__version__} (Farandole):"]
    for title, entries in parts.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in entries.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(0)


def _load(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"--config-file {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path} is not YAML: {error}") from None
    if config is not None and not isinstance(config, dict):
        raise UsageError(f"--config-file {path} must hold sections such as `params:`.")
    return config or {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Start a program on several ranks, with Horovod's options. Those without a "
        "description have no effect here, and say so.",
        usage="horovodrun [options] program [arguments]",
    )
    version = f"{__version__} (Farandole)"
    parser.add_argument("-v", "--version", action="version", version=version)
    parser.add_argument(
        "-cb", "--check-build", action="store_true", help="show what can be used, and exit"
    )
    parser.add_argument(
        "--config-file", help="YAML file with options; the command line overrides it"
    )
    for flag in ("--network-interfaces", "--network-interface"):
        parser.add_argument(
            flag, dest="nics", action=_Interfaces,
            help="interfaces for traffic between hosts, separated by commas",
        )  # fmt: skip
    groups: dict[str, Any] = {"run": parser}
    for option in OPTIONS:
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(_TITLES[option.section])
        _add(groups[option.section], option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(group: Any, option: Option) -> None:
    exclusive = group.add_mutually_exclusive_group() if option.off else group
    if option.kind is None:
        exclusive.add_argument(
            *option.on, dest=option.name, action="store_const", const=True, help=option.help
        )
    else:
        exclusive.add_argument(
            *option.on, dest=option.name, type=option.kind, choices=option.choices,
            nargs=option.count, metavar=_metavar(option), help=option.help,
        )  # fmt: skip
    if option.off:
        exclusive.add_argument(
            *option.off, dest=option.name, action="store_const", const=False,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def _metavar(option: Option) -> str:
    return {int: "N", float: "X"}.get(option.kind, "TEXT")  # type: ignore[call-overload, no-any-return]


class _Interfaces(argparse.Action):
    """Collects the names of interfaces from all the times that the option is given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before: set[str] = getattr(namespace, self.dest) or set()
        setattr(namespace, self.dest, before | set(str(values).split(",")))


if __name__ == "__main__":
    run_commandline()
