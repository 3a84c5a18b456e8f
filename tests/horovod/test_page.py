"""docs/horovod.md says what is true."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.horovod import names
from farandole.horovod.runner.options import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()


def rows(heading: str) -> Iterator[tuple[list[str], str]]:
    """The table under a heading: the quoted words of the first cell, and the second cell."""
    section = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    for line in section.splitlines():
        first, bar, second = line.strip("| ").partition(" | ")
        if bar and "`" in first:
            yield re.findall(r"`([^`]+)`", first), second


def exists(name: str) -> bool:
    """Whether a dotted name of Horovod's is a module of ours, or something in one."""
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(names.target(module) or "farandole.horovod")
        if hasattr(found, attribute):
            return True
        importlib.import_module(names.target(name) or "")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    ("heading", "module"),
    [
        ("### `horovod.torch`", "horovod.torch."),
        ("### `horovod.torch.mpi_ops`", "horovod.torch.mpi_ops."),
        ("### Other modules", ""),
    ],
)
def test_every_name_is_in_the_state_that_the_page_tells(heading: str, module: str) -> None:
    told = [(module + name, state) for quoted, state in rows(heading) for name in quoted]
    assert told
    for name, state in told:
        if name.startswith("horovod"):
            assert exists(name) == state.startswith("there"), f"{name}: {state}"


def test_the_page_lists_every_public_name_of_the_front() -> None:
    import farandole.torch as hvd

    told = {name for quoted, _ in rows("### `horovod.torch`") for name in quoted}
    ours_alone = {"Checkpoints", "DataLoader", "export_weights", "mpi_ops"}
    assert set(hvd.__all__) - told == ours_alone


def test_the_helpers_that_the_page_lists_are_there() -> None:
    (state,) = (s for quoted, s in rows("### Other modules") if quoted == ["horovod.common.util"])
    helpers = re.findall(r"`(\w+)`", state)
    assert [name for name in helpers if not exists(f"horovod.common.util.{name}")] == []
    assert len(helpers) > 10


def test_every_option_is_told_with_its_effect() -> None:
    effects = {flag: effect for quoted, effect in rows("## `horovodrun`") for flag in quoted}
    for option in OPTIONS:
        wanted = f"none: {option.why_not}" if option.why_not else option.help
        assert effects[option.on[0]] == wanted
