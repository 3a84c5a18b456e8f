"""The bench of the end-to-end tests on a real cluster, the one of the current kubeconfig.

Who runs the tests must be able to make namespaces, and pods in the host's process namespace: that
is how a container is killed. The commands are run by a service account that has exactly the Role
of ``farandole submit --print-rbac``, in a namespace that is deleted at the end.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import yaml
from benches import Bench, Thing

from farandole.launch.kubernetes import kinds, standing

_USER = "submitter"
_ROLE = kinds.Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
_BINDING = kinds.Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
_ACCOUNT = kinds.Kind("v1", "ServiceAccount", "serviceaccounts")
_KILL = """
import os, pathlib, signal, sys

def is_the_first(process):
    try:
        variables = (process / "environ").read_bytes().split(b"\\0")
        status = (process / "status").read_text().split()
    except OSError:
        return False
    # The number of a process in its innermost namespace stands last.
    place = status.index("NSpid:") + 1
    numbers = []
    while status[place].isdigit():
        numbers.append(status[place])
        place += 1
    return sys.argv[1].encode() in variables and numbers[-1] == "1"

killed = [p for p in pathlib.Path("/proc").glob("[0-9]*") if is_the_first(p)]
for process in killed:
    os.kill(int(process.name), signal.SIGKILL)
sys.exit(len(killed) != 1)
"""


class ClusterBench(Bench):
    """A namespace of its own in a cluster; ``storage_class`` must give volumes for many nodes."""

    limit = 180.0

    def __init__(self, folder: Path, image: str, storage_class: str | None = None) -> None:
        super().__init__(folder)
        self.image = image
        self.namespace = f"farandole-{secrets.token_hex(3)}"
        self._storage = {"storageClassName": storage_class} if storage_class else {}
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._followers: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
        named = {"metadata": {"name": self.namespace}}
        self.ask("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", **named})
        self.environment["KUBECONFIG"] = str(self._user(folder))

    def close(self) -> None:
        super().close()
        for follower, reader in self._followers.values():
            follower.kill()
            reader.join()
            follower.communicate()
        # A namespace ends its pods before its Jobs, and a Job lets go of a pod when it has made
        # another one, which it cannot make there any more: they would wait for each other.
        self.ask("DELETE", self.path(kinds.JOB), propagationPolicy="Background")
        end = time.monotonic() + self.limit
        while self.all(kinds.POD):
            assert time.monotonic() < end, f"pods of {self.namespace} do not end"
            time.sleep(0.5)
        self.ask("DELETE", f"/api/v1/namespaces/{self.namespace}")

    def ask(self, method: str, path: str, body: Thing | None = None, **params: str) -> Any:
        """One request with the rights of who runs the tests: the answer, as JSON or text."""
        import kr8s.asyncio

        async def once() -> Any:
            api = await kr8s.asyncio.api()
            base, _, url = path.rpartition("/")
            async with api.call_api(
                method, base=base, version="", url=url, params=params,
                content=None if body is None else json.dumps(body),
                headers={"content-type": "application/json"},
            ) as answer:  # fmt: skip
                kind = answer.headers.get("content-type", "")
                return answer.json() if "json" in kind else answer.text

        return asyncio.run(once())

    def path(self, kind: kinds.Kind, name: str = "") -> str:
        """Where the server has the objects of a kind."""
        root = f"/apis/{kind.api}" if kind.group else f"/api/{kind.api}"
        return f"{root}/namespaces/{self.namespace}/{kind.plural}{'/' if name else ''}{name}"

    def make(self, kind: kinds.Kind, thing: Thing) -> None:
        """Create an object."""
        self.ask("POST", self.path(kind), {"apiVersion": kind.api, "kind": kind.name, **thing})

    def all(self, kind: kinds.Kind) -> list[Thing]:
        if kind.group not in ("", "batch", "networking.k8s.io") and not self._serves(kind):
            return []
        found: list[Thing] = self.ask("GET", self.path(kind))["items"]
        return found

    # ---- volumes

    def claim(self, name: str) -> None:
        self.make(kinds.CLAIM, {
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "100Mi"}},
                **self._storage,
            },
        })  # fmt: skip

    def touch(self, claim: str, path: str) -> None:
        self._run(f"open('/volume/{path}', 'w').close()", self._mounting(claim))

    def read(self, claim: str, path: str) -> str:
        return self._run(f"print(open('/volume/{path}').read())", self._mounting(claim))

    @staticmethod
    def _mounting(claim: str) -> Thing:
        return {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]}

    # ---- accidents

    def kill(self, index: int) -> None:
        pod = self._pod_of(index)
        there = {"hostPID": True, "nodeName": pod["spec"]["nodeName"]}
        self._run(_KILL, there, f"FARANDOLE_POD={pod['metadata']['name']}")

    def evict(self, index: int) -> None:
        name = self._pod_of(index)["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        self.ask("POST", self.path(kinds.POD, f"{name}/eviction"), eviction)

    def running(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._running()]

    def _running(self) -> list[Thing]:
        return [pod for pod in self.all(kinds.POD) if pod["status"].get("phase") == "Running"]

    def _pod_of(self, index: int) -> Thing:
        """The running pod of an index."""
        for pod in self._running():
            if standing.index_of(pod) == index:
                return pod
        raise AssertionError(f"no pod of index {index} runs")

    def _run(self, code: str, spec: Thing, *arguments: str) -> str:
        """Run Python in a pod of its own; returns what it printed."""
        name = f"helper-{secrets.token_hex(3)}"
        mounts = [
            {"name": each["name"], "mountPath": "/volume"} for each in spec.get("volumes", [])
        ]
        container = {
            "name": "helper", "image": self.image, "command": ["python3", "-c", code, *arguments],
            "volumeMounts": mounts, "imagePullPolicy": "IfNotPresent",
        }  # fmt: skip
        self.make(kinds.POD, {
            "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", "containers": [container],
                     "terminationGracePeriodSeconds": 0, **spec},
        })  # fmt: skip
        place = self.path(kinds.POD, name)
        end = time.monotonic() + self.limit
        while (phase := self.ask("GET", place)["status"].get("phase")) not in (
            "Succeeded", "Failed",
        ):  # fmt: skip
            assert time.monotonic() < end, f"{name} is {phase}"
            time.sleep(0.2)
        said: str = self.ask("GET", f"{place}/log")
        self.ask("DELETE", place)
        assert phase == "Succeeded", said
        return said

    # ---- what is there

    def sees(self, folder: Path) -> bool:
        return False

    def label(self, name: str, value: str) -> None:
        """Label the namespace."""
        place = f"/api/v1/namespaces/{self.namespace}"
        space = self.ask("GET", place)
        space["metadata"]["labels"][name] = value
        self.ask("PUT", place, space)

    def _serves(self, kind: kinds.Kind) -> bool:
        groups = self.ask("GET", "/apis/")["groups"]
        return any(kind.api == v["groupVersion"] for each in groups for v in each["versions"])

    def _follow(self) -> None:
        """Have a follower for each job: the output of pods goes with them."""
        for job in self.all(kinds.JOB):
            name = job["metadata"]["name"]
            if name not in self._followers:
                follower = self.start("logs", "-f", name)
                self._commands.remove(follower)  # another thread reads what it says
                reader = threading.Thread(target=self._read, args=(follower,))
                reader.start()
                self._followers[name] = follower, reader

    def _read(self, follower: subprocess.Popen[str]) -> None:
        assert follower.stdout is not None
        for line in follower.stdout:
            with self._lock:
                self._lines.append(line.rstrip("\n"))

    def output(self) -> str:
        self._follow()
        with self._lock:
            return "\n".join(self._lines)

    def wait(self, name: str, state: str) -> str:
        self._follow()
        self.until(lambda: self.ends(name), f"an end of {name}")
        follower, reader = self._followers[name]
        reader.join(self.limit)
        assert follower.wait(self.limit) == 0, self.output()
        return super().wait(name, state)

    def break_logs(self) -> None:
        """Nothing here can break a connection: that they are begun anew is tested all the same."""

    # ---- who submits

    def _user(self, folder: Path) -> Path:
        """The kubeconfig of a user who may do what ``--print-rbac`` says."""
        import kr8s.asyncio

        self.make(_ACCOUNT, {"metadata": {"name": _USER}})
        role = yaml.safe_load(self.call("submit", "--print-rbac"))
        self.make(_ROLE, role)
        self.make(_BINDING, {
            "metadata": {"name": _USER},
            "roleRef": {"apiGroup": _ROLE.group, "kind": "Role", "name": role["metadata"]["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": _USER, "namespace": self.namespace}],
        })  # fmt: skip
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.ask("POST", self.path(_ACCOUNT, f"{_USER}/token"), asked)["status"]["token"]

        async def server() -> Thing:
            auth = (await kr8s.asyncio.api()).auth
            trust = {"certificate-authority": str(auth.server_ca_file)}
            return {"server": str(auth.server), **(trust if auth.server_ca_file else {})}

        path = folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump({
                "apiVersion": "v1", "kind": "Config", "current-context": "x",
                "clusters": [{"name": "c", "cluster": asyncio.run(server())}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {
                    "cluster": "c", "user": "u", "namespace": self.namespace}}],
            })
        )  # fmt: skip
        return path
