"""The operators of the other backends, as far as our manifests make use of them.

JobSet and Trainer do here what their documentation and their sources say: a set's Jobs are made
from its replicated jobs, one that fails restarts all of them or ends the set, by the failure
policy's rules; a TrainJob becomes a set from its runtime. Old pods are gone before new ones are
made, as with foreground deletion.
"""

from __future__ import annotations

import base64
import copy
import queue
import re
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from api_server import ApiServer
from process_kubelet import now, over, owned_by

from farandole.launch.kubernetes import kinds
from farandole.launch.kubernetes.kinds import Kind

Thing = dict[str, Any]

_JOBSET = "jobset.sigs.k8s.io"


class Operator:
    """One thread, woken by every change, that looks at all objects of a kind."""

    kind: Kind

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        server.on_change.append(lambda *_: self._changes.put(True))
        self._thread.start()

    def close(self) -> None:
        self._changes.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._changes.get():
            for thing in self.server.all(self.kind):
                self.reconcile(thing)

    def reconcile(self, thing: Thing) -> None:
        raise NotImplementedError

    def conclude(self, thing: Thing, kind: str, reason: str, message: str = "") -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        name = thing["metadata"]["name"]
        self.server.change(self.kind, name, {"status": {"conditions": [condition]}})


def conditions(thing: Thing) -> dict[str, Thing]:
    """Those that hold, by their type."""
    return {
        each["type"]: each
        for each in thing.get("status", {}).get("conditions", [])
        if each["status"] == "True"
    }


def owner_reference(thing: Thing) -> Thing:
    return {
        "apiVersion": thing["apiVersion"], "kind": thing["kind"],
        "name": thing["metadata"]["name"], "uid": thing["metadata"]["uid"], "controller": True,
    }  # fmt: skip


class JobSetOperator(Operator):
    """JobSet's controller, and what its webhook adds."""

    kind = kinds.JOBSET

    def reconcile(self, thing: Thing) -> None:
        if conditions(thing).keys() & {"Completed", "Failed"}:
            return
        name = thing["metadata"]["name"]
        attempt = str(thing.get("status", {}).get("restarts", 0))
        jobs = [each for each in self.server.all(kinds.JOB) if owned_by(each, thing)]
        old = [each for each in jobs if each["metadata"]["labels"][_ATTEMPT] != attempt]
        if old:
            self._remove(old)
            return
        if not jobs:
            for each in thing["spec"]["replicatedJobs"]:
                for index in range(each["replicas"]):
                    self.server.put(kinds.JOB, _child(thing, each, index, attempt))
            return
        for job in jobs:
            if job["spec"]["suspend"] != thing["spec"]["suspend"]:
                change = {"spec": {"suspend": thing["spec"]["suspend"]}}
                self.server.change(kinds.JOB, job["metadata"]["name"], change)
        ended = [conditions(job) for job in jobs]
        failed = next((each["Failed"] for each in ended if "Failed" in each), None)
        if failed is not None:
            self._on_failure(thing, failed)
        elif all("Complete" in each for each in ended):
            self.conclude(thing, "Completed", "AllJobsCompleted", f"jobset {name} completed")

    def _remove(self, jobs: list[Thing]) -> None:
        pods = [p for p in self.server.all(kinds.POD) if any(owned_by(p, job) for job in jobs)]
        living = [pod for pod in pods if not over(pod)]
        for pod in living:
            if "deletionTimestamp" not in pod["metadata"]:
                change = {"metadata": {"deletionTimestamp": now()}}
                self.server.change(kinds.POD, pod["metadata"]["name"], change)
        if not living:
            for job in jobs:
                self.server.remove(kinds.JOB, job["metadata"]["name"])

    def _on_failure(self, thing: Thing, failed: Thing) -> None:
        policy = thing["spec"].get("failurePolicy")
        if policy is None:
            self.conclude(
                thing, "Failed", "FailedJobs", "jobset failed due to one or more failures"
            )
            return
        action = next(
            (rule["action"] for rule in policy.get("rules", []) if _fits(rule, failed)),
            "RestartJobSet",
        )
        status = {"restarts": 0, "restartsCountTowardsMax": 0, **thing.get("status", {})}
        if action == "FailJobSet":
            self.conclude(thing, "Failed", "FailJobSetFailurePolicyAction", failed["message"])
            return
        if action == "RestartJobSet":
            if status["restartsCountTowardsMax"] >= policy["maxRestarts"]:
                self.conclude(thing, "Failed", "ReachedMaxRestarts", failed["message"])
                return
            status["restartsCountTowardsMax"] += 1
        status["restarts"] += 1
        self.server.change(self.kind, thing["metadata"]["name"], {"status": status})


_ATTEMPT = f"{_JOBSET}/restart-attempt"


def _fits(rule: Thing, failed: Thing) -> bool:
    reasons = rule.get("onJobFailureReasons", [])
    patterns = rule.get("onJobFailureMessagePatterns", [])
    return (not reasons or failed["reason"] in reasons) and (
        not patterns or any(re.fullmatch(each, failed["message"]) for each in patterns)
    )


def _child(thing: Thing, replicated: Thing, index: int, attempt: str) -> Thing:
    """A Job of the set."""
    name = thing["metadata"]["name"]
    marks = {
        f"{_JOBSET}/jobset-name": name,
        f"{_JOBSET}/replicatedjob-name": replicated["name"],
        f"{_JOBSET}/job-index": str(index),
        _ATTEMPT: attempt,
    }
    spec = copy.deepcopy(replicated["template"]["spec"])
    template = spec["template"]
    template["spec"].setdefault("subdomain", name)
    for place in ("labels", "annotations"):
        template["metadata"][place] = {**template["metadata"].get(place, {}), **marks}
    return {
        "metadata": {
            "name": f"{name}-{replicated['name']}-{index}",
            "labels": marks,
            "annotations": marks,
            "ownerReferences": [owner_reference(thing)],
        },
        "spec": {**spec, "suspend": thing["spec"]["suspend"]},
    }


class TrainJobOperator(Operator):
    """Trainer's controller, for namespaced runtimes without a policy of torch's or MPI's."""

    kind = kinds.TRAINJOB

    def reconcile(self, thing: Thing) -> None:
        name, spec = thing["metadata"]["name"], thing["spec"]
        if conditions(thing).keys() & {"Complete", "Failed"}:
            return
        made = self.server.get(kinds.JOBSET, name)
        if made is None:
            runtime = self.server.get(kinds.RUNTIME, spec["runtimeRef"]["name"])
            if runtime is not None:
                self.server.put(kinds.JOBSET, _jobset(thing, runtime))
            return
        if made["spec"]["suspend"] != spec["suspend"]:
            self.server.change(kinds.JOBSET, name, {"spec": {"suspend": spec["suspend"]}})
        ended = conditions(made)
        for of_set, own in (("Completed", "Complete"), ("Failed", "Failed")):
            if of_set in ended:
                self.conclude(thing, own, ended[of_set]["reason"], ended[of_set]["message"])


def _jobset(thing: Thing, runtime: Thing) -> Thing:
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    nodes = thing["spec"]["trainer"].get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    for each in spec["replicatedJobs"]:
        each.setdefault("replicas", 1)
        labels = each["template"].get("metadata", {}).get("labels", {})
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
            each["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
    return {
        "metadata": {
            "name": thing["metadata"]["name"],
            "ownerReferences": [owner_reference(thing)],
        },
        "spec": {**spec, "suspend": thing["spec"]["suspend"]},
    }


class MpiJobOperator(Operator):
    """The MPI Operator, for Open MPI."""

    kind = kinds.MPIJOB

    def reconcile(self, thing: Thing) -> None:
        name, suspended = thing["metadata"]["name"], thing["spec"]["runPolicy"]["suspend"]
        workers = [p for p in self.server.all(kinds.POD) if owned_by(p, thing)]
        if conditions(thing).keys() & {"Succeeded", "Failed"} or suspended:
            self._end(workers)
        replicas = thing["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
        launcher = self.server.get(kinds.JOB, f"{name}-launcher")
        if launcher is None:
            self.server.put(kinds.CONFIG_MAP, _hosts(thing, replicas))
            self.server.put(kinds.SECRET, _key(thing))
            self.server.put(kinds.JOB, _launcher(thing))
            return
        if launcher["spec"]["suspend"] != suspended:
            change = {"spec": {"suspend": suspended}}
            self.server.change(kinds.JOB, f"{name}-launcher", change)
        ended = conditions(launcher)
        for of_job, own in (("Complete", "Succeeded"), ("Failed", "Failed")):
            if of_job in ended and own not in conditions(thing):
                self.conclude(thing, own, f"MPIJob{own}", ended[of_job]["message"])
        if not ended and not suspended:
            there = {pod["metadata"]["name"] for pod in workers}
            for index in range(replicas):
                if f"{name}-worker-{index}" not in there:
                    self.server.put(kinds.POD, _worker(thing, index))

    def _end(self, pods: list[Thing]) -> None:
        for pod in pods:
            if not over(pod) and "deletionTimestamp" not in pod["metadata"]:
                change = {"metadata": {"deletionTimestamp": now()}}
                self.server.change(kinds.POD, pod["metadata"]["name"], change)


def _owned(thing: Thing, suffix: str) -> Thing:
    name = f"{thing['metadata']['name']}-{suffix}"
    return {"name": name, "ownerReferences": [owner_reference(thing)]}


def _hosts(thing: Thing, replicas: int) -> Thing:
    name, namespace = thing["metadata"]["name"], thing["metadata"]["namespace"]
    slots = thing["spec"]["slotsPerWorker"]
    lines = (
        f"{name}-worker-{index}.{name}-worker.{namespace}.svc slots={slots}\n"
        for index in range(replicas)
    )
    return {"metadata": _owned(thing, "config"), "data": {"hostfile": "".join(lines)}}


def _key(thing: Thing) -> Thing:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key"
        make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(file)]
        subprocess.run(make, check=True)
        parts = {"ssh-privatekey": file, "ssh-publickey": file.with_suffix(".pub")}
        coded = {key: base64.b64encode(path.read_bytes()).decode() for key, path in parts.items()}
    return {"metadata": _owned(thing, "ssh"), "type": "kubernetes.io/ssh-auth", "data": coded}


def _pod(thing: Thing, role: str, labels: Thing) -> Thing:
    """What launcher and workers have in common: metadata and spec."""
    name = thing["metadata"]["name"]
    template: Thing = copy.deepcopy(thing["spec"]["mpiReplicaSpecs"][role]["template"])
    template["metadata"]["labels"] |= {"training.kubeflow.org/job-role": role.lower(), **labels}
    spec = template["spec"]
    spec["restartPolicy"] = thing["spec"]["mpiReplicaSpecs"][role]["restartPolicy"]
    spec["subdomain"] = f"{name}-worker"
    items = [
        {"key": "ssh-privatekey", "path": "id_rsa"},
        {"key": "ssh-publickey", "path": "id_rsa.pub"},
        {"key": "ssh-publickey", "path": "authorized_keys"},
    ]
    secret = {"secretName": f"{name}-ssh", "items": items}
    _mount(spec, "ssh-auth", {"secret": secret}, thing["spec"]["sshAuthMountPath"])
    return template


def _mount(spec: Thing, name: str, source: Thing, path: str) -> None:
    spec["volumes"].append({"name": name, **source})
    spec["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path})


def _launcher(thing: Thing) -> Thing:
    template = _pod(thing, "Launcher", {})
    source = {"configMap": {"name": f"{thing['metadata']['name']}-config"}}
    _mount(template["spec"], "mpi-job-config", source, "/etc/mpi")
    policy = thing["spec"]["runPolicy"]
    return {
        "metadata": _owned(thing, "launcher"),
        "spec": {
            "suspend": policy["suspend"], "backoffLimit": policy["backoffLimit"],
            "completions": 1, "parallelism": 1, "template": template,
        },
    }  # fmt: skip


def _worker(thing: Thing, index: int) -> Thing:
    labels = {"training.kubeflow.org/replica-index": str(index)}
    template = _pod(thing, "Worker", labels)
    owned = _owned(thing, f"worker-{index}")
    return {
        "metadata": {**template["metadata"], **owned},
        "spec": {**template["spec"], "hostname": owned["name"]},
        "status": {"phase": "Pending"},
    }
