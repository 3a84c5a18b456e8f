"""The job file, ``farandole.yaml``: the model of its fields, and reading it.

Needed where a job is started only; workers never import it.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import ConfigDict, Field

from farandole.core.errors import UsageError
from farandole.launch.cluster import ClusterFields


class JobSpec(ClusterFields):
    """What a job file may say. A field that is left out keeps its default."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

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
    stall_timeout: Annotated[float | None, Field(ge=0, strict=False)] = None
    """Seconds that ranks wait for another one that lives and does not come. Default: 1800."""
    grace: Annotated[float | None, Field(ge=0, strict=False)] = None
    """Seconds that workers may take to end after Ctrl-C or SIGTERM. Default: 30."""
    min_ranks: Annotated[int | None, Field(ge=1)] = None
    """Go on with as few ranks as this when some are lost. Default: the job ends with any."""
    max_ranks: Annotated[int | None, Field(ge=1)] = None
    """Take in new hosts up to so many ranks. Default: as many as the hosts have slots."""
    host_discovery_script: str | None = None
    """A program that prints the hosts of now, one a line: ``node1:4``. Default: hosts are fixed."""
    on_loss: Literal["rank", "host"] | None = None
    """What goes when a rank is lost: that ``rank``, or all of its ``host``. Default: ``rank``."""
    on_loss_size: Literal["shrink", "hold"] | None = None
    """Go on with fewer ranks, or wait for the replacement. Default: ``shrink``."""
    reset_limit: Annotated[int | None, Field(ge=0)] = None
    """How often the ranks may change. Default: any number of times."""
    elastic_timeout: Annotated[float | None, Field(gt=0, strict=False)] = None
    """Seconds to wait for ``min_ranks`` or a replacement. Default: 600."""
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


class _Loader(yaml.SafeLoader):
    """YAML as people read it: ``2:4`` is text. YAML 1.1 counts in sixties, and would make it 124
    nodes of ``nodes: 2:4``."""

    def number(self, node: yaml.ScalarNode) -> int | float | str:
        """What looks like a number, or like several with colons between them."""
        if ":" in node.value:
            return str(node.value)
        if node.tag.endswith("int"):
            return int(self.construct_yaml_int(node))
        return float(self.construct_yaml_float(node))


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)


def load(path: str, over: Mapping[str, Any] | None = None) -> JobSpec:
    """Read a job file; ``UsageError`` names the file, the field, its value and the remedy.

    ``over``: fields that count instead of the file's, as a command line gives them.

    Example::

        # farandole.yaml
        command: train.py --epochs 3
        ranks: 4
        env:
          DATA: /data/digits
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _Loader)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold fields such as `command: train.py`, one a line.")
    return validate({**content, **(over or {})}, path)


def validate(fields: Mapping[str, Any], source: str) -> JobSpec:
    """The job that ``fields`` describe; ``UsageError`` says what of ``source`` is wrong."""
    try:
        return JobSpec.model_validate(dict(fields))
    except pydantic.ValidationError as error:
        problems = "\n".join(f"  {_explain(problem)}" for problem in error.errors())
        raise UsageError(f"{source}:\n{problems}") from None


def schema() -> dict[str, Any]:
    """The JSON schema of job files, by which editors complete and check them."""
    made = JobSpec.model_json_schema()
    made["title"] = "farandole.yaml"
    return made


def _explain(problem: Any) -> str:
    # Of a union, pydantic names the member that it tried in the place.
    place = ".".join(str(p) for p in problem["loc"] if not _is_type(p))
    if not place:
        return str(problem["msg"]).removeprefix("Value error, ") + "."
    if problem["type"] == "missing":
        return f"{place}: is missing. Add `{place}: …`."
    if problem["type"] == "extra_forbidden":
        fields = list(JobSpec.model_fields)
        near = difflib.get_close_matches(place, fields, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(fields)}."
        return f"{place}: there is no such field. {hint}"
    said = problem["msg"].removeprefix("Value error, ")
    wanted = said[0].lower() + said[1:]
    quote = " Put it in quotes." if problem["type"] == "string_type" else ""
    return f"{place}: {problem['input']!r} is not accepted: {wanted}.{quote}"


def _is_type(step: object) -> bool:
    return isinstance(step, str) and ("[" in step or step in ("str", "int", "float"))
