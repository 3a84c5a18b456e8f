"""The commands that look after jobs: what they show, as text and as JSON, and what they do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from api_server import ApiServer
from click.testing import CliRunner

from farandole.cli.commands import cli
from farandole.launch import spec, template
from farandole.launch.kubernetes import kinds, standing

pytest.importorskip("kr8s")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    started = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(started.kubeconfig(tmp_path)))
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hi')\n")
    monkeypatch.chdir(project)
    yield started
    started.close()


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def as_json(*words: str) -> Any:
    return json.loads(call(*words, "--output", "json"))


def submit(*options: str) -> str:
    said = call("submit", "-d", "--image", "example/torch:1", *options, "train.py", "--lr", "1")
    found = re.search(r"submitted (\S+) to team", said)
    assert found
    return found[1]


def pod(server: ApiServer, name: str, index: int, **status: Any) -> str:
    """A pod of a job, as the cluster would have made it."""
    job = server.get(kinds.JOB, name)
    assert job is not None
    made = server.put(kinds.POD, {
        "metadata": {
            "name": f"{name}-{index}-abcde",
            "labels": {**job["spec"]["template"]["metadata"]["labels"]},
            "annotations": {standing.INDEX: str(index)},
            "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
        },
        "spec": {**job["spec"]["template"]["spec"], "nodeName": f"gpu-{index}"},
        "status": {"phase": "Running", **status},
    })  # fmt: skip
    return str(made["metadata"]["name"])


def test_list_and_status(server: ApiServer) -> None:
    name = submit("--nodes", "2")
    pod(server, name, 0)
    pod(server, name, 1, phase="Pending")
    (row,) = as_json("list")
    assert (row["name"], row["state"], row["nodes"], row["running"]) == (name, "running", "2", 1)
    assert row["command"] == "train.py --lr 1"
    assert re.search(rf"{name} +running +2 +1 .*train.py --lr 1", call("list"))
    found = as_json("status", name[:6])
    assert [(each["index"], each["phase"], each["node"]) for each in found["pods"]] == [
        (0, "Running", "gpu-0"),
        (1, "Pending", "gpu-1"),
    ]
    assert f"{name}: running, 1 of 2 nodes run" in call("status", name)


def test_a_name_that_does_not_fit_one_job_is_refused_with_those_that_there_are(
    server: ApiServer,
) -> None:
    first, second = sorted([submit(), submit()])
    said = call("status", "train", code=2)
    assert "several jobs" in said
    assert f"{first}, {second}" in said
    assert "There is no job other" in call("logs", "other", code=2)


def test_logs_of_all_ranks_and_of_one(server: ApiServer) -> None:
    name = submit()
    where = pod(server, name, 0, phase="Succeeded")
    for text in ("[0] a", "[1] b", "[0-1] both"):
        server.print(where, text)
    server.print(where, "", ended=True)
    assert call("logs", name).splitlines() == ["[0] a", "[1] b", "[0-1] both"]
    assert call("logs", "--rank", "1", name).splitlines() == ["[1] b", "[0-1] both"]
    assert call("logs", "--since", "2999-01-01T00:00:00Z", name) == ""


def test_events_and_explain(server: ApiServer) -> None:
    name = submit("--gpus", "8")
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": message}  # fmt: skip
    where = pod(server, name, 0, phase="Pending", conditions=[condition])
    thing = server.get(kinds.POD, where)
    assert thing is not None
    server.event(thing, "FailedScheduling", message)
    (event,) = as_json("events", name)
    assert (event["about"], event["reason"], event["message"]) == (
        where, "FailedScheduling", message,
    )  # fmt: skip
    assert "FailedScheduling" in call("events", name)
    cause = as_json("explain", name)[0]
    assert cause["cause"] == "No node has nvidia.com/gpu free"
    assert cause["where"] == where
    assert call("explain", name).startswith("No node has nvidia.com/gpu free")


def test_stop_resume_scale_and_delete(server: ApiServer) -> None:
    name = submit("--nodes", "1:4")
    call("stop", name)
    assert as_json("status", name)["state"] == "stopped"
    call("resume", name)
    assert as_json("status", name)["state"] == "starting"
    call("scale", name, "2")
    job = server.get(kinds.JOB, name)
    assert job is not None
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    call("delete", name)
    assert not [each for each in server.objects if each[0] != "events"]
    assert as_json("list") == []


def test_a_job_that_is_not_elastic_is_not_scaled(server: ApiServer) -> None:
    name = submit("--nodes", "2")
    assert "One that can be scaled says" in call("scale", name, "3", code=2)


def test_a_shell_is_opened_by_kubectl(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = submit("--nodes", "2")
    where = pod(server, name, 1)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "kubectl").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "kubectl").chmod(0o755)
    main = [sys.executable, "-m", "farandole.cli.main", "shell"]
    environment = {**os.environ, "PATH": f"{tools}:{os.defpath}"}
    shell = [*main, "--node", "1", name]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"--namespace team exec -it {where} -- sh\n"
    assert "Node 0 of" in call("shell", name, code=2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs kubectl" in call("shell", name, code=1)


def test_init_writes_a_job_file_that_says_all_fields_and_their_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote farandole.yaml" in call("init")
    written = (tmp_path / "farandole.yaml").read_text()
    assert spec.load("farandole.yaml").gpus == 1
    everything = re.sub(r"^# (\w+:)", r"\1", written, flags=re.M)
    (tmp_path / "all.yaml").write_text(everything)
    fields = yaml.safe_load(everything)
    assert set(fields) == set(spec.JobSpec.model_fields)
    defaults = spec.load("all.yaml")
    assert defaults == spec.load("farandole.yaml")
    assert "is there already" in call("init", code=2)


def test_the_schema_accepts_what_we_accept_and_explains_every_field() -> None:
    found = json.loads(call("init", "--schema"))
    jsonschema.Draft202012Validator.check_schema(found)
    validator = jsonschema.Draft202012Validator(found)
    good = {"command": "train.py", "keep": "7d", "time_limit": 60, "memory": "64Gi", "cpu": 8,
            "nodes": "2:4", "secret_env": {"A": {"secret": "s", "key": "k"}}}  # fmt: skip
    validator.validate(good)
    for bad in ({"keep": "soon"}, {"memory": "lots"}, {"gpu": 8}):
        assert not validator.is_valid({"command": "train.py", **bad}), bad
    assert all(each.get("description") for each in found["properties"].values())
    assert "nodes:" in template.text()


def test_help_needs_neither_pydantic_nor_a_client_of_kubernetes() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from farandole.cli.commands import cli; "
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0; "
        "print([m for m in ('pydantic', 'yaml', 'kr8s', 'httpx', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
