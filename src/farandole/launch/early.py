"""What must be under way before anything else is imported: the agent and its forking parent.

Importing torch is most of the time from a command to its first allreduce. So the launcher's first
act is to fork the agent (at that moment this process is small and has one thread), and the agent's
first act is to start the process that imports torch; command line and settings are read meanwhile.
What that process's environment will be is guessed from the arguments; when the guess was wrong, the
agent starts another one. Therefore this module imports next to nothing, not even ``typing``.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from farandole.launch import environment, host

HOSTS = frozenset(["-H", "--hosts", "--hostfile"])

VALUED = HOSTS | {
    "-np", "-n", "--env", "--output-dir", "--start-timeout", "--stall-timeout",
    "--grace", "--remote-python", "--ssh",
    "--timeline-filename", "--autotune-log-file", "--autotune-warmup-samples",
    "--autotune-steps-per-sample",
    "--min-np", "--max-np", "--host-discovery-script", "--slots-per-host",
    "--reset-limit", "--elastic-timeout", "--blacklist-cooldown-range", "--on-loss",
    "--on-loss-size", "--chaos",
}  # fmt: skip
"""The options of ``farandole run`` that take a value: what follows them is no program."""

WITHOUT_GUESS = HOSTS | {"--no-fork", "--dry-run", "--help", "-h"}
"""Options with which nothing is forked here, or only after other hosts were asked."""


class Agent:
    """An agent that was started on this host."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.socket = sock


class ForkingParent:
    """A process that imports torch in order to fork workers; see ``prefork.py``."""

    def __init__(self, pid: int, sock: socket.socket, environ: dict[str, str]) -> None:
        self.pid = pid
        self.socket = sock
        self.environment = environ
        """Its environment, which its workers are to have too."""


def start_agent(arguments: Sequence[str]) -> Agent:
    """Fork the agent of this host; ``arguments`` are those of ``farandole run``, for the guess.

    Call it first in a process of one thread. The agent ends when the returned socket is closed.
    """
    _open_missing_streams()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # Until the job loop listens to signals: end by them, and with this process all of it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return Agent(pid, ours)
    status = 70
    try:
        ours.close()
        os.setsid()
        guess = guessed_environment(arguments, dict(os.environ))
        parent = None if guess is None else start_forking_parent(guess)
        # Until the launcher wants something, or is gone, the cores are for what is being started.
        select.select([theirs], [], [])
        from farandole.launch import agent

        agent.serve(theirs, parent)
        status = 0
    except BaseException:  # noqa: BLE001 - this is the end of a process
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def guessed_environment(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str] | None:
    """What the workers will have in common, by the look of the arguments; ``None``: no fork."""
    size = 0
    given: dict[str, str] = {}
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        name, equals, value = arguments[position].partition("=")
        if name in WITHOUT_GUESS:
            return None
        if name in ("-m", "--"):
            break
        if name in VALUED and not equals:
            position += 1
            value = arguments[position] if position < len(arguments) else ""
        if name in ("-np", "-n") and value.isdigit():
            size = int(value)
        if name == "--env":
            variable, _, text = value.partition("=")
            given[variable] = text
        position += 1
    if position >= len(arguments) or arguments[position].endswith((".yaml", ".yml")):
        return None
    return environment.shared(
        environ,
        given,
        local_size=size or host.visible_gpus(environ) or 1,
        cores=host.usable_cores(),
    )


def start_forking_parent(environ: Mapping[str, str]) -> ForkingParent:
    """Start the process that imports torch, with the environment that its workers will have."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prefork.py")
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, *interpreter_flags(), script],
        # OpenBLAS would start threads while it is loaded; workers set its number for themselves.
        {**environ, "OPENBLAS_NUM_THREADS": "1"},
        file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
    )
    theirs.close()
    return ForkingParent(pid, ours, dict(environ))


def _open_missing_streams() -> None:
    """Where a standard stream is closed, what is opened next would be taken for it."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(lowest, True)
    os.close(lowest)


def interpreter_flags() -> list[str]:
    """The flags that this Python was started with, for those that it starts."""
    if not (sys.warnoptions or sys._xoptions or _flags_differ()):
        return []
    import subprocess

    flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()
    return flags


def _flags_differ() -> bool:
    return any(argument.startswith("-") for argument in sys.orig_argv[1:2])
