"""Running ``farandole run`` for real, and policing what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = [sys.executable, "-c", "from farandole.cli.main import main; main()", "run"]

ENTER_INIT = '''
import os
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.secret import Secret
from farandole.core.store import StoreClient

def enter_init():
    """What init() tells the launcher first."""
    environ = os.environ
    store = StoreClient(
        Address.parse(environ["FARANDOLE_STORE"]),
        Secret.from_hex(environ["FARANDOLE_SECRET"]),
        Deadline.after(30.0),
    )
    store.set("init/" + environ["FARANDOLE_RANK"], b"0")
    return store
'''


@dataclass
class Launcher:
    """Starts launches in a folder, each recognisable by a mark in its processes' environment."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / "helper_for_tests.py").write_text(ENTER_INIT)
        (self.folder / name).write_text(text)
        return name

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "FARANDOLE_TEST_MARK": self.mark}
        for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
            environ.pop(name, None)
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env={**environ, **options.pop("env", {})},  # type: ignore[dict-item]
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            | options,  # type: ignore[arg-type]
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(
            process.args, process.returncode, (out or b"").decode(), (err or b"").decode()
        )

    def running(self) -> list[str]:
        """Command lines of the processes that still carry the mark."""
        needle = self.mark.encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if needle in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if state not in "ZX":
                        found.append(f"{entry.name} {command}")
            except OSError:
                continue
        return found


def wait_until(condition: Callable[[], bool], limit: float = 3.0) -> bool:
    """Whether the condition came to hold within ``limit`` seconds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
