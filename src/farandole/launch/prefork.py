"""The forking parent: a process that imports torch once and forks the workers.

Run as a script by the agent, in a process of its own; imported by nobody. Importing torch costs a
second of CPU; forked workers share it, and their start takes milliseconds.

Why forking is safe here
    A fork copies one thread: locks that other threads hold stay locked in the child for ever. So
    this process has one thread, which is checked before each fork; it runs no tensor operation,
    touches no CUDA, opens no socket but the agent's. NumPy's OpenBLAS would start threads when it
    is loaded; it is told not to, and each child sets the number that it would have had.

Who is whose child
    Workers belong to the agent: the process that forked them ends then, and so the kernel gives
    them to the agent, the nearest ancestor that adopts orphans. They wait until that has happened
    before they bind their life to the agent's.

    Where workers are replaced (``keep``), that process is a fork of this one, and the next one
    stands ready. So torch is imported once a job, not once a loss, which would take a core from
    the survivors for two seconds.

When workers cannot be forked (:func:`_why_not`), the agent is told why, and uses ``exec``.
"""

# What must be done before the first import stands before it:
# ruff: noqa: E402

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder: its modules are not top-level ones

import gc

gc.disable()  # what an import makes stays; looking for garbage in it takes a tenth of the time

import contextlib
import ctypes
import glob
import importlib
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from farandole.launch import kernel, worker

AGENT = 0
"""The descriptor of the socket to the agent: standard input, of no other use here."""

_SOON_NEEDED = (
    "farandole.torch",
    "farandole.comm.engines.choice",
    "farandole.comm.engines.shm.opening",
    "encodings.ascii",
    "encodings.idna",
)
"""What every rank would import by itself before its first collective is done."""

_LATER_NEEDED = ("torch._dynamo",)
"""What a program imports when it makes its first optimizer, which takes as long as torch itself:
replacements find it there."""

_DESCRIPTORS = 4
"""A worker's standard streams and the pipe for its failure report."""

_NO_MORE = 1
"""How a process ends after which none is to be forked any more."""

Wish = tuple[Any, list[list[int]]]
"""What the agent wants, ``None`` for nothing, and each worker's descriptors."""


def main() -> None:
    """Import, wait for the agent's wishes, fork; in a worker, run the user's program."""
    agent = os.getppid()
    kernel.die_with(agent)
    channel = socket.socket(fileno=os.dup(AGENT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, AGENT)
    os.close(nothing)
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - the program may not need it; its own import will say
        _answer(channel, why=f"torch cannot be imported here: {type(error).__name__}: {error}")
        return
    _import(_SOON_NEEDED)
    request, descriptors = _receive(channel)
    if request is not None and request["keep"]:
        request, descriptors = _stay(channel, request, descriptors)
    if request is None:
        sys.exit(_NO_MORE)
    why = _why_not(request)
    if why:
        _answer(channel, why=why)
        sys.exit(_NO_MORE)
    index, own = _fork_all(channel, descriptors)
    channel.close()
    _become_worker(torch, request, index, own, agent)


def _stay(channel: socket.socket, request: Any, descriptors: list[list[int]]) -> Wish:
    """Have each wish served by a child, which is there before the wish comes.

    Returns in the children, with their wish, and here when no more is to be served, or when this
    process must not be forked any more: with the wish that cannot be met then.
    """
    while _threads() == 1:
        child = os.fork()
        if child == 0:
            return (request, descriptors) if request else _receive(channel)
        request = None
        for descriptor in itertools.chain.from_iterable(descriptors):
            os.close(descriptor)
        descriptors = []
        _import(_LATER_NEEDED)
        _, status = os.waitpid(child, 0)
        if status:
            return None, []
    return (request, descriptors) if request else _receive(channel)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # the program's own import will say what is wrong
            importlib.import_module(module)
    gc.freeze()


def _receive(channel: socket.socket) -> Wish:
    """The wish of the agent and each rank's descriptors; ``None`` when the agent wants nothing.

    The wish is JSON in a memory file, since it holds environments and a packet is small.
    """
    _, files, _, _ = socket.recv_fds(channel, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not files:
        return None, []
    with open(files[0], "rb") as file:
        request = json.loads(file.read())
    seats: list[list[int]] = []
    for _ in request["ranks"]:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        seats.append(list(descriptors))
    return request, seats


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _answer(channel: socket.socket, **fields: Any) -> None:
    try:
        channel.send(json.dumps(fields).encode("ascii"))
    except OSError:
        # The agent has ended, or given this process up.
        return


def _why_not(request: Any) -> str:
    """Why this program would notice that it was forked; empty when it would not."""
    threads = _threads()
    if threads != 1:
        return f"importing torch started {threads - 1} threads"
    if sys.gettrace() or sys.getprofile():
        return "a tracer or profiler runs in every Python process"
    if sys.flags.inspect:
        return "Python is to stay in interactive mode"
    form, argv = request["form"], request["argv"]
    folder = os.getcwd()
    if form == "script":
        if not argv[0].endswith(".py") or not os.path.isfile(argv[0]):
            return f"{argv[0]} is not a Python source file"
        folder = os.path.dirname(os.path.realpath(argv[0]))
    shadowing = _shadowing(folder)
    return f"the program would import its own {shadowing}" if shadowing else ""


def _shadowing(folder: str) -> str:
    """A file of the program's that it would import instead of a module that is imported here."""
    imported = {name.partition(".")[0] for name in sys.modules}
    for entry in sorted(os.listdir(folder)):
        name = entry.partition(".")[0]
        path = os.path.join(folder, entry)
        if name not in imported or name in sys.builtin_module_names:
            continue
        if entry.endswith((".py", ".so")) or os.path.isfile(os.path.join(path, "__init__.py")):
            origin = getattr(sys.modules.get(name), "__file__", None)
            if origin and os.path.realpath(origin).startswith(os.path.realpath(path)):
                continue
            return entry
    return ""


def _fork_all(channel: socket.socket, descriptors: list[list[int]]) -> tuple[int, list[int]]:
    """Fork the workers and end: returns index and descriptors in each worker, and nowhere else."""
    forker = os.getpid()
    all_forked, say_so = os.pipe()
    pids: list[int] = []
    try:
        for index, own in enumerate(descriptors):
            pid = os.fork()
            if pid == 0:
                os.close(say_so)
                if not os.read(all_forked, 1):
                    os._exit(0)  # not all could be forked, so none is to run
                os.close(all_forked)
                while os.getppid() == forker:
                    time.sleep(0.001)  # the kernel is about to give this process to the agent
                for other in descriptors[:index] + descriptors[index + 1 :]:
                    for descriptor in other:
                        os.close(descriptor)
                return index, own
            pids.append(pid)
    except OSError as error:
        _answer(channel, why=f"fork failed: {error.strerror}")
    else:
        _answer(channel, pids=pids)
        os.write(say_so, b"." * len(pids))
    os._exit(0)  # Python's own end would take time from the workers


def _become_worker(
    torch: Any, request: Any, index: int, descriptors: Sequence[int], agent: int
) -> None:
    *streams, report = descriptors
    report = worker.out_of_the_way(report)
    worker.settle(streams, agent)
    for stream in streams:
        os.close(stream)
    worker.replace_environment(request["environment"] | request["ranks"][index])
    worker.open_standard_streams()
    _draw_seeds_anew(torch)
    _give_openblas_its_threads()
    gc.enable()
    program, arguments = request["argv"][0], request["argv"][1:]
    if request["form"] == "script":
        worker.run_script(program, arguments, report)
    else:
        worker.run_module(program, arguments, report)


def _draw_seeds_anew(torch: Any) -> None:
    """Give each worker random states of its own. Python's own ``random`` has done so by itself."""
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


def _give_openblas_its_threads() -> None:
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    given = next((os.environ[name] for name in names if os.environ.get(name, "").isdigit()), "")
    cores = len(os.sched_getaffinity(0))
    wanted = min(int(given or cores) or cores, cores)
    if wanted == 1 or "numpy" not in sys.modules:
        return
    folder = os.path.dirname(str(sys.modules["numpy"].__file__)) + ".libs"
    for path in glob.glob(os.path.join(glob.escape(folder), "*openblas*")):
        library = ctypes.CDLL(path)
        for suffix in ("64_", ""):
            for prefix in ("scipy_", ""):
                setter = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if setter is not None:
                    setter(wanted)
                    return


if __name__ == "__main__":
    main()
