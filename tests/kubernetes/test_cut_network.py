"""The network is cut while a command works: one clear error, and nothing has changed by half."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from api_server import ApiServer, Fault
from test_commands import call, pod, server, submit

from farandole.launch.kubernetes import client, following

__all__ = ["server"]

COMMANDS = {
    "list": (),
    "status": (),
    "logs": (),
    "explain": (),
    "events": (),
    "stop": (),
    "resume": (),
    "scale": ("3",),
    "delete": (),
}


@pytest.fixture
def job(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An elastic job with a pod that has printed something."""
    name = submit("--nodes", "1:4")
    server.print(pod(server, name, 0, phase="Running"), "hello")
    monkeypatch.setattr(client, "PATIENCE", 0.3)
    monkeypatch.setattr(following, "PAUSE", 0.01)
    return name


def refused(server: ApiServer, *words: str) -> None:
    """The command fails with one line, and what is in the cluster is as it was."""
    before = copy.deepcopy(server.objects)
    (line,) = call(*words, code=1).splitlines()
    assert line.startswith("Error: ")
    assert "does not answer" in line or "cannot be read to its end" in line
    assert server.objects == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_network_that_is_not_there(server: ApiServer, job: str, command: str) -> None:
    server.faults.append(Fault(lambda *_: True))
    named = () if command == "list" else (job,)
    refused(server, command, *named, *COMMANDS[command])


@pytest.mark.parametrize(
    ("command", "method", "path"),
    [
        ("logs", "GET", "/log"),
        ("logs", "LOG", ""),
        ("explain", "GET", "/events"),
        ("events", "GET", "/events"),
        ("stop", "PATCH", ""),
        ("resume", "PATCH", ""),
        ("scale", "PATCH", ""),
        ("delete", "DELETE", ""),
    ],
)
def test_a_network_that_is_cut_in_the_middle(
    server: ApiServer, job: str, command: str, method: str, path: str
) -> None:
    server.faults.append(Fault(lambda m, asked: m == method and asked.endswith(path)))
    refused(server, command, job, *COMMANDS[command])


def test_submit_without_a_network(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.3)
    server.faults.append(Fault(lambda *_: True))
    refused(server, "submit", "--image", "example/torch:1", "train.py")
    assert not server.objects
