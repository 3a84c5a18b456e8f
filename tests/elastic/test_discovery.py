"""Which hosts there are: fixed, from a file, from a program that is asked again and again."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from farandole.core.errors import SetupError, UsageError
from farandole.core.faults import Fault, parse
from farandole.launch import hosts
from farandole.launch.discovery import Discovery, Watch
from farandole.launch.elastic_plan import resolve
from farandole.launch.task import Elastic


def script(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_fixed_hosts_do_not_change() -> None:
    fixed = Discovery(fixed=hosts.parse("a:2,b:3"))
    assert fixed.look() == {"a": 2, "b": 3}
    assert not fixed.changes


def test_a_program_names_hosts_with_slots_or_without(tmp_path: Path) -> None:
    asked = Discovery(script=script(tmp_path, "echo a:2; echo; echo b"), slots_per_host=4)
    assert asked.look() == {"a": 2, "b": 4}


def test_a_host_without_slots_needs_the_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--slots-per-host"):
        Discovery(script=script(tmp_path, "echo b")).look()


@pytest.mark.parametrize(
    ("text", "said"), [("echo no >&2; exit 3", "exit code 3: no"), ("exit 1", "exit code 1")]
)
def test_a_program_that_fails_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        Discovery(script=script(tmp_path, text)).look()


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(SetupError, match="no-such-program"):
        Discovery(script="no-such-program-anywhere").look()


def test_changes_are_told_and_failures_leave_the_hosts_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n")
    told: queue.Queue[object] = queue.Queue()
    looked = Discovery(file=str(path), interval=0.01)
    watch = Watch(looked, looked.look(), told.put, told.put)
    try:
        path.write_text("a slots=2\nb slots=1\n")
        assert told.get(timeout=20) == {"a": 2, "b": 1}
        path.unlink()
        complaint = told.get(timeout=20)
        assert isinstance(complaint, str)
        assert "The hosts stay as they are." in complaint
        path.write_text("b slots=1\n")
        assert told.get(timeout=20) == {"b": 1}
    finally:
        watch.close()


def plan(**options: object) -> Elastic | None:
    given: dict[str, object] = {"ranks": None, "hosts": None, "hostfile": None, **options}
    ranks, named, file = given.pop("ranks"), given.pop("hosts"), given.pop("hostfile")
    return resolve(None, ranks, named, file, start_timeout=120.0, **given)  # type: ignore[arg-type]


def test_a_job_is_elastic_when_its_size_may_change() -> None:
    assert plan(ranks=3) is None
    elastic = plan(ranks=3, min_np=2)
    assert elastic is not None
    assert (elastic.policy.start_size, elastic.policy.min_size, elastic.first) == (
        3, 2, {"localhost": 3},
    )  # fmt: skip
    larger = plan(ranks=2, max_np=4, hosts="localhost:4")
    assert larger is not None
    assert (larger.policy.min_size, larger.policy.max_size, larger.elsewhere) == (2, 4, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 2, "on_loss": "host"}, "add --min-np"),
        ({"ranks": 2, "reset_limit": 0}, "--reset-limit is for jobs"),
        ({"max_np": 4}, "-np or --min-np"),
        ({"min_np": 2, "hosts": "a:1", "host_discovery_script": "s"}, "by one of them"),
        ({"ranks": 2, "min_np": 3}, "--min-np 3 must be from 1 to the 2"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan(**options)


def test_faults_are_read_and_written() -> None:
    text = "kill:rank=1@step=30,stop:rank=2@step=50"
    faults = parse(text)
    assert faults == (Fault("kill", 1, 30), Fault("stop", 2, 50))
    assert ",".join(map(str, faults)) == text


@pytest.mark.parametrize("wrong", ["", "kill", "burn:rank=1@step=2", "kill:rank=1@step=0"])
def test_faults_that_cannot_be_read_are_named(wrong: str) -> None:
    with pytest.raises(UsageError, match="kill:rank=1@step=30"):
        parse(wrong)
