"""The process that forks ranks for :mod:`farandole.testing.forker`.

Forking a test process is unsafe, since it has threads, and starting Python with torch takes
seconds. So this process imports torch once, keeps a single thread, and forks whenever asked.

It is asked through a socket that carries one JSON object a message:

=========================================  =======================================================
``{"start": directory, "size": n}``        fork n ranks, which read ``directory/job``
``{"dump": []}``                           have the ranks that still run write down their stacks
``{"finish": []}``                         kill what is left of the ranks' sessions, then answer
                                           ``{"finished": []}``
=========================================  =======================================================

It says ``{"exited": rank, "status": wait status}`` as ranks end, and when the socket closes it
kills all and ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle  # type: ignore[import-untyped]

DUMP_SIGNAL = signal.SIGUSR2
PR_SET_PDEATHSIG = 1


class Ranks:
    """The ranks of the one job that runs. They stay zombies until it is finished.

    While a zombie is there its process group's number belongs to it, so that killing the group
    can hit nobody else.
    """

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.running: set[int] = set()

    def started(self, pids: list[int]) -> None:
        """``pids`` by rank."""
        self.pids = pids
        self.running = set(range(len(pids)))

    def newly_ended(self) -> list[tuple[int, int]]:
        """The ranks that ended since the last call, each with its exit code or minus its signal."""
        ended = []
        for rank in sorted(self.running):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            result = os.waitid(os.P_PID, self.pids[rank], options)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                ended.append((rank, result.si_status if exited else -result.si_status))
        self.running.difference_update(rank for rank, _ in ended)
        return ended

    def dump(self) -> None:
        """See the module."""
        for rank in self.running:
            os.kill(self.pids[rank], DUMP_SIGNAL)

    def finish(self) -> None:
        """See the module."""
        for pid in self.pids:
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.started([])


def serve(control: socket.socket) -> None:
    """Answer until the socket closes."""
    ranks = Ranks()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        readable, _, _ = select.select([control.fileno(), wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
        for rank, status in ranks.newly_ended():
            control.send(json.dumps({"exited": rank, "status": status}).encode())
        if control.fileno() not in readable:
            continue
        data = control.recv(65536)
        if not data:
            ranks.finish()
            return
        message = json.loads(data)
        if "start" in message:
            pids = []
            for rank in range(message["size"]):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    control.close()
                    os.close(wake_read)
                    os.close(wake_write)
                    leave(be_rank(rank, Path(message["start"])))
                pids.append(pid)
            ranks.started(pids)
        elif "dump" in message:
            ranks.dump()
        else:
            ranks.finish()
            control.send(b'{"finished": []}')


def be_rank(rank: int, directory: Path) -> int:
    """Be rank ``rank`` of the job in ``directory``; returns the exit code."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, directory / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    stacks = open(directory / f"stacks-{rank}", "wb", buffering=0)  # noqa: SIM115 - for good
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, stacks)
    random.seed()
    job = cloudpickle.loads((directory / "job").read_bytes())
    os.environ.clear()
    os.environ.update(job["environments"][rank])
    sys.path[:] = job["path"]
    os.chdir(job["cwd"])
    return _run(rank, job["fn"], directory / f"outcome-{rank}")


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, but for taking its modules apart.

    That would take 0.1 s for all that torch brings.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(rank: int, pickled: bytes, target: Path) -> int:
    outcome: dict[str, Any]
    code = 0
    try:
        outcome = {"finished": True, "value": cloudpickle.loads(pickled)(rank)}
    except SystemExit as leaving:
        outcome = {}
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        traceback.print_exc()
        outcome = {"error": _portable(error), "traceback": traceback.format_exc()}
        code = 1
    partial = target.with_suffix(".part")
    try:
        data = cloudpickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        code = 1
        data = cloudpickle.dumps(
            {"error": TypeError(f"what fn returned cannot be pickled: {error}"), "traceback": ""}
        )
    partial.write_bytes(data)
    partial.rename(target)
    return code


def _portable(error: BaseException) -> BaseException:
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """``python -m farandole.testing.forkserver FD MODULE...``: import the modules, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        # What cannot be imported is for the rank that needs it to report.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1 or threading.active_count() != 1:
        raise SystemExit(f"The fork server has {threads} threads after importing {sys.argv[2:]}.")
    gc.collect()
    gc.freeze()
    control.send(b'{"ready": []}')
    serve(control)


if __name__ == "__main__":
    main()
