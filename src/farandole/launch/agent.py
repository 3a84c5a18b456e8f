"""The agent: one process on each host that starts, watches and ends the workers there.

It talks to the job loop by messages (:mod:`farandole.launch.channel`) and decides nothing but this:
when the job loop is gone, everything below this process is killed at once. So the death of the
launcher, by whatever signal, leaves nothing behind:

====================  ==============================================================
who dies              what follows
====================  ==============================================================
the job loop          the channel ends; the agent kills all its descendants and ends
                      (but see :mod:`farandole.launch.pod_agent`)
the agent             the kernel kills the workers (parent-death signal); the
                      launcher adopts and kills what they had started
a worker              its children become the agent's, which kills them at the end
the forking parent    nothing: workers are the agent's children
====================  ==============================================================

Messages to the agent: ``prepare`` (in a job of several hosts: stdin, whether the first worker is to
have ours; environment, if torch is to be imported for what will start), ``start`` (program,
environments, how), ``spawn`` (numbers, environments: more workers of the same), ``end`` (rank:
SIGKILL to it and what it has started), ``stop`` (signal number, seconds until SIGKILL), ``stack``
(rank: show where it is, which ends it), ``resize`` (terminal), ``hold`` (on: read no output
meanwhile), ``finish``. From it: ``started`` (pids, how), ``output`` (rank, stream; an empty payload
is its end), ``report`` (an uncaught exception), ``exited`` (rank, code, negative for a signal),
``unstarted`` (rank, why), ``gone`` (nothing is left).

In a job whose workers are replaced (``replaces``) the forking parent stays, so that a replacement
starts in milliseconds; a worker's end takes along what it has left behind; and a
worker that the kernel shows as stopped is told of (``frozen``: rank, state, seconds).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import resource
import selectors
import signal
import socket
import struct
import sys
import termios
import time
import tty
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from farandole.launch import early, kernel, leftovers, worker
from farandole.launch.channel import Channel, Message
from farandole.launch.pulse import PULSE, Pulse

_CHUNK = 1 << 16
_UNSENT_LIMIT = 1 << 20
"""Bytes that may wait for the job loop before workers' output waits in its pipes."""

_LAST_WORDS = 1 << 20
"""Bytes, no less than a pipe holds: what comes after them was written after a worker's end."""

_LAST_RESPITE = 2.0
"""Seconds between SIGTERM and SIGKILL for what workers have left behind."""


@dataclass
class Worker:
    """A worker and the ends of its pipes that are ours."""

    rank: int
    own: dict[str, str] = field(default_factory=dict)
    """The variables that only it has."""
    ends: list[int] = field(default_factory=list)
    """Its own ends of standard input, output, error and the report pipe, until it has them."""
    open: set[int] = field(default_factory=set)
    """Descriptors that are still read."""
    pid: int = 0
    code: int | None = None
    """How it ended: exit code, negative for a signal; ``None`` while it runs."""
    unwanted: bool = False
    """Whether it is to end as soon as it has begun."""


def serve(sock: socket.socket, parent: early.ForkingParent | None) -> None:
    """Be the agent until the job loop says ``finish`` or is gone."""
    Agent(Channel(sock), parent).run()


class Agent:
    """The event loop. One thread, so that the bond between workers and agent is to the agent."""

    def __init__(
        self,
        channel: Channel,
        parent: early.ForkingParent | None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self._channel = channel
        self._parent = parent
        self._secrets = secrets or {}
        """Variables of workers that are known here, and do not travel with messages."""
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}
        self._streams: dict[int, tuple[Worker, str]] = {}
        self._ended_unknown: dict[int, int] = {}
        self._kill_at: float | None = None
        self._task: dict[str, Any] = {}
        self._refusal = ""
        """Why the forking parent cannot fork, said before there was anything to start."""
        self._waiting: list[Worker] = []
        """Workers that are to be started when the forking parent is free."""
        self._asked: list[Worker] = []
        """Workers that the forking parent is about to fork."""
        self._pulse = Pulse()
        self._look_at: float | None = None
        """When to look next whether workers are frozen."""
        self._terminal: int | None = None
        self._terminal_end = -1
        self._paused = False
        self._held = False
        """Whether the job loop has more output than it can show."""
        self._finished = False

    def run(self) -> None:
        """Serve until told to finish; whatever happens, nothing survives this method."""
        kernel.adopt_orphans()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # The terminal's and the system's signals are the job loop's to interpret.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda _number, _frame: None)
        self._selector.register(wake_read, selectors.EVENT_READ, self._on_signal)
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_channel)
        if self._parent is not None:
            self._watch_parent(self._parent)
        try:
            while not self._is_over():
                self._turn()
        finally:
            self._kill_everything()
            signal.set_wakeup_fd(-1)
            os.close(wake_read)
            os.close(wake_write)
        for descriptor, (each, stream) in self._streams.items():
            self._drain(descriptor, each, stream)
        self._goodbye()

    def _is_over(self) -> bool:
        """Whether everything below this process is to end."""
        return self._finished or self._channel.closed

    def _turn(self) -> None:
        self._selector.modify(
            self._channel,
            selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.unsent else 0),
            self._on_channel,
        )
        self._pause_or_resume()
        times = [each for each in (self._kill_at, self._look_at) if each is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj in self._selector.get_map():
                key.data(key.fd)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._kill_everything()
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + PULSE
            self._look_for_frozen()

    def _look_for_frozen(self) -> None:
        running = {each.rank: each.pid for each in self._workers.values() if _runs(each)}
        for rank, state, seconds in self._pulse.look(running, time.monotonic()):
            self._channel.send("frozen", rank=rank, state=state, seconds=seconds)

    def _pause_or_resume(self) -> None:
        full = self._held or self._channel.unsent > _UNSENT_LIMIT
        if full == self._paused:
            return
        self._paused = full
        for descriptor in self._streams:
            if full:
                self._selector.unregister(descriptor)
            else:
                self._selector.register(descriptor, selectors.EVENT_READ, self._on_output)

    # ---- messages of the job loop

    def _on_channel(self, _descriptor: int) -> None:
        self._channel.flush()
        for message in self._channel.receive():
            handler = {
                "prepare": self._prepare,
                "start": self._start,
                "spawn": self._spawn,
                "end": self._end,
                "stop": self._stop,
                "stack": self._show_stack,
                "resize": self._resize,
                "hold": self._hold,
                "finish": self._finish,
            }[message.kind]
            handler(message)

    def _prepare(self, message: Message) -> None:
        if not message.fields["stdin"]:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
        if message.fields["environment"] is not None:
            self._parent = early.start_forking_parent(message.fields["environment"])
            self._watch_parent(self._parent)

    def _start(self, message: Message) -> None:
        self._task = message.fields
        if self._replaces:
            self._look_at = time.monotonic() + PULSE
        self._launch([Worker(rank, own) for rank, own in enumerate(self._task["ranks"])])

    def _spawn(self, message: Message) -> None:
        fields = message.fields
        pairs = zip(fields["numbers"], fields["ranks"], strict=True)
        self._launch([Worker(number, own) for number, own in pairs])

    @property
    def _replaces(self) -> bool:
        """Whether workers that end are replaced."""
        return bool(self._task.get("replaces"))

    def _launch(self, workers: list[Worker]) -> None:
        for each in workers:
            each.own = {**self._secrets, **each.own}
        self._workers.update((each.rank, each) for each in workers)
        try:
            for each in workers:
                self._open_streams(each)
        except OSError as error:
            self._cannot_start(error)
            return
        self._waiting += workers
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._asked or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        if not self._task["fork"]:
            self._give_up_parent()
            self._execute_all(batch, "")
            return
        if self._parent is not None and self._parent.environment != self._task["environment"]:
            self._give_up_parent()
            self._refusal = ""
        if self._refusal:
            self._give_up_parent()
            self._execute_all(batch, self._refusal)
            return
        if self._parent is None:
            self._parent = early.start_forking_parent(self._task["environment"])
            self._watch_parent(self._parent)
        self._asked = batch
        self._ask_parent(self._parent, batch)

    def _end(self, message: Message) -> None:
        each = self._workers[message.fields["rank"]]
        each.unwanted = True
        self._send_signal(each, signal.SIGKILL)

    def _stop(self, message: Message) -> None:
        number = message.fields["number"]
        if any(not each.pid for each in self._workers.values()):
            # They are only now being started: none of them shall begin.
            self._waiting = []
            self._kill_everything()
            for each in self._workers.values():
                if each.code is None:
                    self._has_ended(each, -number)
            return
        for each in self._workers.values():
            self._send_signal(each, number)
        self._kill_at = time.monotonic() + message.fields["within"]

    def _show_stack(self, message: Message) -> None:
        """Python prints all stacks and dies on SIGABRT, since PYTHONFAULTHANDLER is set."""
        each = self._workers[message.fields["rank"]]
        if each.pid and each.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                resource.prlimit(each.pid, resource.RLIMIT_CORE, (0, 0))
            self._send_signal(each, signal.SIGABRT)

    def _resize(self, message: Message) -> None:
        if self._terminal is not None:
            _set_size(self._terminal, message.fields)
            # The kernel tells those whose controlling terminal it is, and it is nobody's.
            self._send_signal(self._workers[0], signal.SIGWINCH)

    def _hold(self, message: Message) -> None:
        self._held = message.fields["on"]

    def _finish(self, _message: Message) -> None:
        self._finished = True
        self._give_up_parent()
        left = kernel.descendants(os.getpid())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + _LAST_RESPITE
        while left and time.monotonic() < end:
            time.sleep(0.01)
            self._reap()
            left = kernel.descendants(os.getpid())

    def _send_signal(self, each: Worker, number: int) -> None:
        if not _runs(each):
            return
        with contextlib.suppress(ProcessLookupError):
            if self._task["form"] == "command":
                # A shell passes no signal on to what it waits for.
                os.killpg(each.pid, number)
            else:
                os.kill(each.pid, number)

    # ---- starting

    def _open_streams(self, each: Worker) -> None:
        """Make a worker's streams, and read our ends from now on."""
        first = each.rank == 0
        terminal = self._task["terminal"] if first else {}
        each.ends.append(os.dup(0) if first else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for stream in ("stdout", "stderr", "report"):
            if terminal.get(stream):
                each.ends.append(self._open_terminal(each, stream, terminal))
            else:
                ours, theirs = os.pipe()
                each.ends.append(theirs)
                self._read_from(ours, each, stream)

    def _open_terminal(self, each: Worker, stream: str, size: dict[str, int]) -> int:
        """One pseudo-terminal for rank 0's output, so that it draws as it would on the real one."""
        if self._terminal is None:
            self._terminal, theirs = pty.openpty()
            tty.setraw(theirs)
            _set_size(self._terminal, size)
            os.set_inheritable(self._terminal, False)
            self._read_from(self._terminal, each, stream)
            self._terminal_end = theirs
        return os.dup(self._terminal_end)

    def _read_from(self, descriptor: int, each: Worker, stream: str) -> None:
        os.set_blocking(descriptor, False)
        each.open.add(descriptor)
        self._streams[descriptor] = (each, stream)
        self._selector.register(descriptor, selectors.EVENT_READ, self._on_output)

    def _watch_parent(self, parent: early.ForkingParent) -> None:
        self._selector.register(parent.socket, selectors.EVENT_READ, self._on_parent)

    def _ask_parent(self, parent: early.ForkingParent, batch: list[Worker]) -> None:
        wish = {name: self._task[name] for name in ("form", "argv", "environment")}
        wish["ranks"] = [each.own for each in batch]
        wish["keep"] = self._replaces
        file = os.memfd_create("farandole")
        with open(file, "wb", closefd=False) as memory:
            memory.write(json.dumps(wish).encode("ascii"))
        os.lseek(file, 0, os.SEEK_SET)
        try:
            socket.send_fds(parent.socket, [b"."], [file])
            for each in batch:
                socket.send_fds(parent.socket, [b"."], each.ends)
        except (BrokenPipeError, ConnectionResetError):
            # It has just died or given up: what it says, or its end, is read next.
            return
        finally:
            os.close(file)

    def _on_parent(self, _descriptor: int) -> None:
        assert self._parent is not None
        try:
            answer = self._parent.socket.recv(_CHUNK)
        except ConnectionResetError:
            answer = b""
        said = json.loads(answer) if answer else {"why": "the forking parent died"}
        if not self._asked:
            self._refusal = said["why"]
            self._selector.unregister(self._parent.socket)
            return
        batch, self._asked = self._asked, []
        if "why" in said or not self._replaces:
            self._give_up_parent(kill=False)
        if "why" in said:
            self._refusal = said["why"]
            self._execute_all(batch, said["why"])
        else:
            for each, pid in zip(batch, said["pids"], strict=True):
                self._has_started(each, pid)
            self._channel.send("started", pids=said["pids"], how="forked", why="")
        self._start_waiting()

    def _give_up_parent(self, *, kill: bool = True) -> None:
        if self._parent is None:
            return
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._parent.pid, signal.SIGKILL)
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._parent.socket)
        self._parent.socket.close()
        self._parent = None

    def _execute_all(self, batch: list[Worker], why: str) -> None:
        try:
            for each in batch:
                self._execute(each, self._task["environment"] | each.own)
        except OSError as error:
            self._cannot_start(error)
            return
        pids = [each.pid for each in batch]
        self._channel.send("started", pids=pids, how="executed", why=why)

    def _execute(self, each: Worker, environ: dict[str, str]) -> None:
        argv = list(self._task["argv"])
        if self._task["form"] != "command":
            how = ["-m"] if self._task["form"] == "module" else []
            argv = [sys.executable, *early.interpreter_flags(), *how, *argv]
        environ = {"PYTHONUNBUFFERED": "1", **environ}
        agent = os.getpid()
        failure, error = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                worker.settle(each.ends[:3], agent)
                worker.execute(argv, environ)
            except OSError as reason:
                os.write(error, f"{reason.strerror}: {argv[0]}".encode())
            finally:
                os._exit(127)
        os.close(error)
        text = os.read(failure, _CHUNK).decode("utf-8", "replace")
        os.close(failure)
        if text:
            self._channel.send("unstarted", rank=each.rank, why=text)
        self._has_started(each, pid)

    def _cannot_start(self, error: OSError) -> None:
        """Want of descriptors or processes: the job loop then stops those that have started."""
        first = next(each for each in self._workers.values() if not each.pid)
        self._channel.send("unstarted", rank=first.rank, why=error.strerror)

    def _has_started(self, each: Worker, pid: int) -> None:
        each.pid = pid
        for end in each.ends:
            os.close(end)
        each.ends = []
        if self._terminal is not None and each.rank == 0:
            os.close(self._terminal_end)
        if pid in self._ended_unknown:
            self._has_ended(each, self._ended_unknown.pop(pid))
        elif each.unwanted:
            self._send_signal(each, signal.SIGKILL)

    # ---- watching

    def _on_output(self, descriptor: int) -> None:
        each, stream = self._streams[descriptor]
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""  # a pseudo-terminal without a user
        if chunk:
            self._pass_on(each, stream, chunk)
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._streams[descriptor]
        each.open.discard(descriptor)
        if stream != "report":
            self._channel.send("output", rank=each.rank, stream=stream)
        if descriptor == self._terminal:
            self._terminal = None

    def _pass_on(self, each: Worker, stream: str, chunk: bytes) -> None:
        if stream == "report":
            with contextlib.suppress(ValueError):  # a torn report: the traceback is in its output
                self._channel.send("report", rank=each.rank, **json.loads(chunk))
            return
        self._channel.send("output", chunk, rank=each.rank, stream=stream)

    def _on_signal(self, descriptor: int) -> None:
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(descriptor, _CHUNK)
        if signal.SIGTERM in numbers:
            self._on_told_to_end()
        self._reap()

    def _on_told_to_end(self) -> None:
        """Do nothing: the job loop has been told too, and interprets it."""

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            each = next((w for w in self._workers.values() if w.pid == pid), None)
            if each is not None:
                self._has_ended(each, code)
            elif any(not w.pid for w in self._workers.values()):
                self._ended_unknown[pid] = code

    def _has_ended(self, each: Worker, code: int) -> None:
        each.code = code
        # What it wrote last is told before its end; descendants may keep the pipes open.
        for descriptor in sorted(each.open):
            self._drain(descriptor, each, self._streams[descriptor][1])
        self._channel.send("exited", rank=each.rank, code=code)
        if self._replaces:
            self._clear_after(each)

    def _clear_after(self, each: Worker) -> None:
        """End what a worker that has ended leaves behind: the processes of its session."""
        left = set()
        for pid in kernel.descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == each.pid:
                    os.kill(pid, signal.SIGKILL)
                    left.add(pid)
        leftovers.remove_shared_memory({each.pid, *left})

    def _drain(self, descriptor: int, each: Worker, stream: str) -> None:
        left = _LAST_WORDS
        with contextlib.suppress(OSError):  # nothing there, or a pseudo-terminal without a user
            while left > 0 and (chunk := os.read(descriptor, _CHUNK)):
                self._pass_on(each, stream, chunk)
                left -= len(chunk)

    # ---- ending

    def _kill_everything(self) -> None:
        """SIGKILL all descendants until there are none, then remove what they could not."""
        self._give_up_parent()
        killed = leftovers.kill_all(os.getpid(), self._reap)
        leftovers.remove_shared_memory(killed | {w.pid for w in self._workers.values()})

    def _goodbye(self) -> None:
        self._channel.send("gone")
        end = time.monotonic() + _LAST_RESPITE
        while self._channel.unsent and not self._channel.closed and time.monotonic() < end:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._channel, selectors.EVENT_WRITE)
                waiting.select(0.1)
            self._channel.flush()


def _runs(each: Worker) -> bool:
    return bool(each.pid) and each.code is None


def _set_size(terminal: int, size: dict[str, int]) -> None:
    packed = struct.pack("HHHH", size["rows"], size["columns"], 0, 0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)
