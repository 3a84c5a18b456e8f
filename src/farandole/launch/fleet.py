"""The agents of several hosts, as one: the job loop talks to a fleet as it does to one agent.

Ranks in messages are the job's; each agent counts its own from 0, and the fleet translates.
Nothing is started before every host is ready, so a host that cannot be used costs nothing but the
error that names it. Beside the messages of :mod:`farandole.launch.agent` the job loop gets ``lost``
(rank, why) when a host is gone.

=====================  =======================================================================
an agent               how it is reached
=====================  =======================================================================
of this host           forked before anything else was imported (:mod:`farandole.launch.early`)
of another one         started over ssh; connects to the fleet's own server, with a secret of
                       the fleet's that ssh has carried. The end of its ssh is its end
=====================  =======================================================================

One thread, the job loop's; what the server's thread has to say waits in a queue for it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from farandole.core import config, route, topology
from farandole.core.address import Address
from farandole.core.errors import FarandoleError, SetupError, describe_ranks
from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.launch import early, environment, host, link, remote, ssh
from farandole.launch.channel import Channel, Message
from farandole.launch.hosts import Share
from farandole.launch.task import Task

SSH_PORT = 22
"""Where ssh listens, to find the way to a host by."""

_UNREAD_LIMIT = 4 << 20
"""Bytes of messages that may wait for the job loop before the workers' output waits."""

_LAST_WORDS = 0.5
"""Seconds from the end of an agent's ssh for what it had sent before."""

_FAREWELL = 2.0
"""Seconds from the end of an agent's connection to that of its ssh, which knows the reason."""

_FINISH_LIMIT = 8.0
"""Seconds for the agents to end everything."""


@dataclass(eq=False)
class Member:
    """One host and its agent."""

    share: Share
    own: str
    """The address of this machine that the host reaches."""
    channel: Channel | None = None
    """To its agent, where that is on this machine."""
    login: ssh.Login | None = None
    """What runs its agent, where that is on another one."""
    peer: Peer | None = None
    """Its agent's connection to the fleet's server."""
    master: tuple[str, int] | None = None
    """An address of the host and a port reserved there, once it is ready."""
    running: set[int] = field(default_factory=set)
    """Ranks of the job that have not ended."""
    gone: bool = False

    def send(self, kind: str, **fields: Any) -> None:
        """Send its agent a message, if that is there."""
        if self.channel is not None:
            self.channel.send(kind, **fields)
        elif self.peer is not None:
            self.peer.send(link.pack(kind, b"", fields))


class Fleet:
    """All agents of ``task``; ``local`` is that of this machine. To be used as a ``Channel``."""

    _local: Member | None

    def __init__(self, task: Task, local: early.Agent) -> None:
        self._task = task
        self._members = _members(task)
        self._open(_common([member.own for member in self._members]))
        here = next((each for each in self._members if route.is_own(each.share.host)), None)
        if here is None:
            local.socket.close()  # which ends it
        else:
            here.channel = Channel(local.socket)
        self._local = here

    def _open(self, listen: str, secret: Secret | None = None, port: int = 0) -> None:
        """Begin to listen, with no agent yet."""
        self.listen = listen
        """The address of this machine for a server that all hosts reach."""
        self._local = None
        self._secret = secret or Secret.new()
        self._by_peer: dict[Peer, Member] = {}
        self._start: dict[str, Any] | None = None
        """What the ranks are to be, while hosts get ready for them."""
        self._started: list[tuple[Member, dict[str, Any]]] = []
        self._messages: list[Message] = []
        """For the job loop."""
        self._master = socket.socket(socket.AF_INET6 if ":" in self.listen else socket.AF_INET)
        self._selector = selectors.EpollSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()  # for the two below
        self._calls: list[Callable[[], None]] = []
        """For this thread, from the server's."""
        self._unread: dict[Peer, int] = {}
        """Bytes of messages among the calls."""
        self._server = Server(self._secret, self, host=self.listen, port=port)
        self.closed = False

    # ---- as a channel

    def fileno(self) -> int:
        """Readable when there is something to :meth:`receive`."""
        return self._selector.fileno()

    @property
    def unsent(self) -> int:
        """Nothing that the job loop would have to see to."""
        return 0

    def flush(self) -> None:
        """Do nothing: what is to be sent is sent by itself."""

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message to the agents whom it concerns."""
        if kind == "start":
            self._begin(fields)
        elif kind == "stack":
            member = next(m for m in self._members if fields["rank"] in m.share.ranks)
            member.send("stack", rank=fields["rank"] - member.share.ranks.start)
        elif kind == "stop" and self._start is not None:
            self._call_off(fields["number"])
        else:
            for member in self._members:
                member.send(kind, **fields)
            if kind == "finish":
                self._dismiss()
        self._watch_local()

    def receive(self) -> list[Message]:
        """What has arrived. Raises ``SetupError`` when a host cannot be used: nothing has begun."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._wake_read:
                self._take_calls()
            elif isinstance(key.fileobj, ssh.Login):
                self._listen_to(key.fileobj)
            else:
                self._serve_local()
        self._watch_local()
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        """Give everything back. An agent that still runs ends what it has started, and itself."""
        self.closed = True
        self._server.close()
        for member in self._members:
            if member.channel is not None:
                member.channel.close()
            if member.login is not None:
                member.login.close()
        self._selector.close()
        for each in (self._wake_read, self._wake_write, self._master):
            each.close()

    # ---- getting ready

    def _begin(self, start: dict[str, Any]) -> None:
        self._start = start
        for index, member in enumerate(self._members):
            member.running = set(member.share.ranks)
            if member is self._local:
                self._prepare_local(member)
            else:
                self._log_in(index, member, start)
        self._later(self._task.start_timeout, self._on_late)

    def _prepare_local(self, member: Member) -> None:
        assert member.channel is not None
        self._selector.register(member.channel, selectors.EVENT_READ)
        self._master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound and not listening: nobody else is given this port, and rank 0 can listen on it.
        self._master.bind((member.own, 0))
        member.master = self._master.getsockname()[:2]
        member.send(
            "prepare",
            stdin=member.share.ranks.start == 0,
            environment=self._shared(member) if self._task.fork else None,
        )

    def _log_in(self, index: int, member: Member, start: Mapping[str, Any]) -> None:
        wish = remote.wish_for(index, config.environment(), self._task.environment) | {
            "address": str(Address(member.own, self._server.address.port)),
            "secret": self._secret.hex(),
            "limit": self._task.start_timeout,
            "task": {
                **{name: start[name] for name in ("form", "argv", "fork")},
                "ranks": self._own(member, start),
                "terminal": {},
            },
        }
        member.login = ssh.Login(
            self._task.ssh,
            member.share.host,
            self._task.remote_python,
            wish,
            self._task.start_timeout,
        )
        self._selector.register(member.login, selectors.EVENT_READ)

    def _own(self, member: Member, start: Mapping[str, Any]) -> list[dict[str, str]]:
        """What the ranks of a host have of their own."""
        hosts = [each.share.host for each in self._members for _ in each.share.ranks]
        variables = []
        for rank in member.share.ranks:
            own: dict[str, str] = start["ranks"][rank]
            port = Address.parse(own["FARANDOLE_STORE"]).port
            seat = environment.seat(topology.topology_of(rank, hosts))
            store = str(Address(member.own, port))
            variables.append({**own, **seat, "FARANDOLE_STORE": store})
        return variables

    def _shared(self, member: Member) -> dict[str, str]:
        return environment.shared(
            config.environment(),
            self._task.environment,
            local_size=len(member.share.ranks),
            cores=host.usable_cores(),
        )

    def _go(self, start: Mapping[str, Any]) -> None:
        """Every host is ready: have the ranks started."""
        self._start = None
        assert self._members[0].master is not None
        address, port = self._members[0].master
        master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for member in self._members:
            if member.channel is None:
                self._start_elsewhere(member, start, master)
                continue
            first = member.share.ranks.start == 0
            member.send(
                "start",
                **{name: start[name] for name in ("form", "argv", "fork")},
                environment=self._shared(member),
                ranks=[{**own, **master} for own in self._own(member, start)],
                terminal=start["terminal"] if first else {},
            )

    def _start_elsewhere(
        self, member: Member, start: Mapping[str, Any], master: Mapping[str, str]
    ) -> None:
        """An agent that is fetched has had all the rest with its wish."""
        member.send("start", master=master)

    def _call_off(self, number: int) -> None:
        """The user's signal came before anything was started."""
        self._start = None
        for member in self._members:
            self._end_ranks(member, "exited", code=-number)

    def _on_late(self) -> None:
        late = [member for member in self._members if member.master is None]
        if self._start is None or not late:
            return
        words = [line for each in late if each.login for line in each.login.words()[-1:]]
        raise SetupError(
            f"{', '.join(each.share.host for each in late)} did not get ready within "
            f"{self._task.start_timeout:g} s (--start-timeout). Nothing was started. "
            + (f"The last that came from there: {'; '.join(words)}" if words else
               f"ssh is connected or still tries to be; agents are to connect to port "
               f"{self._server.address.port} of {late[0].own}. Does a firewall drop that?")
        )  # fmt: skip

    # ---- the server's thread

    def on_message(self, peer: Peer, message: bytes) -> None:
        """See ``core.server.Handler``."""
        self._post(lambda: self._on_frame(peer, message))
        with self._lock:
            before = self._unread.get(peer, 0)
            self._unread[peer] = before + len(message)
        if before <= _UNREAD_LIMIT < before + len(message):
            peer.send(link.pack("hold", b"", {"on": True}))

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        """See ``core.server.Handler``."""
        self._later(_FAREWELL, lambda: self._on_left(peer))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Have the job loop's thread call, after so many seconds. Any thread."""
        self._server.call_later(seconds, lambda: self._post(call))

    def _post(self, call: Callable[[], None]) -> None:
        """Have the job loop's thread call, in the order of these calls. Any thread."""
        with self._lock:
            self._calls.append(call)
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody needs it
            self._wake_write.send(b"\0")

    # ---- this thread again

    def _take_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        with self._lock:
            calls, self._calls = self._calls, []
            unread, self._unread = self._unread, {}
        for call in calls:
            call()
        for peer, size in unread.items():
            if size > _UNREAD_LIMIT:
                peer.send(link.pack("hold", b"", {"on": False}))

    def _on_frame(self, peer: Peer, frame: bytes) -> None:
        message = link.unpack(frame)
        if message.kind == "ready":
            self._on_ready(peer, **message.fields)
        elif peer in self._by_peer:
            self._translate(self._by_peer[peer], message)

    def _on_ready(self, peer: Peer, index: int, address: str, port: int) -> None:
        member = self._members[index]
        if self._start is None or member.peer is not None:
            peer.close()
            return
        self._by_peer[peer] = member
        member.peer = peer
        member.master = address, port
        if all(each.master is not None for each in self._members):
            self._go(self._start)

    def _on_left(self, peer: Peer) -> None:
        if peer in self._by_peer:
            self._lose(self._by_peer[peer], "the connection to its agent ended")

    def _listen_to(self, login: ssh.Login) -> None:
        login.read()
        if not login.ended:
            return
        self._selector.unregister(login)
        member = next(each for each in self._members if each.login is login)
        if self._start is not None:
            raise SetupError(f"{login.why_not_started()} Nothing was started.")
        self._later(_LAST_WORDS, lambda: self._lose(member, login.why_lost()))

    def _serve_local(self) -> None:
        assert self._local is not None
        assert self._local.channel is not None
        self._local.channel.flush()
        for message in self._local.channel.receive():
            self._translate(self._local, message)
        if self._local.channel.closed:
            self._selector.unregister(self._local.channel)
            self._lose(self._local, "its agent ended")

    def _watch_local(self) -> None:
        channel = self._local.channel if self._local is not None else None
        if channel is not None and channel in self._selector.get_map():
            writing = selectors.EVENT_WRITE if channel.unsent else 0
            self._selector.modify(channel, selectors.EVENT_READ | writing)

    def _translate(self, member: Member, message: Message) -> None:
        fields = message.fields
        if message.kind == "started":
            self._on_started(member, fields)
        elif message.kind == "gone":
            self._has_gone(member)
        else:
            fields["rank"] += member.share.ranks.start
            if message.kind == "exited":
                member.running.discard(fields["rank"])
            self._messages.append(message)

    def _on_started(self, member: Member, fields: dict[str, Any]) -> None:
        self._started.append((member, fields))
        if len(self._started) < len(self._members):
            return
        self._started.sort(key=lambda each: each[0].share.ranks.start)
        how = {each["how"] for _, each in self._started}
        why = [f"{m.share.host}: {each['why']}" for m, each in self._started if each["why"]]
        pids = [pid for _, each in self._started for pid in each["pids"]]
        merged = {"pids": pids, "how": " and ".join(sorted(how)), "why": "; ".join(why)}
        self._messages.append(Message("started", merged, b""))

    # ---- ending

    def _dismiss(self) -> None:
        """The job is over: do without those that are not there yet."""
        for member in self._members:
            if member.channel is None and member.peer is None:
                self._has_gone(member)

        def lose_the_rest() -> None:
            for member in self._members:
                self._lose(member, "it did not confirm the end of the job")

        self._later(_FINISH_LIMIT, lose_the_rest)

    def _lose(self, member: Member, why: str) -> None:
        if member.gone:
            return
        where, ranks = member.share.host, describe_ranks(member.share.ranks)
        if self._start is not None:
            raise SetupError(f"{where} was lost while it got ready: {why}. Nothing was started.")
        self._end_ranks(member, "lost", why=f"was lost with {where} (that is, {ranks}): {why}")
        if member.peer is not None:
            member.peer.close()
        self._has_gone(member)

    def _end_ranks(self, member: Member, kind: str, **fields: Any) -> None:
        for rank in sorted(member.running):
            self._messages.append(Message(kind, {"rank": rank, **fields}, b""))
        member.running.clear()

    def _has_gone(self, member: Member) -> None:
        if not member.gone:
            member.gone = True
            if all(each.gone for each in self._members):
                self._messages.append(Message("gone", {}, b""))


def _members(task: Task) -> list[Member]:
    """The hosts of a task, and from where each of them is reached."""
    settings = config.Settings.from_environment({**config.environment(), **task.environment})
    own: dict[str, str] = {}
    for share in task.hosts:
        if route.is_own(share.host):
            continue
        name = ssh.real_name(task.ssh, share.host)
        try:
            own[share.host] = route.own_address(Address(name, SSH_PORT), settings.network_interface)
        except OSError as error:
            raise SetupError(
                f"{share.host} cannot be reached: {name}: {error.strerror}. Nothing was started."
            ) from None
    towards_any = next(iter(own.values()))
    return [Member(share, own.get(share.host, towards_any)) for share in task.hosts]


def _common(addresses: Iterable[str]) -> str:
    """An address to listen at for those who come to any of ``addresses`` of this machine."""
    different = set(addresses)
    if len(different) == 1:
        return different.pop()
    return "::" if any(":" in address for address in different) else "0.0.0.0"
