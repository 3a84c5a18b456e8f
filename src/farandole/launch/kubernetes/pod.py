"""The template of a job's pods: one pod a node, one container in it, alike for every backend.

The defaults answer to what goes wrong on real clusters:

* ``/dev/shm`` of a container holds 64 MB; a volume of memory takes its place.
* A pod that restarts in place keeps nobody informed and is deleted with its logs at the limit, so
  ``restartPolicy`` is ``Never`` and the owner replaces pods.
* A pod needs no rights in the cluster, so no token is mounted.
* The memory limit equals the request: what is more than asked for can be taken away.
* Sidecar meshes and node consolidation break rings, so both are told to leave the pods alone.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any

from farandole.launch.cluster import claim_of, mounted_at
from farandole.launch.kubernetes import boot, naming
from farandole.launch.kubernetes.submission import STORE_PORT, Manifest, Submission

_ANNOTATIONS = {
    "sidecar.istio.io/inject": "false",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
_GPU = "nvidia.com/gpu"
_SHM_LIMIT = 64 * 2**30
USER = 1000
"""Whom `restricted` pods run as, and images that we build."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
          "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}  # fmt: skip


def template(submission: Submission, *, container: str, peers: str) -> Manifest:
    """The pod template.

    ``container`` names the container. ``peers`` is the address of a pod with ``{}`` for its index:
    each pod finds index 0 by it.
    """
    spec = submission.spec
    pod: Manifest = {
        "metadata": {
            "labels": naming.labels(submission.name, spec.backend),
            "annotations": dict(_ANNOTATIONS),
        },
        "spec": {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": math.ceil(submission.grace),
            "containers": [_container(submission, container, peers)],
            "volumes": _volumes(submission),
            **_security_of_pod(submission),
            **_where(submission),
        },
    }
    if spec.image_pull_secrets:
        pod["spec"]["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    if spec.priority and spec.gang != "kueue":
        pod["spec"]["priorityClassName"] = spec.priority
    patched: Manifest = merge(pod, spec.pod_patch)
    return patched


def merge(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396); but lists of things with names are merged by name.

    So a patch may add to the container that is there, which it names, without repeating it.
    """
    if isinstance(patch, dict):
        merged = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(merged.get(key), value)
        return merged
    if _named(target) and _named(patch):
        by_name = {each["name"]: each for each in target}
        for each in patch:
            by_name[each["name"]] = merge(by_name.get(each["name"]), each)
        return list(by_name.values())
    return copy.deepcopy(patch)


def _named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "name" in e for e in value)


def shm_bytes(submission: Submission) -> int | None:
    """The size of ``/dev/shm``; ``None``: half of the node's memory, Kubernetes' own default."""
    spec = submission.spec
    if spec.shm:
        return int(read_quantity(spec.shm))
    if spec.memory:
        return min(int(read_quantity(spec.memory)) // 4, _SHM_LIMIT)
    return None


def read_quantity(text: str) -> float:
    """The number that an amount of Kubernetes' stands for: ``"2Ki"`` is 2048, ``"500m"`` 0.5."""
    found = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", text)
    assert found is not None
    if found[2] == "m":
        return float(found[1]) / 1000
    return float(found[1]) * _UNITS[found[2]]


def _container(submission: Submission, name: str, peers: str) -> Manifest:
    spec = submission.spec
    return {
        "name": name,
        "image": spec.image,
        "command": boot.command(),
        "args": boot.arguments(submission, peers),
        "env": _env(submission),
        "envFrom": [{"secretRef": {"name": secret}} for secret in spec.secrets],
        "resources": _resources(submission),
        "volumeMounts": _mounts(submission),
        "securityContext": _security_of_container(submission),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "ports": [{"name": "store", "containerPort": STORE_PORT}],
    }


def _env(submission: Submission) -> list[Manifest]:
    plain: Mapping[str, str] = {"PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN", **submission.env}
    fields = {"FARANDOLE_POD_IP": "status.podIP", "FARANDOLE_POD": "metadata.name"}
    if submission.spec.backend != "mpijob":
        fields["FARANDOLE_NODE"] = _noted("job-completion-index")
    if submission.spec.elastic:
        fields["FARANDOLE_FAILURES"] = _noted("job-index-failure-count")
        fields["FARANDOLE_DISRUPTIONS"] = _noted("job-index-ignored-failure-count")
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ),
        {
            "name": "FARANDOLE_SECRET",
            "valueFrom": {"secretKeyRef": {"name": submission.name, "key": "key"}},
        },
        *(
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}},
            }
            for name, each in submission.spec.secret_env.items()
        ),
    ]


def _noted(name: str) -> str:
    """Where a pod finds what the Job controller notes on it; it is empty when there is nothing."""
    return f"metadata.annotations['batch.kubernetes.io/{name}']"


def gpu_resource(submission: Submission) -> str:
    """The name of the resource by which GPUs are asked for."""
    spec = submission.spec
    return spec.gpu_resource or (f"nvidia.com/mig-{spec.mig}" if spec.mig else _GPU)


def _resources(submission: Submission) -> Manifest:
    spec = submission.spec
    extended = dict(spec.resources)
    if spec.gpus:
        extended[gpu_resource(submission)] = str(spec.gpus)
    if spec.rdma:
        extended[spec.rdma] = "1"
    requests = {"cpu": spec.cpu, "memory": spec.memory}
    return {
        "requests": {**{k: v for k, v in requests.items() if v}, **extended},
        "limits": {**({"memory": spec.memory} if spec.memory else {}), **extended},
    }


def _volumes(submission: Submission) -> list[Manifest]:
    size = shm_bytes(submission)
    memory = {"medium": "Memory", **({"sizeLimit": str(size)} if size else {})}
    claims = {name: claim for name, claim, _, _, _ in _claims(submission)}
    return [
        {"name": "shm", "emptyDir": memory},
        {"name": "job", "configMap": {"name": submission.name}},
        {"name": "work", "emptyDir": {}},
        *(
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for name, claim in claims.items()
        ),
    ]


def _mounts(submission: Submission) -> list[Manifest]:
    return [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "job", "mountPath": boot.JOB_FOLDER, "readOnly": True},
        {"name": "work", "mountPath": boot.WORK_FOLDER},
        *(
            {
                "name": name,
                "mountPath": path,
                **({"subPath": folder} if folder else {}),
                **({"readOnly": True} if read_only else {}),
            }
            for name, _, path, folder, read_only in _claims(submission)
        ),
    ]


def _claims(submission: Submission) -> list[tuple[str, str, str, str, bool]]:
    """Volume name, claim, where it is mounted, folder in it, whether only to be read."""
    spec = submission.spec
    found = []
    for field in ("datasets", "checkpoints", "logs"):
        place = getattr(spec, field)
        claimed = claim_of(place) if place else None
        if claimed:
            found.append((claimed[0], f"/{mounted_at(field)}", claimed[1], False))
    code = claim_of(spec.code)
    if code:
        found.append((code[0], boot.CODE_FOLDER, code[1], True))
    found += [(e.claim, e.path, (e.folder or "").strip("/"), e.read_only) for e in spec.mounts]
    volumes: dict[str, str] = {}
    for claim, *_ in found:
        volumes.setdefault(claim, f"claim-{len(volumes)}")
    return [(volumes[claim], claim, path, folder, only) for claim, path, folder, only in found]


def _security_of_pod(submission: Submission) -> Manifest:
    context: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    if submission.spec.restricted:
        context |= {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER,
                    "fsGroup": USER}  # fmt: skip
    return {"securityContext": context}


def _security_of_container(submission: Submission) -> Manifest:
    context: Manifest = {"allowPrivilegeEscalation": False}
    capabilities: Manifest = {}
    if submission.spec.restricted:
        capabilities["drop"] = ["ALL"]
    if submission.spec.rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {**context, **({"capabilities": capabilities} if capabilities else {})}


def _where(submission: Submission) -> Manifest:
    spec = submission.spec
    chosen: Manifest = {}
    if spec.node_selector:
        chosen["nodeSelector"] = dict(spec.node_selector)
    tolerations = list(spec.tolerations)
    if spec.gpus:
        tolerations.insert(0, {"key": _GPU, "operator": "Exists", "effect": "NoSchedule"})
    if tolerations:
        chosen["tolerations"] = tolerations
    affinity: Manifest = {}
    if spec.gpu_product:
        wanted = {"key": "nvidia.com/gpu.product", "operator": "In", "values": [spec.gpu_product]}
        affinity["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [wanted]}]
            }
        }
    if spec.topology and spec.gang != "kueue":
        affinity["podAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "topologyKey": spec.topology,
                        "labelSelector": {"matchLabels": {naming.INSTANCE: submission.name}},
                    },
                }
            ]
        }
    if affinity:
        chosen["affinity"] = affinity
    if spec.gang == "volcano":
        chosen["schedulerName"] = "volcano"
    return chosen
