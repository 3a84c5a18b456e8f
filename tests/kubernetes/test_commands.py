"""The commands that look after jobs: what they show, as text and as JSON, and what they do."""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from api_server import ApiServer, Fault
from click.testing import CliRunner

from farandole.cli.commands import cli
from farandole.launch import spec, template
from farandole.launch.kubernetes import following, kinds, naming, rights, standing

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


def test_who_may_see_the_jobs_of_one_backend_alone_finds_them(server: ApiServer) -> None:
    labels = naming.labels("train-1234", "jobset")
    server.role = rights.role("jobset")
    assert "jobs is forbidden" in call("list", code=1)
    server.put(kinds.JOBSET, {"metadata": {"name": "train-1234", "labels": labels}, "spec": {}})
    (row,) = as_json("list")
    assert row["name"] == "train-1234"
    assert "train-1234" in call("status", "train")


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
    this_second = server.logs[where].lines[0][0][:19] + "Z"
    assert call("logs", "--since", this_second, name).startswith("[0] a")
    assert call("logs", "--since", "10m", name).startswith("[0] a")
    assert "how long ago is needed" in call("logs", "--since", "yesterday", name, code=2)


def test_logs_are_shown_although_one_pod_has_none(server: ApiServer) -> None:
    name = submit("--nodes", "2")
    server.print(pod(server, name, 0), "[0] a")
    pod(server, name, 1, phase="Pending")
    assert call("logs", name) == "[0] a\n"


def test_a_node_that_does_not_answer_is_named_and_the_other_logs_are_shown(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "PAUSE", 0.01)
    name = submit("--nodes", "2")
    lost = pod(server, name, 0, phase="Failed")
    server.print(pod(server, name, 1, phase="Succeeded"), "[1] b")
    server.print(f"{name}-1-abcde", "", ended=True)
    server.faults.append(Fault(lambda _, path: f"/{lost}/log" in path, 500, "no route to host"))
    said = call("logs", name)
    assert "[1] b" in said
    assert f"The log of {lost} on gpu-0 cannot be read to its end: no route to host" in said
    done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    server.change(kinds.JOB, name, done)
    assert "[1] b" in call("logs", "-f", name)


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


def test_a_job_that_succeeded_in_the_end_has_nothing_to_explain(server: ApiServer) -> None:
    name = submit()
    killed = {"terminated": {"exitCode": 137, "reason": "Error"}}
    pod(server, name, 0, phase="Failed", containerStatuses=[{"name": "trainer", "state": killed}])
    assert "was killed (SIGKILL)" in call("explain", name)
    conditions = [{"type": "Complete", "status": "True"}]
    server.change(kinds.JOB, name, {"status": {"conditions": conditions}})
    assert call("explain", name) == f"{name} is succeeded; nothing looks wrong.\n"


def test_events_stand_in_the_order_of_their_times_however_exactly_these_are_told(
    server: ApiServer,
) -> None:
    name = submit()
    job = server.get(kinds.JOB, name)
    assert job is not None
    about = {"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    for reason, time in (
        ("Third", {"eventTime": "2026-12-01T15:35:18.000001Z", "lastTimestamp": None}),
        ("First", {"eventTime": "2026-12-01T15:35:16.999999Z", "lastTimestamp": None}),
        ("Second", {"eventTime": None, "lastTimestamp": "2026-12-01T15:35:17Z"}),
    ):
        event = {"metadata": {"name": reason.lower()}, "involvedObject": about, "reason": reason}
        server.put(kinds.EVENT, {**event, **time})
    assert [each["reason"] for each in as_json("events", name)] == ["First", "Second", "Third"]
    assert [each["time"][17:] for each in as_json("events", name)] == ["16Z", "17Z", "18Z"]


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


def test_a_dry_run_takes_the_job_file_after_it_for_what_it_is(
    tmp_path: Path, server: ApiServer
) -> None:
    Path("job.yaml").write_text("command: train.py\nimage: example/torch:1\nnodes: 2\n")
    assert "kind: Job" in call("submit", "--dry-run", "job.yaml")
    assert "accepts the job" in call("submit", "--dry-run=server", "job.yaml")
    printed = call("submit", "--image", "x:1", "--dry-run", "train.py", "--dry-run", "--nodes", "3")
    assert "train.py --dry-run --nodes 3" in printed
    assert not server.objects


def test_a_job_without_nodes_is_refused(server: ApiServer) -> None:
    said = call("submit", "--image", "x:1", "--nodes", "0", "train.py", code=2)
    assert "at least one node is needed" in said
    assert not server.objects


@pytest.mark.parametrize(
    ("config", "said"),
    [("a: [", "no cluster to talk to"), (None, "exit")],
)
def test_a_kubeconfig_that_does_not_work_is_one_error(
    server: ApiServer, tmp_path: Path, config: str | None, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if config is None:
        found = yaml.safe_load((tmp_path / "kubeconfig").read_text())
        version = "client.authentication.k8s.io/v1"
        found["users"][0]["user"] = {"exec": {"apiVersion": version, "command": "false"}}
        config = yaml.safe_dump(found)
    (tmp_path / "broken").write_text(config)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    shown = call("list", code=1)
    assert shown.startswith("Error: There is no cluster to talk to")
    assert said in shown


def test_no_copy_of_the_kubeconfigs_keys_is_left(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(True)[0])
    found = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    data = base64.b64encode(authority.encode()).decode()
    found["clusters"][0]["cluster"]["certificate-authority-data"] = data
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(found))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    call("list")
    assert list(scratch.iterdir()) == []
