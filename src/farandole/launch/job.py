"""The job loop: starts the agent's workers, shows what they say, ends all when one fails.

The loop owns the store where the ranks meet, the output and the meaning of signals; when a job has
failed is decided in :mod:`farandole.launch.verdict`. It is one thread that waits for events; the
store's server has a thread of its own.

=====================  =======================================================================
what happens           what follows
=====================  =======================================================================
a host is gone         as for the failure of its ranks (:mod:`farandole.launch.fleet`)
a rank fails           SIGTERM to the others, SIGKILL after :data:`RESPITE`; exit code of the rank
Ctrl-C, SIGTERM        passed on; SIGKILL after ``grace``; exit code 130 or 143
a second signal, or    SIGKILL now
one after a failure
no ``init()`` in time  the stack of the rank that is missing, then as for a failure
the output is closed   as for SIGTERM; exit code 141
=====================  =======================================================================
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from farandole.core.config import environment as current_environment
from farandole.core.errors import FarandoleBug, UsageError, describe_ranks
from farandole.core.secret import Secret
from farandole.core.store import LocalStore, StoreServer
from farandole.launch import early, environment, failure, host, kernel, leftovers, reports
from farandole.launch.channel import Channel, Message
from farandole.launch.screen import STREAMS, Screen, Surface
from farandole.launch.sink import Sink
from farandole.launch.task import Task
from farandole.launch.verdict import ShowStack, Stop, Verdict

if TYPE_CHECKING:
    from farandole.launch.fleet import Fleet

RESPITE = 2.0
"""Seconds that the other ranks get after a failure."""

_AGENT_LIMIT = 10.0
"""Seconds for the agent to end everything."""

_UNWRITTEN_LIMIT = 4 << 20
"""Bytes that may wait to be written before the workers' output waits."""

_ENDING = frozenset([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
"""The signals by which users end a job."""


def run(task: Task, agent: early.Agent, store: LocalStore | None = None) -> int:
    """Run the task to its end and return the exit code of the launcher.

    ``store`` is lent to the ranks (``None``: a new one): it holds what they are to find and, in
    the end, what they have left.
    """
    job = _kind_for(task)(task, agent, LocalStore() if store is None else store)
    try:
        return job.run()
    finally:
        job.close()


class Job:
    """One run. See the module."""

    def __init__(self, task: Task, agent: early.Agent, store: LocalStore) -> None:
        self._task = task
        self._agent = agent
        self._initial = task.size if task.elastic is None else 0
        """How many ranks there are from the beginning; the others are announced one by one."""
        self._verdict = Verdict(self._initial, task.start_timeout)
        self._arrived: deque[int] = deque()
        """Ranks that have called ``init()``, told by the store's thread."""
        self._logs: list[IO[bytes]] = []
        self._sinks = {"stdout": Sink(1), "stderr": Sink(2)}
        self._screen = Screen(self._initial, _surface())
        self._selector = selectors.PollSelector()
        self._signal: int | None = None
        """The user's signal."""
        self._gone = False
        self._memory_kills = host.out_of_memory_kills()
        self._secret = task.meeting.secret if task.meeting else Secret.new()
        self._store = store
        self._channel, reachable_at = _reach(task, agent)
        port = task.meeting.port + 1 if task.meeting else 0
        self._server = StoreServer(self._secret, reachable_at, port, self._store)
        self._master = socket.socket()
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> int:
        """See :func:`run`."""
        kernel.adopt_orphans()
        self._listen()
        self._open_logs()
        self._start()
        while not self._is_over() and not self._channel.closed:
            self._turn()
        self._end_agent()
        self._write(self._screen.finish(self._now()))
        self._flush()
        if not self._gone:
            raise FarandoleBug(
                "The agent that watches the workers did not see to their end; they were killed."
            )
        return self._conclude()

    def close(self) -> None:
        """Give everything back; nothing that was started is left."""
        self._channel.close()
        if self._gone:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._agent.pid, 0)
        leftovers.kill_all(os.getpid(), _reap)
        self._server.close()
        self._master.close()
        signal.set_wakeup_fd(-1)
        for log in self._logs:
            log.close()

    def _is_over(self) -> bool:
        """Whether every rank has ended."""
        return self._verdict.over

    # ---- set-up

    def _listen(self) -> None:
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*_ENDING, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda _number, _frame: None)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for rank in range(self._initial):
            self._store.watch(f"init/{rank}", self._on_init(rank))

    def _on_init(self, rank: int) -> Callable[[bytes | None], None]:
        def on_init(value: bytes | None) -> None:
            """In the server's thread: leave word and wake the loop."""
            if value is not None:
                self._arrived.append(rank)
                self._wake()

        return on_init

    def _wake(self) -> None:
        """Have the loop turn. Any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _open_logs(self) -> None:
        for rank in range(self._initial):
            self._open_log(rank)

    def _open_log(self, rank: int) -> None:
        if self._task.output_dir is None:
            return
        width = len(str(self._task.size - 1))
        path = os.path.join(self._task.output_dir, f"rank-{rank:0{width}d}.log")
        try:
            os.makedirs(self._task.output_dir, exist_ok=True)
            self._logs.append(open(path, "wb", buffering=0))  # noqa: SIM115 - see close()
        except OSError as error:
            raise UsageError(
                f"--output-dir {self._task.output_dir}: {error.strerror}. Name a folder that can "
                "be written to."
            ) from None

    def _start(self) -> None:
        self._master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound and not listening: nobody else is given this port, and rank 0 can listen on it.
        self._master.bind(("127.0.0.1", 0))
        shared = environment.shared(
            current_environment(),
            self._task.environment,
            local_size=self._task.size,
            cores=host.usable_cores(),
        )
        self._channel.send(
            "start",
            form=self._task.program.form,
            argv=list(self._task.program.argv),
            environment=shared,
            ranks=[self._own(rank, self._task.size) for rank in range(self._initial)],
            fork=self._task.fork,
            replaces=self._task.elastic is not None,
            terminal={stream: os.isatty(n + 1) for n, stream in enumerate(STREAMS)}
            | self._size_for_rank_0(),
        )

    def _own(self, rank: int, size: int) -> dict[str, str]:
        """What a rank has of its own in its environment."""
        return environment.own(
            rank,
            size,
            store=str(self._server.address),
            secret=self._secret.hex(),
            # The loop is to speak first, since it can show the stack of who is missing.
            start_timeout=self._task.start_timeout + 10.0,
            master=self._master.getsockname(),
        )

    def _size_for_rank_0(self) -> dict[str, int]:
        """The terminal, without the columns that the prefix takes."""
        rows, columns = _terminal_size()
        prefix = len("[0] ") if self._task.size > 1 else 0
        return {"rows": rows, "columns": max(1, columns - prefix)}

    # ---- the loop

    def _turn(self) -> None:
        self._watch_descriptors()
        self._selector.select(self._patience())
        for sink in self._sinks.values():
            sink.flush()
        self._channel.flush()
        messages = self._channel.receive() if self._unwritten() < _UNWRITTEN_LIMIT else []
        # First, since a rank whose end is among the messages may have called init() before.
        self._on_wake()
        for message in messages:
            self._on_message(message)
        self._act()
        self._write(self._screen.due(self._now()))
        if any(sink.broken for sink in self._sinks.values()) and not self._is_ending:
            self._on_user_signal(signal.SIGPIPE)

    def _watch_descriptors(self) -> None:
        """Wait for the agent, unless too much is unwritten, and for output that is held up."""
        reading = selectors.EVENT_READ if self._unwritten() < _UNWRITTEN_LIMIT else 0
        writing = selectors.EVENT_WRITE if self._channel.unsent else 0
        self._wait_for(self._channel, reading | writing)
        for sink in self._sinks.values():
            self._wait_for(sink, selectors.EVENT_WRITE if sink.pending else 0)

    def _wait_for(self, what: Channel | Fleet | Sink, events: int) -> None:
        known = what in self._selector.get_map()
        if known and not events:
            self._selector.unregister(what)
        elif known:
            self._selector.modify(what, events)
        elif events:
            self._selector.register(what, events)

    def _patience(self) -> float | None:
        times = [self._screen.next_due(), self._verdict.next_due()]
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - self._now()) if known else None

    def _unwritten(self) -> int:
        return sum(sink.pending for sink in self._sinks.values())

    def _write(self, pieces: list[tuple[str, bytes]]) -> None:
        for stream, data in pieces:
            self._sinks[stream].write(data)

    def _say(self, text: str) -> None:
        self._sinks["stderr"].write((text + "\n").encode("utf-8", "surrogateescape"))

    def _flush(self) -> None:
        for sink in self._sinks.values():
            while sink.pending and not sink.broken and not self._impatient():
                sink.flush(timeout=0.5)

    def _impatient(self) -> bool:
        """Whether the user wants the launcher to end although not all has been read."""
        with contextlib.suppress(BlockingIOError):
            return bool(set(os.read(self._wake_read, 4096)) & _ENDING)
        return False

    def _now(self) -> float:
        return time.monotonic()

    # ---- events

    def _on_wake(self) -> None:
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._wake_read, 4096)
        for number in numbers:
            if number == signal.SIGWINCH:
                self._screen.resize(_terminal_size()[1])
                self._channel.send("resize", **self._size_for_rank_0())
            elif number in _ENDING:
                self._on_user_signal(number)
        while self._arrived:
            self._verdict.on_init(self._arrived.popleft(), self._now())

    @property
    def _is_ending(self) -> bool:
        return self._signal is not None or self._verdict.cause is not None

    def _on_user_signal(self, number: int) -> None:
        hurry = self._is_ending
        self._verdict.stop()
        if hurry:
            self._channel.send("stop", number=int(signal.SIGKILL), within=0.0)
            return
        self._signal = number
        passed_on = signal.SIGTERM if number == signal.SIGPIPE else number
        self._channel.send("stop", number=int(passed_on), within=self._task.grace)

    def _on_message(self, message: Message) -> None:
        fields = message.fields
        rank = fields.pop("rank", -1)
        if message.kind == "output":
            self._on_output(rank, fields["stream"], message.payload)
        elif message.kind in ("exited", "report", "unstarted", "lost", "frozen"):
            self._on_fate(rank, message.kind, fields)
        elif message.kind == "started":
            self._on_started(fields)
        elif message.kind == "said":
            self._say(f"farandole: {fields['text']}")
        elif message.kind == "gone":
            self._gone = True

    def _on_fate(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Something became of a rank."""
        if kind == "exited":
            self._verdict.on_exit(rank, fields["code"], self._now())
        elif kind == "report":
            self._verdict.on_report(rank, fields, self._now())
        elif kind == "unstarted":
            self._verdict.on_unstarted(rank, fields["why"], self._now())
        elif kind == "lost":
            self._verdict.on_lost(rank, fields["why"], self._now())

    def _on_started(self, fields: dict[str, Any]) -> None:
        if self._task.verbose:
            why = f" ({fields['why']})" if fields["why"] else ""
            pids = ", ".join(map(str, fields["pids"]))
            self._say(f"farandole: {len(fields['pids'])} ranks {fields['how']}{why}: pids {pids}")

    def _on_output(self, rank: int, stream: str, chunk: bytes) -> None:
        if chunk and self._logs:
            self._log(rank, chunk)
        if stream == "stderr" or (rank == 0 and os.isatty(1)):
            # On a terminal, rank 0's two streams come as one.
            self._verdict.ranks[rank].remember(chunk)
        self._write(self._screen.feed(rank, stream, chunk, self._now()))

    def _log(self, rank: int, chunk: bytes) -> None:
        try:
            self._logs[rank].write(chunk)
        except OSError as error:
            while self._logs:
                self._logs.pop().close()
            self._say(
                f"farandole: {self._task.output_dir} has become unwritable ({error.strerror}): the "
                "job goes on, but what ranks print from now on is shown here only."
            )

    def _act(self) -> None:
        action = self._verdict.due(self._now())
        if isinstance(action, Stop):
            self._channel.send("stop", number=int(signal.SIGTERM), within=RESPITE)
        elif isinstance(action, ShowStack):
            self._channel.send("stack", rank=action.rank)

    # ---- the end

    def _end_agent(self) -> None:
        """Let the agent end what workers have left behind, and show what that still says."""
        self._channel.send("finish", well=not self._is_ending)
        end = self._now() + _AGENT_LIMIT
        while not (self._gone or self._channel.closed) and self._now() < end:
            self._watch_descriptors()
            self._selector.select(0.5)
            self._on_wake()
            self._channel.flush()
            for message in self._channel.receive():
                self._on_message(message)
            for sink in self._sinks.values():
                sink.flush()

    def _conclude(self) -> int:
        """Say how it ended; returns the exit code."""
        if self._signal is not None:
            return self._after_signal(self._signal)
        cause = self._verdict.cause
        if cause is None:
            table = reports.table(self._store, self._task.size)
            if table:
                self._sinks["stdout"].write((table + "\n").encode())
                self._flush()
            return 0
        new_kills = host.out_of_memory_kills() - self._memory_kills
        fates = self._verdict.fates()
        self._say(failure.describe(cause, fates, killed_for_memory=new_kills, named=self._named))
        self._flush()
        return cause.exit_code

    def _named(self, ranks: Sequence[int]) -> str:
        """What ranks are called."""
        return describe_ranks(ranks)

    def _after_signal(self, number: int) -> int:
        broken = self._sinks["stdout"].broken
        if number == signal.SIGPIPE:
            if broken is not None and broken.errno != errno.EPIPE:
                self._say(f"farandole: standard output cannot be written to: {broken.strerror}.")
        else:
            name = signal.Signals(number).name
            ranks = self._verdict.ranks
            killed = [rank.number for rank in ranks if rank.code == -signal.SIGKILL]
            how = f"; {self._named(killed)} had to be killed" if killed else ""
            self._say(f"farandole: ended by {name}{how}.")
        self._flush()
        return 128 + number


def _kind_for(task: Task) -> type[Job]:
    if task.meeting is not None and task.elastic is not None:
        from farandole.launch.elastic_pod_job import ElasticPodJob

        return ElasticPodJob
    if task.meeting is not None:
        from farandole.launch.pod_job import PodJob

        return PodJob
    if task.elastic is None:
        return Job
    from farandole.launch.elastic import ElasticJob

    return ElasticJob


def _reach(task: Task, agent: early.Agent) -> tuple[Channel | Fleet, str]:
    """How to talk to the task's agents, and an address of this machine that their ranks reach."""
    if task.meeting is not None:
        from farandole.launch.arrivals import Arrivals
        from farandole.launch.elastic_arrivals import ElasticArrivals

        pods = Arrivals(task, agent) if task.elastic is None else ElasticArrivals(task, agent)
        return pods, pods.listen
    if task.elastic is not None and task.elastic.elsewhere:
        from farandole.launch.elastic_fleet import ElasticFleet

        guests = ElasticFleet(task, agent)
        return guests, guests.listen
    if not task.hosts:
        return Channel(agent.socket), "127.0.0.1"
    from farandole.launch.fleet import Fleet

    fleet = Fleet(task, agent)
    return fleet, fleet.listen


def _surface() -> Surface:
    terminal = {stream: os.isatty(n + 1) for n, stream in enumerate(STREAMS)}
    variables = current_environment()
    plain = bool(variables.get("NO_COLOR")) or variables.get("TERM") == "dumb"
    return Surface(
        terminal, colour=all(terminal.values()) and not plain, columns=_terminal_size()[1]
    )


def _terminal_size() -> tuple[int, int]:
    """Rows and columns of the terminal behind standard error or output."""
    for stream in (sys.__stderr__, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                size = os.get_terminal_size(stream.fileno())
                return size.lines, size.columns
    return 24, 80


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
