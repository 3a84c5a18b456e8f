"""Where the end-to-end tests run: a cluster, the command line that talks to it, and its accidents.

A test's body knows only :class:`Bench`. :class:`ProcessBench` is a server and a kubelet of ours
whose pods are processes; ``cluster_bench`` has the one for real clusters.
"""

from __future__ import annotations

import abc
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api_server import ApiServer, Fault
from operators import JobSetOperator, MpiJobOperator, Operator, TrainJobOperator
from process_kubelet import JobController, ProcessKubelet

from farandole.launch.kubernetes import kinds

Thing = dict[str, Any]


_WELL = {"Completed": "Complete", "Succeeded": "Complete"}
"""How a JobSet and an MPIJob call what a Job and a TrainJob do."""


class Bench(abc.ABC):
    """A cluster with nothing in it, and a user who may submit jobs to it and no more."""

    image: str
    """An image with Python and torch."""
    limit = 90.0
    """Seconds for anything that happens at all."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        self.environment = {**os.environ, "COLUMNS": "200"}
        self._commands: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        """End everything."""
        for each in self._commands:
            each.kill()
            each.communicate()

    # ---- what differs

    @abc.abstractmethod
    def all(self, kind: kinds.Kind) -> list[Thing]:
        """The objects of a kind."""

    @abc.abstractmethod
    def claim(self, name: str) -> None:
        """Make a volume claim that many nodes may mount."""

    @abc.abstractmethod
    def touch(self, claim: str, path: str) -> None:
        """Make an empty file on a volume."""

    @abc.abstractmethod
    def read(self, claim: str, path: str) -> str:
        """A file on a volume."""

    @abc.abstractmethod
    def kill(self, index: int) -> None:
        """SIGKILL to the container of a node, as when it has used too much memory."""

    @abc.abstractmethod
    def evict(self, index: int) -> None:
        """The node is drained: SIGTERM, and the pod is marked as disrupted."""

    @abc.abstractmethod
    def running(self) -> list[str]:
        """The pods whose processes run."""

    @abc.abstractmethod
    def output(self) -> str:
        """All that pods have printed until now, those that are gone too."""

    @abc.abstractmethod
    def break_logs(self) -> None:
        """From now on connections that follow logs break off, as often as can be done here."""

    @abc.abstractmethod
    def sees(self, folder: Path) -> bool:
        """Whether pods see a folder of this machine."""

    # ---- the command line

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``farandole`` in the project's folder."""
        started = subprocess.Popen(
            [sys.executable, "-m", "farandole.cli.main", *words], cwd=self.project,
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._commands.append(started)
        return started

    def call(self, *words: str, code: int = 0) -> str:
        """What ``farandole`` prints, both streams."""
        started = self.start(*words)
        out, err = started.communicate(timeout=self.limit)
        assert started.returncode == code, (words, started.returncode, out, err)
        return out + err

    def submit(self, script: str, *options: str, detach: bool = True, **fields: Any) -> str:
        """Submit a job, and return its name."""
        lines = {"image": self.image, "start_timeout": 60, "grace": 20, **fields}
        (self.project / "train.py").write_text(script)
        job = "".join(f"{name}: {value}\n" for name, value in lines.items())
        (self.project / "farandole.yaml").write_text(
            f"{job}env: {{OMP_NUM_THREADS: '1', OPENBLAS_NUM_THREADS: '1'}}\n"
        )
        said = self.call("submit", *(["--detach"] if detach else []), *options, "farandole.yaml")
        found = re.search(r"submitted (\S+) to", said)
        assert found, said
        return found[1]

    # ---- waiting

    def wait(self, name: str, state: str) -> str:
        """Until the Job is ``Complete`` or ``Failed``; returns all that its pods have printed."""
        self.until(lambda: self.ends(name), f"an end of {name}")
        output = self.output()
        assert self.ends(name) == {state}, output
        return output

    def ends(self, name: str) -> set[str]:
        """How the job has ended; empty when it has not."""
        types = {
            _WELL.get(condition["type"], condition["type"])
            for kind in kinds.OWNERS.values()
            for owner in self.all(kind)
            if owner["metadata"]["name"] == name
            for condition in owner.get("status", {}).get("conditions", [])
        }
        return types & {"Complete", "Failed"}

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Wait for something."""
        end = time.monotonic() + self.limit
        while not true():
            assert time.monotonic() < end, f"no {what}; output:\n{self.output()}"
            self.pause()

    def pause(self) -> None:
        """Until something may have changed."""
        time.sleep(0.2)

    def printed(self, text: str) -> None:
        """Wait for a line of any pod."""
        self.until(lambda: text in self.output(), f"line with {text!r}")


class ProcessBench(Bench):
    """A server and a kubelet of ours: every pod is a process of this machine."""

    image = "example/torch:1"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pods = folder / "pods"
        pods.mkdir()
        self.server = ApiServer()
        self.kubelet = ProcessKubelet(self.server, pods)
        self.controllers: list[JobController | Operator] = [
            JobController(self.server), JobSetOperator(self.server),
            TrainJobOperator(self.server), MpiJobOperator(self.server),
        ]  # fmt: skip
        self.environment["KUBECONFIG"] = str(self.server.kubeconfig(folder))

    def close(self) -> None:
        super().close()
        for each in self.controllers:
            each.close()
        self.kubelet.close()
        self.server.close()

    def sees(self, folder: Path) -> bool:
        return folder.exists()

    def all(self, kind: kinds.Kind) -> list[Thing]:
        return self.server.all(kind)

    def claim(self, name: str) -> None:
        self.kubelet.claim(name).mkdir(parents=True)
        self.server.put(
            kinds.CLAIM, {"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteMany"]}}
        )

    def touch(self, claim: str, path: str) -> None:
        (self.kubelet.claim(claim) / path).touch()

    def read(self, claim: str, path: str) -> str:
        return (self.kubelet.claim(claim) / path).read_text()

    def kill(self, index: int) -> None:
        self.kubelet.kill(index)

    def evict(self, index: int) -> None:
        self.kubelet.evict(index)

    def running(self) -> list[str]:
        return self.kubelet.running

    def output(self) -> str:
        return "\n".join(
            f"{pod}: {text}" for pod, log in list(self.server.logs.items()) for _, text in log.lines
        )

    def break_logs(self) -> None:
        turn = itertools.cycle(range(4))  # a connection breaks off at every fourth line
        self.server.faults.append(
            Fault(lambda method, _: method == "LOG" and next(turn) == 0, times=12)
        )

    def pause(self) -> None:
        with self.server.changed:
            self.server.changed.wait(0.2)
