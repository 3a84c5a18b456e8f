"""Submitting against a server: all of a job or nothing of it, whatever goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import NAMESPACE, TOKEN, ApiServer, Fault

from farandole.core.errors import SetupError, UsageError
from farandole.launch.kubernetes import client, kinds, preflight, rights, submitting
from farandole.launch.kubernetes.cluster import Refused
from farandole.launch.kubernetes.submission import Submission
from farandole.launch.spec import JobSpec

pytest.importorskip("kr8s")

MADE = {
    "job": {"jobs", "services", "configmaps", "secrets", "networkpolicies"},
    "jobset": {"jobsets", "configmaps", "secrets", "networkpolicies"},
    "trainjob": {"trainjobs", "trainingruntimes", "configmaps", "secrets", "networkpolicies"},
    "mpijob": {"mpijobs", "configmaps", "secrets", "networkpolicies"},
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    started = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(started.kubeconfig(tmp_path)))
    monkeypatch.setattr(client, "PATIENCE", 1.0)
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.05)
    yield started
    started.close()


def submission(**fields: Any) -> Submission:
    return Submission(
        name=f"train-{secrets.token_hex(2)}",
        namespace=NAMESPACE,
        spec=JobSpec(command="train.py", **{"image": "example/train:1", **fields}),
        argv=("train.py",),
        archive=b"archive",
        key="ab" * 32,
    )


def on_cluster(do: Callable[[client.KubeCluster], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await do(await client.connect())

    return asyncio.run(asyncio.wait_for(run(), 60))


def left(server: ApiServer) -> set[str]:
    return {plural for plural, _ in server.objects if plural != "events"}


@pytest.mark.parametrize("backend", MADE)
def test_all_objects_are_there_owned_by_the_first_and_it_runs(
    server: ApiServer, backend: str
) -> None:
    job = submission(backend=backend)
    on_cluster(lambda cluster: submitting.submit(cluster, job))
    assert left(server) == MADE[backend]
    owner = server.get(kinds.OWNERS[backend], job.name)
    assert owner is not None
    spec = owner["spec"]
    assert not spec.get("suspend", spec.get("runPolicy", {}).get("suspend"))
    for each in server.objects.values():
        if each["metadata"]["uid"] != owner["metadata"]["uid"]:
            (reference,) = each["metadata"]["ownerReferences"]
            assert reference["uid"] == owner["metadata"]["uid"]
    on_cluster(lambda cluster: cluster.delete(kinds.OWNERS[backend], job.name))
    assert left(server) == set()


def test_under_kueue_the_queue_decides_when_it_runs(server: ApiServer) -> None:
    job = submission(queue="team")
    on_cluster(lambda cluster: submitting.submit(cluster, job))
    owner = server.get(kinds.JOB, job.name)
    assert owner is not None
    assert owner["spec"]["suspend"] is True


def test_a_dry_run_asks_the_server_and_creates_nothing(server: ApiServer) -> None:
    on_cluster(lambda cluster: submitting.dry_run(cluster, submission()))
    assert left(server) == set()
    with pytest.raises(SetupError, match="missspelt"):
        on_cluster(
            lambda cluster: submitting.dry_run(
                cluster, submission(pod_patch={"spec": {"missspelt": 1}})
            )
        )


@pytest.mark.parametrize(
    "change",
    [
        {"completions": 3},
        {"template": {"spec": {"terminationGracePeriodSeconds": 3}}},
        {"backoffLimitPerIndex": 9},
    ],
)
def test_a_change_that_a_server_does_not_allow_is_refused_by_ours_too(
    server: ApiServer, change: dict[str, Any]
) -> None:
    job = submission(nodes="1:2")
    on_cluster(lambda cluster: submitting.submit(cluster, job))
    with pytest.raises(Refused, match=next(iter(change))):
        on_cluster(lambda cluster: cluster.patch(kinds.JOB, job.name, {"spec": change}))


VERBS = [("POST", plural) for plural in sorted(MADE["job"])] + [("PATCH", "jobs")]


@pytest.mark.parametrize("code", [0, 403, 422, 500])
@pytest.mark.parametrize(("method", "plural"), VERBS)
def test_a_failure_at_any_point_is_one_error_and_leaves_nothing(
    server: ApiServer, method: str, plural: str, code: int
) -> None:
    server.faults.append(Fault(lambda m, path: m == method and f"/{plural}" in path, code))
    with pytest.raises(SetupError) as error:
        on_cluster(lambda cluster: submitting.submit(cluster, submission()))
    assert left(server) == set()
    assert "\n" not in str(error.value)
    assert {0: "does not answer", 403: "--print-rbac"}.get(code, "injected") in str(error.value)


@pytest.mark.parametrize(("method", "plural"), VERBS)
def test_an_answer_that_is_lost_or_a_busy_server_is_asked_again(
    server: ApiServer, method: str, plural: str
) -> None:
    def fits(m: str, path: str) -> bool:
        return m == method and f"/{plural}" in path

    server.faults += [Fault(fits, 0, times=1, after=True), Fault(fits, 429, times=1)]
    on_cluster(lambda cluster: submitting.submit(cluster, submission()))
    assert left(server) == MADE["job"]


def test_a_name_that_is_taken_is_said_and_stays(server: ApiServer) -> None:
    job = submission()
    on_cluster(lambda cluster: submitting.submit(cluster, job))
    with pytest.raises(SetupError, match=f"There is a Job {job.name} already"):
        on_cluster(lambda cluster: submitting.submit(cluster, dataclasses.replace(job)))
    assert left(server) == MADE["job"]


def test_with_exactly_the_role_that_is_printed_a_job_is_submitted(server: ApiServer) -> None:
    server.role = rights.role("job")

    async def run(cluster: client.KubeCluster) -> None:
        job = submission()
        await preflight.check(cluster, job)
        await submitting.submit(cluster, job)
        await cluster.delete(kinds.JOB, job.name)

    on_cluster(run)
    assert left(server) == set()
    # What the Role does not grant was not even asked for.
    assert not [path for _, path in server.requests if path.endswith("/resourcequotas")]


def test_what_may_be_done_is_asked_once_where_the_server_tells_it(server: ApiServer) -> None:
    on_cluster(lambda cluster: preflight.check(cluster, submission()))
    asked = [path.rpartition("/")[2] for _, path in server.requests]
    assert asked.count("selfsubjectrulesreviews") == 1
    assert "selfsubjectaccessreviews" not in asked


@pytest.mark.parametrize(
    ("rule", "granted"),
    [
        ({}, True),
        ({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}, True),
        ({"resources": ["*/log"]}, True),
        ({"verbs": ["list"]}, False),
        ({"apiGroups": ["batch"]}, False),
        ({"resources": ["pods"]}, False),
        ({"resourceNames": ["one"]}, False),
    ],
)
def test_rules_are_read_as_the_server_does(rule: dict[str, Any], granted: bool) -> None:
    fits = {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods/log"]}
    right = rights.Right(kinds.POD, ("get",), "log")
    other = {"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}
    assert rights.granted([other, {**fits, **rule}], "get", right) is granted


@pytest.mark.parametrize("secretive", [False, True])
@pytest.mark.parametrize("rule", range(len(rights.role("job")["rules"])))
def test_each_right_that_is_missing_is_named_before_anything_is_created(
    server: ApiServer, rule: int, secretive: bool
) -> None:
    server.secretive = secretive
    role = rights.role("job")
    missing = role["rules"].pop(rule)
    server.role = role
    with pytest.raises(SetupError, match=missing["resources"][0]) as error:
        on_cluster(lambda cluster: preflight.check(cluster, submission()))
    assert "--print-rbac" in str(error.value)
    assert left(server) == set()


def refused(job: Submission) -> str:
    with pytest.raises(SetupError) as error:
        on_cluster(lambda cluster: preflight.check(cluster, job))
    return str(error.value)


def test_what_the_job_names_and_is_not_there_is_said_all_at_once(server: ApiServer) -> None:
    said = refused(
        submission(
            datasets="claim:data",
            secrets=["keys"],
            image_pull_secrets=["registry"],
            secret_env={"TOKEN": {"secret": "hub", "key": "token"}},
            queue="team",
        )
    )
    for words in ("volume claim data", "keys", "registry", "hub", "LocalQueue (`queue`) team"):
        assert words in said


def test_a_claim_for_one_node_is_refused_for_several(server: ApiServer) -> None:
    server.put(
        kinds.CLAIM, {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    )
    assert "one node only" in refused(submission(nodes=2, checkpoints="claim:ckpt"))
    on_cluster(lambda cluster: preflight.check(cluster, submission(checkpoints="claim:ckpt")))


def test_a_quota_that_does_not_suffice_is_said(server: ApiServer) -> None:
    status = {"hard": {"requests.nvidia.com/gpu": "8"}, "used": {"requests.nvidia.com/gpu": "4"}}
    server.put(kinds.QUOTA, {"metadata": {"name": "gpus"}, "status": status})
    assert "leaves 4 of requests.nvidia.com/gpu" in refused(submission(nodes=2, gpus=4))
    on_cluster(lambda cluster: preflight.check(cluster, submission(gpus=4)))


def test_an_old_server_and_a_missing_operator_are_said(server: ApiServer) -> None:
    server.version = "1.28"
    assert "1.29 or later" in refused(submission())
    server.version = "1.30"
    assert "1.31 or later is needed for an elastic job" in refused(submission(nodes="2:4"))
    server.kinds.remove(kinds.JOBSET)
    assert "install JobSet" in refused(submission(backend="jobset"))


def test_a_stranger_is_told_to_log_in(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder, token="wrong")))
    stranger = r"^The cluster does not know you \(Unauthorized\)\. Log in again"
    with pytest.raises(SetupError, match=stranger):
        on_cluster(lambda cluster: submitting.submit(cluster, submission()))
    with pytest.raises(SetupError, match=stranger):
        on_cluster(lambda cluster: cluster.find(kinds.JOB))


def test_who_may_not_is_not_logged_in_again_and_again(server: ApiServer) -> None:
    server.faults.append(Fault(lambda method, path: path.endswith("/services"), 403))
    with pytest.raises(SetupError, match="--print-rbac"):
        on_cluster(lambda cluster: submitting.submit(cluster, submission()))
    asked = [path.rpartition("/")[2] for method, path in server.requests if method == "POST"]
    assert asked.count("services") == 1


def test_a_token_that_has_expired_is_asked_for_anew(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plugin"
    folder.mkdir()
    token = folder / "token"
    token.write_text(TOKEN)
    plugin = folder / "log-in"
    plugin.write_text(
        f"#!{sys.executable}\n"
        "import json\n"
        "kind = {'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential'}\n"
        f"print(json.dumps(kind | {{'status': {{'token': open({str(token)!r}).read()}}}}))\n"
    )
    plugin.chmod(0o755)
    config = server.kubeconfig(folder)
    said = yaml.safe_load(config.read_text())
    said["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(plugin),
            "interactiveMode": "Never",
        }
    }
    config.write_text(yaml.safe_dump(said))
    monkeypatch.setenv("KUBECONFIG", str(config))

    async def run() -> None:
        cluster = await client.connect()
        server.token = "a-new-one"
        token.write_text(server.token)
        await asyncio.gather(*(cluster.find(kind) for kind in (kinds.JOB, kinds.POD)))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_no_configuration_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SetupError, match="set KUBECONFIG"):
        on_cluster(lambda cluster: cluster.version())


def test_a_job_without_an_image_is_refused_before_the_cluster_is_asked(server: ApiServer) -> None:
    with pytest.raises(UsageError, match="image: is missing"):
        on_cluster(lambda cluster: submitting.submit(cluster, submission(image=None)))
    assert not [each for each in server.requests if each[0] == "POST"]
