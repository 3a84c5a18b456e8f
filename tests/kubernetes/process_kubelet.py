"""A Job controller and a kubelet whose containers are processes of this machine.

What the controller does is what Kubernetes documents of Indexed Jobs, as far as our renderer uses
it: one pod an index, its own limit of retries, rules for failures and success, suspension, scaling.
The kubelet runs a rendered container's own command, with these changes and no others: ``python3``
is this Python, the folders of volumes are folders of this machine, and names of pods are known from
a map instead of a name service. Every node has a loopback address of its own.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import os
import queue
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_server import NAMESPACE, ApiServer

from farandole.launch import kernel
from farandole.launch.kubernetes import kinds, standing

Thing = dict[str, Any]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class JobController:
    """Turns Jobs into pods. One thread, woken by every change of a Job or a pod."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failures: dict[tuple[str, int], int] = {}
        self._ignored: collections.Counter[tuple[str, int]] = collections.Counter()
        self._seen: set[str] = set()
        """Pods whose end was taken into account."""
        self._thread = threading.Thread(target=self._run)
        server.on_change.append(self._on_change)
        self._thread.start()

    def close(self) -> None:
        self._changes.put(False)
        self._thread.join()

    def _on_change(self, _event: str, plural: str, _thing: Thing) -> None:
        if plural in (kinds.JOB.plural, kinds.POD.plural):
            self._changes.put(True)

    def _run(self) -> None:
        while self._changes.get():
            for job in self._server.all(kinds.JOB):
                self._reconcile(job)

    def _reconcile(self, job: Thing) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        conditions = {each["type"] for each in job.get("status", {}).get("conditions", [])}
        pods = [p for p in self._server.all(kinds.POD) if owned_by(p, job)]
        active = [pod for pod in pods if not over(pod)]
        if conditions & {"Complete", "Failed"}:
            return self._end(active)
        for pod in pods:
            if pod["status"].get("phase") == "Failed" and pod["metadata"]["name"] not in self._seen:
                self._seen.add(pod["metadata"]["name"])
                self._judge(job, pod)
        if "Failed" in {
            each["type"] for each in self._current(name).get("status", {}).get("conditions", [])
        }:
            return self._end(active)
        if spec.get("suspend"):
            for pod in pods:
                if over(pod) and pod["status"]["phase"] == "Failed":
                    self._server.remove(kinds.POD, pod["metadata"]["name"])
            return self._end(active)
        done = {standing.index_of(p) for p in pods if p["status"].get("phase") == "Succeeded"}
        if self._succeeded(spec, done):
            return self._conclude(name, "Complete", "CompletionsReached", "")
        self._end([pod for pod in active if standing.index_of(pod) >= spec["completions"]])
        there = {standing.index_of(pod) for pod in active}
        for index in sorted(set(range(spec["completions"])) - there - done):
            self._create(job, index)
        return None

    def _current(self, name: str) -> Thing:
        return self._server.get(kinds.JOB, name) or {}

    @staticmethod
    def _succeeded(spec: Thing, done: set[int]) -> bool:
        if "successPolicy" in spec:
            return 0 in done
        return done == set(range(spec["completions"]))

    def _judge(self, job: Thing, pod: Thing) -> None:
        """What the end of a failed pod means."""
        name, index = job["metadata"]["name"], standing.index_of(pod)
        which = job["metadata"]["uid"], index
        if job["spec"].get("suspend"):
            return
        code = exit_code(pod)
        disrupted = any(
            c["type"] == "DisruptionTarget" for c in pod["status"].get("conditions", [])
        )
        rules = job["spec"].get("podFailurePolicy", {}).get("rules", [])
        for rule in rules:
            fits = disrupted if "onPodConditions" in rule else code in rule["onExitCodes"]["values"]
            if fits and rule["action"] == "Ignore":
                self._ignored[which] += 1
                return
            if fits and rule["action"] == "FailJob":
                self._conclude(
                    name, "Failed", "PodFailurePolicy",
                    f"Container {pod['spec']['containers'][0]['name']} for pod "
                    f"{pod['metadata']['name']} failed with exit code {code} matching FailJob rule "
                    f"at index {rules.index(rule)}",
                )  # fmt: skip
                return
        count = self._failures[which] = self._failures.get(which, 0) + 1
        if "backoffLimitPerIndex" in job["spec"]:
            if count > job["spec"]["backoffLimitPerIndex"]:
                why = "Job has exceeded the specified maximal number of failed indexes"
                self._conclude(name, "Failed", "MaxFailedIndexesExceeded", why)
            return
        failures = sum(n for (uid, _), n in self._failures.items() if uid == which[0])
        if failures > job["spec"].get("backoffLimit", 6):
            why = "Job has reached the specified backoff limit"
            self._conclude(name, "Failed", "BackoffLimitExceeded", why)

    def _conclude(self, name: str, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self._server.change(kinds.JOB, name, {"status": {"conditions": [condition]}})

    def _end(self, pods: list[Thing]) -> None:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                name = pod["metadata"]["name"]
                self._server.change(kinds.POD, name, {"metadata": {"deletionTimestamp": now()}})

    def _create(self, job: Thing, index: int) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        which = job["metadata"]["uid"], index
        notes = {**template["metadata"]["annotations"], standing.INDEX: str(index)}
        if "backoffLimitPerIndex" in job["spec"]:
            notes["batch.kubernetes.io/job-index-failure-count"] = str(self._failures.get(which, 0))
            if which in self._ignored:
                counted = str(self._ignored[which])
                notes["batch.kubernetes.io/job-index-ignored-failure-count"] = counted
        self._server.put(kinds.POD, {
            "metadata": {
                "name": f"{name}-{index}-{secrets.token_hex(3)[:5]}",
                "labels": {**template["metadata"]["labels"], standing.INDEX: str(index)},
                "annotations": notes,
                "ownerReferences": [{
                    "apiVersion": "batch/v1", "kind": "Job", "name": name,
                    "uid": job["metadata"]["uid"], "controller": True,
                }],
            },
            "spec": {**template["spec"], "hostname": f"{name}-{index}"},
            "status": {"phase": "Pending"},
        })  # fmt: skip


def owned_by(pod: Thing, job: Thing) -> bool:
    return any(each["uid"] == job["metadata"]["uid"] for each in pod["metadata"]["ownerReferences"])


def over(pod: Thing) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def exit_code(pod: Thing) -> int:
    code: int = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    return code


@dataclass(eq=False)
class Container:
    """A running one."""

    process: subprocess.Popen[bytes]
    grace: float
    timers: list[threading.Timer] = field(default_factory=list)


class ProcessKubelet:
    """Runs pods as processes; everything that it needs on disk is in ``folder``."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._network = f"127.{random.randrange(2, 250)}.{random.randrange(1, 250)}"
        """Of its own, so that nothing else listens there at the ports of a job."""
        self._tools = self._make_ssh()
        """Where pods find an ssh that knows their names."""
        self._lock = threading.Lock()
        self._running: dict[str, Container] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False
        server.on_change.append(self._on_change)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            running = list(self._running.values())
        for container in running:
            _signal(container, signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _make_ssh(self) -> Path:
        """Names of pods are known by no name service, so ssh is told of them."""
        tools = self._folder / "tools"
        tools.mkdir()
        hosts = (f"Host *-worker-{n}.*\n  HostName {self._network}.{n + 1}\n" for n in range(8))
        (tools / "ssh_config").write_text("".join(hosts))
        ssh = tools / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{tools}/ssh_config" "$@"\n')
        ssh.chmod(0o755)
        return tools

    # ---- what happens to nodes and pods

    def pod_of(self, index: int) -> str:
        """The name of the running pod of an index."""
        for pod in self._server.all(kinds.POD):
            if standing.index_of(pod) == index and pod["metadata"]["name"] in self._running:
                return str(pod["metadata"]["name"])
        raise AssertionError(f"no pod of index {index} runs")

    def kill(self, index: int) -> str:
        """SIGKILL to a pod's container, as when it has used too much memory."""
        name = self.pod_of(index)
        _signal(self._running[name], signal.SIGKILL)
        return name

    def evict(self, index: int) -> str:
        """The node is drained: SIGTERM, and the pod is marked as disrupted."""
        name = self.pod_of(index)
        condition = {
            "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        }  # fmt: skip
        self._server.change(kinds.POD, name, {"status": {"conditions": [condition]}})
        self._terminate(name)
        return name

    @property
    def running(self) -> list[str]:
        """The pods whose processes run."""
        return list(self._running)

    def claim(self, name: str) -> Path:
        """The folder of a volume claim."""
        return self._folder / "claims" / name

    # ---- the kubelet's work

    def _on_change(self, event: str, plural: str, pod: Thing) -> None:
        if plural != kinds.POD.plural:
            return
        name = pod["metadata"]["name"]
        if event == "ADDED":
            with self._lock:
                if self._closing:
                    return
                thread = threading.Thread(target=self._run, args=(pod,))
                self._threads.append(thread)
            thread.start()
        elif event == "DELETED" or "deletionTimestamp" in pod["metadata"]:
            self._terminate(name)

    def _terminate(self, name: str) -> None:
        container = self._running.get(name)
        if container is None or container.timers:
            return
        _signal(container, signal.SIGTERM)
        timer = threading.Timer(container.grace, _signal, (container, signal.SIGKILL))
        container.timers.append(timer)
        timer.daemon = True
        timer.start()

    def _run(self, pod: Thing) -> None:
        name = pod["metadata"]["name"]
        spec = pod["spec"]["containers"][0]
        try:
            places = self._mount(pod)
            environment = self._environment(pod)
        except KeyError as error:
            waiting = {"reason": "CreateContainerConfigError", "message": f"{error} not found"}
            status = {"containerStatuses": [{"name": spec["name"], "state": {"waiting": waiting}}]}
            self._server.change(kinds.POD, name, {"status": status})
            return
        command = [_substitute(word, places) for word in [*spec["command"], *spec["args"]]]
        command[0] = sys.executable if command[0] == "python3" else command[0]
        began = now()
        code = self._contain(pod, command, environment, began)
        while code and pod["spec"]["restartPolicy"] == "OnFailure" and self._is_wanted(name):
            code = self._contain(pod, command, environment, began)
        if code is None:
            return
        self._server.print(name, "", ended=True)
        state = {"exitCode": code, "reason": "Error" if code else "Completed",
                 "startedAt": began, "finishedAt": now()}  # fmt: skip
        self._tell(pod, "Failed" if code else "Succeeded", {"terminated": state}, began)
        told = self._server.get(kinds.POD, name)
        if told is not None and "deletionTimestamp" in told["metadata"]:
            self._server.remove(kinds.POD, name)

    def _is_wanted(self, name: str) -> bool:
        pod = self._server.get(kinds.POD, name)
        return pod is not None and "deletionTimestamp" not in pod["metadata"]

    def _contain(
        self, pod: Thing, command: list[str], environment: dict[str, str], began: str
    ) -> int | None:
        """Run a container to its end: its exit code; ``None`` when all is being closed."""
        name = pod["metadata"]["name"]
        with self._lock:
            if self._closing:
                return None
            process = subprocess.Popen(
                command, env=environment, cwd=self._folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            self._running[name] = Container(process, grace)
        self._tell(pod, "Running", {"running": {"startedAt": began}}, began)
        assert process.stdout is not None
        for line in process.stdout:
            self._server.print(name, line.decode("utf-8", "replace").rstrip("\n"))
        code = process.wait()
        process.stdout.close()
        for timer in self._running.pop(name).timers:
            timer.cancel()
        return 128 - code if code < 0 else code

    def _tell(self, pod: Thing, phase: str, state: Thing, began: str) -> None:
        container = {"name": pod["spec"]["containers"][0]["name"], "restartCount": 0,
                     "image": "", "state": state}  # fmt: skip
        status = {
            "phase": phase, "startTime": began, "podIP": self._address(pod),
            "containerStatuses": [container],
        }  # fmt: skip
        # A state replaces the one before; nothing else of the status goes.
        self._server.change(
            kinds.POD, pod["metadata"]["name"], {"status": {"containerStatuses": None}}
        )
        self._server.change(kinds.POD, pod["metadata"]["name"], {"status": status})

    def _address(self, pod: Thing) -> str:
        if pod["metadata"]["labels"].get("training.kubeflow.org/job-role") == "launcher":
            return f"{self._network}.200"
        return f"{self._network}.{standing.index_of(pod) + 1}"

    def _mount(self, pod: Thing) -> dict[str, str]:
        """Make the volumes; returns which folder stands for which path."""
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        own = self._folder / pod["metadata"]["name"]
        places = {}
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            if mount["mountPath"] == "/dev/shm":
                continue
            volume = volumes[mount["name"]]
            folder = own / mount["name"]
            if "persistentVolumeClaim" in volume:
                folder = self.claim(volume["persistentVolumeClaim"]["claimName"])
            folder = folder / mount.get("subPath", "")
            folder.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                stored = self._stored(kinds.CONFIG_MAP, volume["configMap"]["name"])
                for name, text in stored.get("binaryData", {}).items():
                    (folder / name).write_bytes(base64.b64decode(text))
                for name, text in stored.get("data", {}).items():
                    (folder / name).write_text(text)
            if "secret" in volume:
                secret = _strings(self._stored(kinds.SECRET, volume["secret"]["secretName"]))
                for item in volume["secret"]["items"]:
                    (folder / item["path"]).write_text(secret[item["key"]])
            places[mount["mountPath"]] = str(folder)
        return places

    def _environment(self, pod: Thing) -> dict[str, str]:
        spec = pod["spec"]["containers"][0]
        found = {"PATH": f"{self._tools}:{os.defpath}", "HOME": str(self._folder)}
        for source in spec.get("envFrom", []):
            found |= _strings(self._stored(kinds.SECRET, source["secretRef"]["name"]))
        for each in spec["env"]:
            found[each["name"]] = self._value(pod, each)
        if pod["spec"].get("dnsPolicy") != "None":
            host, domain = pod["spec"]["hostname"].rpartition("-")[0], pod["spec"]["subdomain"]
            found["FARANDOLE_ADDRESSES"] = ",".join(
                f"{host}-{index}.{domain}={self._network}.{index + 1}" for index in range(8)
            )
        return found

    def _value(self, pod: Thing, variable: Thing) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            stored = self._stored(kinds.SECRET, source["secretKeyRef"]["name"])
            return _strings(stored)[source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        annotation = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
        if annotation:
            return str(pod["metadata"]["annotations"].get(annotation[1], ""))
        return {  # type: ignore[no-any-return]
            "status.podIP": self._address(pod),
            "metadata.name": pod["metadata"]["name"],
            "metadata.namespace": NAMESPACE,
        }[path]

    def _stored(self, kind: kinds.Kind, name: str) -> Thing:
        stored = self._server.get(kind, name)
        if stored is None:
            raise KeyError(f"{kind.name.lower()} {name}")
        return stored


def _strings(secret: Thing) -> dict[str, str]:
    plain: dict[str, str] = secret.get("stringData", {})
    coded = {name: base64.b64decode(text).decode() for name, text in secret.get("data", {}).items()}
    return {**coded, **plain}


def _substitute(word: str, places: dict[str, str]) -> str:
    for path in sorted(places, key=len, reverse=True):
        word = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", places[path], word)
    return word


def _signal(container: Container, number: int) -> None:
    first = container.process.pid
    # SIGKILL is the end of all that a container runs.
    others = kernel.descendants(first) if number == signal.SIGKILL else ()
    for pid in (first, *others):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
