"""From a command line and a job file to a submission."""

from __future__ import annotations

import getpass
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.core.errors import UsageError
from farandole.launch import spec as job_file
from farandole.launch.kubernetes import archive, naming
from farandole.launch.kubernetes.submission import Submission
from farandole.launch.spec import JobSpec

_JOB_FILES = (".yaml", ".yml")
_KEY_BYTES = 32


def resolve(
    program: Sequence[str],
    given: Mapping[str, Any],
    *,
    namespace: str,
    env: Sequence[str] = (),
    project: Path | None = None,
) -> Submission:
    """What ``farandole submit`` is to submit.

    ``program``: a job file and more arguments for its command, or a program and its arguments.
    ``given``: fields of the job file from the command line; ``None`` leaves the file's word.
    ``project``: the folder whose files travel; by default the current one.

    Raises ``UsageError``, which names what is wrong.
    """
    fields = {name: value for name, value in given.items() if value not in (None, ())}
    spec, argv = _read(program, fields)
    _check_program(spec, argv)
    folder = (project or Path.cwd()) if spec.code == "archive" else None
    return Submission(
        name=naming.new_name(spec.name or Path(argv[0]).name),
        namespace=namespace,
        spec=spec,
        argv=argv,
        archive=archive.pack(folder),
        key=secrets.token_hex(_KEY_BYTES),
        owner=_user(),
        extra_env=dict(_variable(text) for text in env),
    )


def _read(program: Sequence[str], fields: Mapping[str, Any]) -> tuple[JobSpec, tuple[str, ...]]:
    if not program:
        raise UsageError("There is no program to run: name a script, or a job file.")
    if program[0].endswith(_JOB_FILES):
        spec = job_file.load(program[0], fields)
        return spec, (*spec.words(), *program[1:])
    spec = job_file.validate({**fields, "command": list(program)}, "The command line")
    return spec, tuple(program)


def _check_program(spec: JobSpec, argv: tuple[str, ...]) -> None:
    script = argv[1] if argv[0] in ("python", "python3") and len(argv) > 1 else argv[0]
    travels = spec.code == "archive" and not os.path.isabs(script)
    if travels and script.endswith(".py") and not os.path.isfile(script):
        raise UsageError(f"There is no file {script} in {os.getcwd()}, which is what would travel.")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {text}: write it as --env NAME=VALUE.")
    return name, value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return ""
