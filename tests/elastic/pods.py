"""A job on a cluster whose pods are processes of this machine, and are replaced when they end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launching import Launcher

NODES = 2
PORT = 29400

BEGIN = """
import sys
from farandole.elastic import policy
from farandole.launch import pod
policy.RESPAWN_RANGE = (0.0, 0.0)  # hosts fail all the time here
pod.main(sys.argv[1:])
"""


@dataclass
class Pods:
    """A pod for each node: one that ends otherwise than well is started again, as by a cluster."""

    launcher: Launcher
    script: str
    ranks: int
    environment: dict[str, str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """The node and the exit code of each pod that has ended."""

    def __post_init__(self) -> None:
        network = f"127.{random.randrange(2, 250)}.{random.randrange(1, 250)}"
        self._addresses = [f"{network}.{node + 1}" for node in range(NODES)]
        self._secret = secrets.token_hex(32)
        self._closing = threading.Event()
        self._code: int | None = None
        self._threads = [threading.Thread(target=self._keep, args=(n,)) for n in range(NODES)]
        for thread in self._threads:
            thread.start()

    @property
    def folder(self) -> Path:
        return self.launcher.folder

    def running(self) -> list[str]:
        return self.launcher.running()

    def code(self) -> int | None:
        return self._code

    def output(self) -> str:
        return (self.folder / "output").read_text()[-8000:]

    def kill(self, node: int) -> None:
        """SIGKILL to a pod's first process: of node 0 that is the job loop, with the driver."""
        self.processes[node].send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End all pods."""
        self._closing.set()
        for process in list(self.processes.values()):
            with contextlib.suppress(OSError):
                process.kill()
        for thread in self._threads:
            thread.join()

    def _keep(self, node: int) -> None:
        while not self._closing.is_set():
            process = self.processes[node] = self._start(node)
            code = process.wait()
            self.ends.append((node, code))
            # A pod's processes end with its first one.
            while self._of(node) and not self._closing.is_set():
                time.sleep(0.01)
            if node == 0 and code != -signal.SIGKILL:
                self._code = code
                self._closing.set()
            if code == 0:
                return

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        names = ",".join(f"job-{n}={address}" for n, address in enumerate(self._addresses))
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, "", str(self.folder), json.dumps(self._told())],
                cwd=self.folder,
                env={
                    **os.environ, **self.environment, "FARANDOLE_TEST_MARK": self.launcher.mark,
                    "FARANDOLE_SECRET": self._secret, "FARANDOLE_NODE": str(node),
                    "FARANDOLE_POD_IP": self._addresses[node], "FARANDOLE_ADDRESSES": names,
                },
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.launcher.started.append(process)
        return process

    def _told(self) -> dict[str, Any]:
        return {
            "role": "node", "name": "job", "peers": "job-{}", "port": PORT, "nodes": NODES,
            "least_nodes": 1, "local_size": self.ranks, "argv": ["python", self.script],
            "folder": str(self.folder), "code": "image", "logs": None, "start_timeout": 60,
            "time_limit": None, "grace": 20, "fork": True,
        }  # fmt: skip

    def _of(self, node: int) -> list[int]:
        needles = f"FARANDOLE_NODE={node}".encode(), self.launcher.mark.encode()
        found = []
        for line in self.running():
            pid = int(line.split()[0])
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if all(needle in environ for needle in needles):
                    found.append(pid)
        return found
