"""The job file, ``farandole.yaml``: the model of its fields, and reading it.

Needed where a job is started only; workers never import it.
"""

from __future__ import annotations

import difflib
import shlex
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from farandole.core.errors import UsageError


class JobSpec(BaseModel):
    """What a job file may say. A field that is left out keeps its default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    command: Annotated[str | list[str], Field(min_length=1)]
    """What to run: a line (quotes count, nothing is expanded), or a list of words."""
    ranks: Annotated[int | None, Field(ge=1)] = None
    """Number of ranks. Default: the number of GPUs, or 1 where there is none."""
    hosts: Annotated[str | None, Field(min_length=1)] = None
    """Hosts and how many ranks each takes: ``node1:4,node2:4``. Default: this machine."""
    hostfile: str | None = None
    """A file that names the hosts, instead of ``hosts``."""
    remote_python: str | None = None
    """The Python of other hosts. Default: the path of the one that runs the launcher."""
    ssh: str = "ssh"
    """The command that reaches other hosts, a line; for example ``ssh -p 2222``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables for the workers' environment. Values are text: quote numbers."""
    output_dir: str | None = None
    """Folder for one file a rank with all that it prints. Default: none."""
    start_timeout: Annotated[float | None, Field(gt=0, strict=False)] = None
    """Seconds that the first rank in ``init()`` waits for the others. Default: 120."""
    grace: Annotated[float | None, Field(ge=0, strict=False)] = None
    """Seconds that workers may take to end after Ctrl-C or SIGTERM. Default: 30."""
    timeline: Annotated[str | None, Field(min_length=1)] = None
    """File in which every rank's doings are recorded. Default: none."""
    timeline_mark_cycles: bool = False
    """Whether that file shows the cycles of the negotiation."""
    autotune: bool = False
    """Whether training begins with trials of other sizes of buckets."""
    autotune_log_file: Annotated[str | None, Field(min_length=1)] = None
    """File for what was tried and chosen; a choice in it is used again. Default: none."""
    fork: bool = True
    """Whether workers may be forked from a process that has torch imported."""

    def words(self) -> list[str]:
        """The command, word by word."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)


def load(path: str) -> JobSpec:
    """Read a job file; ``UsageError`` names the file, the field, its value and the remedy.

    Example::

        # farandole.yaml
        command: train.py --epochs 3
        ranks: 4
        env:
          DATA: /data/digits
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold fields such as `command: train.py`, one a line.")
    try:
        return JobSpec.model_validate(content)
    except pydantic.ValidationError as error:
        problems = "\n".join(f"  {_explain(problem)}" for problem in error.errors())
        raise UsageError(f"{path}:\n{problems}") from None


def _explain(problem: Any) -> str:
    # Of a union, pydantic names the member that it tried in the place.
    place = ".".join(str(p) for p in problem["loc"] if p not in ("str", "list[str]"))
    if problem["type"] == "missing":
        return f"{place}: is missing. Add `{place}: …`."
    if problem["type"] == "extra_forbidden":
        fields = list(JobSpec.model_fields)
        near = difflib.get_close_matches(place, fields, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(fields)}."
        return f"{place}: there is no such field. {hint}"
    wanted = problem["msg"][0].lower() + problem["msg"][1:]
    quote = " Put it in quotes." if problem["type"] == "string_type" else ""
    return f"{place}: {problem['input']!r} is not accepted: {wanted}.{quote}"
