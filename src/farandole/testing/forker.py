"""Runs a function in fresh processes, forked by a clean helper that is started once.

See :mod:`farandole.testing.forkserver` for why, and for what the two say to each other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from farandole.core.clock import Deadline
from farandole.core.config import environment
from farandole.core.errors import FarandoleBug, SetupError
from farandole.testing.outcome import Outcome

START_LIMIT = 120.0
"""Seconds for the helper to import torch."""

DUMP_LIMIT = 1.0
"""Seconds for ranks to write down their stacks before they are killed."""


class Helper:
    """The fork server, seen from here."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        known = ("farandole.torch", "farandole.comm.engines.choice", "pytest")
        modules = [name for name in known if _wanted(name)]
        command = [sys.executable, "-m", "farandole.testing.forkserver", str(theirs.fileno())]
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [*command, *modules],
                pass_fds=[theirs.fileno()],
                env={**environment(), **single},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._ask(Deadline.after(START_LIMIT), "ready")

    def close(self) -> None:
        """End the helper, and with it whatever still runs."""
        self._control.close()
        self._process.wait()

    def run(
        self, directory: Path, size: int, deadline: Deadline
    ) -> tuple[dict[int, int], set[int]]:
        """Run the job in ``directory``: statuses by rank, and the ranks that had to be stopped."""
        statuses: dict[int, int] = {}
        late: set[int] = set()
        self._send({"start": str(directory), "size": size})
        try:
            while len(statuses) < size:
                message = self._receive(deadline)
                if message is None:
                    late = set(range(size)) - set(statuses)
                    self._dump(directory, late)
                    break
                statuses[message["exited"]] = message["status"]
        finally:
            self._send({"finish": []})
            self._ask(Deadline.after(START_LIMIT), "finished")
        return statuses, late

    def _dump(self, directory: Path, ranks: set[int]) -> None:
        self._send({"dump": []})
        end = time.monotonic() + DUMP_LIMIT
        stacks = [directory / f"stacks-{rank}" for rank in ranks]
        # A rank that was stopped before it had begun has no file.
        while time.monotonic() < end and not all(
            path.exists() and path.stat().st_size for path in stacks
        ):
            time.sleep(0.02)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _receive(self, deadline: Deadline) -> dict[str, Any] | None:
        remaining = deadline.remaining()
        self._control.settimeout(None if remaining is None else max(remaining, 0.001))
        try:
            data = self._control.recv(65536)
        except TimeoutError:
            return None
        if not data:
            raise SetupError(f"The fork server ended with {self._process.wait()}; see its stderr.")
        message: dict[str, Any] = json.loads(data)
        return message

    def _ask(self, deadline: Deadline, answer: str) -> None:
        while True:
            message = self._receive(deadline)
            if message is None:
                raise FarandoleBug(
                    f"The fork server did not say {answer!r} in {deadline.limit:g} s."
                )
            if answer in message:
                return


_lock = threading.Lock()
_helper: Helper | None = None


def run(
    environments: Sequence[Mapping[str, str]], fn: Callable[[int], Any], timeout: float
) -> list[Outcome[Any]]:
    """Run ``fn(rank)`` in one process per environment and say how each ended.

    One job at a time: another thread's waits its turn.
    """
    with _lock, tempfile.TemporaryDirectory(prefix="farandole-ranks-") as name:
        directory = Path(name)
        job = {
            "environments": [dict(each) for each in environments],
            "path": sys.path,
            "cwd": os.getcwd(),
            "fn": _pickled(fn),
        }
        (directory / "job").write_bytes(cloudpickle.dumps(job))
        size = len(environments)
        statuses, late = _the_helper().run(directory, size, Deadline.after(timeout))
        return [_outcome(directory, rank, statuses.get(rank), rank in late) for rank in range(size)]


def _the_helper() -> Helper:
    global _helper
    if _helper is None:
        _helper = Helper()
        atexit.register(_helper.close)
    return _helper


def _outcome(directory: Path, rank: int, status: int | None, late: bool) -> Outcome[Any]:
    written: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        written = cloudpickle.loads((directory / f"outcome-{rank}").read_bytes())

    def text(kind: str) -> str:
        path = directory / f"{kind}-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    return Outcome(
        rank=rank,
        finished=written.get("finished", False),
        value=written.get("value"),
        error=written.get("error"),
        traceback=written.get("traceback", ""),
        exit_code=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
        timed_out=late,
        stacks=text("stacks"),
        output=text("output"),
        errors=text("errors"),
    )


def _pickled(fn: Callable[[int], Any]) -> bytes:
    """``fn`` with the code of the module that it was written in, unless that is installed."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    with _by_value(getattr(inner, "__module__", "") or ""):
        return bytes(cloudpickle.dumps(fn))


@contextlib.contextmanager
def _by_value(name: str) -> Iterator[None]:
    module = sys.modules.get(name)
    if module is None or name == "__main__" or name.partition(".")[0] == "farandole":
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _wanted(name: str) -> bool:
    """Whether the helper should import ``name``: ours where it exists, others where in use."""
    if not name.startswith("farandole."):
        return name in sys.modules
    return importlib.util.find_spec(name) is not None
