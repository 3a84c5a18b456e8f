"""A job file to begin with: every field with what it means, all but a few commented out."""

from __future__ import annotations

from typing import Any

import yaml

from farandole.launch.spec import JobSpec

_CHOSEN: dict[str, Any] = {
    "command": "train.py",
    "nodes": 1,
    "gpus": 1,
    "image": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
}
"""What most jobs on a cluster say."""

_HEAD = """\
# A job of Farandole's: `farandole run` runs it here, `farandole submit` on a cluster.
# Fields that are commented out show their defaults.
"""


def text() -> str:
    """The job file."""
    chosen = [_field(name, value, "") for name, value in _CHOSEN.items()]
    rest = [
        _field(name, field.get_default(call_default_factory=True), "# ")
        for name, field in JobSpec.model_fields.items()
        if name not in _CHOSEN
    ]
    return "\n".join([_HEAD, *chosen, *rest])


def _field(name: str, value: Any, prefix: str) -> str:
    meaning = JobSpec.model_fields[name].description or ""
    comment = "".join(f"# {line}\n" for line in meaning.replace("``", "`").splitlines())
    dumped = "" if value is None else yaml.safe_dump(value, default_flow_style=True)
    shown = dumped.removesuffix("...\n").rstrip()
    return f"{comment}{prefix}{name}: {shown}".rstrip() + "\n"
