"""Why a job does not run or has failed: the first line is the right one."""

# ruff: noqa: E501 - a case a line

from __future__ import annotations

from typing import Any

import pytest

from farandole.launch.kubernetes.explain import Evidence, causes

JOB: dict[str, Any] = {
    "kind": "Job",
    "metadata": {"name": "t-7f3a", "labels": {}},
    "spec": {"suspend": False},
    "status": {},
}


def pod(number: int = 0, *, spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    container = {
        "name": "trainer",
        "image": "example/train:1",
        "resources": {"limits": {"memory": "8Gi"}},
    }
    return {
        "metadata": {"name": f"t-7f3a-{number}-abcde"},
        "spec": {"containers": [container], **(spec or {})},
        "status": status,
    }


def unscheduled(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(phase="Pending", conditions=[condition])


def waiting(reason: str, message: str = "", spec: dict[str, Any] | None = None) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(phase="Pending", containerStatuses=[{"name": "trainer", "state": state}], spec=spec)


def ended(
    code: int,
    number: int = 0,
    *,
    reason: str = "Error",
    message: str = "",
    at: str = "2026-12-01T10:00:00Z",
    **more: Any,
) -> dict[str, Any]:
    end = {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}
    state = {"terminated": end}
    return pod(
        number, phase="Failed", containerStatuses=[{"name": "trainer", "state": state}], **more
    )


def event(reason: str, message: str) -> dict[str, Any]:
    about = {"kind": "Pod", "name": "t-7f3a-0-abcde"}
    return {"reason": reason, "message": message, "type": "Warning", "involvedObject": about}


def disrupted(reason: str) -> dict[str, Any]:
    return ended(137, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": reason}])


KUEUE = {**JOB, "metadata": {"name": "t", "labels": {"kueue.x-k8s.io/queue-name": "team"}},
         "spec": {"suspend": True}}  # fmt: skip

CASES: dict[str, tuple[Evidence, str]] = {
    "no GPU": (
        Evidence(JOB, [unscheduled("0/5 nodes are available: 5 Insufficient nvidia.com/gpu.")]),
        "No node has nvidia.com/gpu free",
    ),
    "no memory": (
        Evidence(JOB, [unscheduled("0/5 nodes are available: 5 Insufficient memory, 1 node(s) x.")]),
        "No node has enough memory free",
    ),
    "taint": (
        Evidence(JOB, [unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint {spot: true}.")]),
        "The nodes have a taint that the job does not tolerate: spot: true",
    ),
    "affinity": (
        Evidence(JOB, [unscheduled("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.")]),
        "No node has the labels that the job asks for",
    ),
    "quota": (
        Evidence(JOB, events=[event("FailedCreate", "Error creating: pods is forbidden: exceeded quota: gpus, requested: x")]),
        "The namespace's quota is used up: gpus",
    ),
    "bad image": (
        Evidence(JOB, [waiting("ErrImagePull", "example/train:1: not found")]),
        "There is no image example/train:1",
    ),
    "image name": (
        Evidence(JOB, [waiting("InvalidImageName", "invalid reference format")]),
        "The image's name example/train:1 is not one",
    ),
    "no pull secret": (
        Evidence(JOB, [waiting("ImagePullBackOff", "Back-off")], [event("Failed", "pull access denied: unauthorized")]),
        "The registry of example/train:1 wants a login",
    ),
    "wrong pull secret": (
        Evidence(JOB, [waiting("ErrImagePull", "401 Unauthorized", {"imagePullSecrets": [{"name": "reg"}]})]),
        "Check the Secret reg",
    ),
    "missing claim": (
        Evidence(JOB, [unscheduled('persistentvolumeclaim "data" not found')], claims={"data": None}),
        "The volume claim data does not exist",
    ),
    "unbound claim": (
        Evidence(JOB, [unscheduled("pod has unbound immediate PersistentVolumeClaims")]),
        "A volume claim is not bound",
    ),
    "missing Secret": (
        Evidence(JOB, [waiting("CreateContainerConfigError", 'secret "keys" not found')]),
        "The Secret keys does not exist",
    ),
    "missing key": (
        Evidence(JOB, [waiting("CreateContainerConfigError", "couldn't find key token in Secret team/hub")]),
        "The Secret team/hub has no key token",
    ),
    "no mount": (
        Evidence(JOB, [pod(phase="Pending")], [event("FailedMount", "MountVolume.SetUp failed for volume x: timed out")]),
        "A volume cannot be mounted: MountVolume.SetUp failed for volume x: timed out",
    ),
    "no sandbox": (
        Evidence(JOB, [pod(phase="Pending")], [event("FailedCreatePodSandBox",
            'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to start sandbox "db9b": failed to '
            "create containerd task: OCI runtime create failed: can't get final child's PID from pipe: EOF")]),
        "The node cannot start any container of the pod: failed to create containerd task: OCI runtime create failed",
    ),
    "out of memory": (
        Evidence(JOB, [ended(137, reason="OOMKilled"), ended(75, 1)]),
        "A pod used more than its memory of 8Gi",
    ),
    "shared memory full": (
        Evidence(JOB, [pod(phase="Failed", reason="Evicted", message='Usage of EmptyDir volume "shm" exceeds the limit "1Gi".')]),
        "/dev/shm was full",
    ),
    "shared memory full for a data loader": (
        Evidence(JOB, [ended(1)], logs={"t-7f3a-0-abcde": "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2>\n"
            "farandole: rank 0 ended with exit code 1"}),
        "/dev/shm was full",
    ),
    "shared memory full for NCCL": (
        Evidence(JOB, [ended(1)], logs={"t-7f3a-0-abcde": "NCCL WARN Error while creating shared memory segment "
            "/dev/shm/nccl-x (size 9637888), error: No space left on device (28)\nfarandole: rank 0 ended with exit code 1"}),
        "/dev/shm was full",
    ),
    "shared memory of a GPU": (
        Evidence(JOB, [ended(1)], logs={"t-7f3a-0-abcde": "OutOfResources: out of resource: shared memory, Required: 147456"}),
        "A pod ended with exit code 1: OutOfResources",
    ),
    "shared memory full for a mapping": (Evidence(JOB, [ended(135)]), "/dev/shm was full"),
    "no space": (
        Evidence(JOB, [ended(1)], logs={"t-7f3a-0-abcde": "OSError: [Errno 28] No space left on device"}),
        "/dev/shm or a disk was full: OSError: [Errno 28] No space left on device",
    ),
    "no Python": (
        Evidence(JOB, [ended(128, reason="StartError", message="failed to create containerd task: OCI runtime create "
            'failed: unable to start container process: exec: "python3": executable file not found in $PATH')]),
        "The image has no python3 on its PATH",
    ),
    "preempted": (Evidence(JOB, [disrupted("PreemptionByScheduler")]), "Pods of higher priority took the node"),
    "drained": (Evidence(JOB, [disrupted("EvictionByEvictionAPI")]), "The node was drained"),
    "node gone": (Evidence(JOB, [disrupted("DeletionByPodGC")]), "The node has vanished"),
    "admission": (
        Evidence(JOB, events=[event("FailedCreate", 'admission webhook "x" denied the request: no owner label')]),
        "The pods were refused by the cluster",
    ),
    "pod security": (
        Evidence(JOB, events=[event("FailedCreate", 'pods "t" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot')]),
        "The namespace allows no such pods (PodSecurity restricted:latest: runAsNonRoot)",
    ),
    "kueue waits": (
        Evidence(KUEUE, workloads=[{"status": {"conditions": [
            {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for nvidia.com/gpu"}]}}]),
        "The job waits in the queue team: insufficient unused quota",
    ),
    "kueue has no such queue": (Evidence(KUEUE), "Kueue has not taken notice of the job"),
    "import error": (
        Evidence(JOB, [ended(75, 1, at="2026-12-01T09:59:58Z"), ended(64)],
                 logs={"t-7f3a-0-abcde": "Traceback\nModuleNotFoundError: No module named 'timm'\n"}),
        "The program cannot run: ModuleNotFoundError: No module named 'timm'",
    ),
    "one rank's exception": (
        Evidence(JOB, [ended(75, 0, at="2026-12-01T10:00:09Z"), ended(1, 1, at="2026-12-01T10:00:01Z")],
                 logs={"t-7f3a-1-abcde": "ValueError: bad batch"}),
        "A pod ended with exit code 1: ValueError: bad batch (t-7f3a-1-abcde)",
    ),
    "rendezvous": (
        Evidence(JOB, [ended(1)], logs={"t-7f3a-0-abcde": "farandole: nodes 2, 3 did not come within 1800 s"}),
        "The pods did not find each other",
    ),
    "deadline": (
        Evidence({**JOB, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}}),
        "The job's time was up",
    ),
    "device plugin": (
        Evidence(JOB, [pod(phase="Failed", reason="UnexpectedAdmissionError", message="maximum request size for shared resources is 1")]),
        "The node could not give the pod its devices",
    ),
    "stopped": (Evidence({**JOB, "spec": {"suspend": True}}), "The job is stopped"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_line_names_the_cause(case: str) -> None:
    evidence, words = CASES[case]
    found = causes(evidence)
    assert found, "nothing was found"
    assert words in str(found[0])


def test_a_job_that_runs_has_nothing_to_explain() -> None:
    running = pod(
        phase="Running", containerStatuses=[{"name": "trainer", "state": {"running": {}}}]
    )
    assert causes(Evidence(JOB, [running], [event("Pulled", "Successfully pulled image")])) == []


@pytest.mark.parametrize("reason", ["FailedMount", "FailedCreatePodSandBox"])
def test_what_went_wrong_before_a_pod_started_is_over(reason: str) -> None:
    running = pod(phase="Running")
    assert causes(Evidence(JOB, [running], [event(reason, "timed out")])) == []


def test_alike_pods_are_told_once() -> None:
    pods = [unscheduled("5 Insufficient nvidia.com/gpu.") for _ in range(8)]
    assert len(causes(Evidence(JOB, pods))) == 1


def test_every_cause_that_holds_a_job_up_has_a_remedy() -> None:
    for name, (evidence, _) in CASES.items():
        first = causes(evidence)[0]
        assert first.remedy, name
