"""The agents of hosts that come and go, as one: hosts join the fleet when they are needed.

Ranks of messages are the numbers of processes, the same for the job loop and for every agent, so
nothing is translated. A host is logged in to when the first worker is to run there, and again when
it was lost in between. What goes wrong with a host is told as the loss of the workers that were to
run there; the job goes on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from farandole.core import config, route
from farandole.core.address import Address
from farandole.core.errors import FarandoleError, SetupError
from farandole.core.server import Peer
from farandole.launch import early, environment, remote, ssh
from farandole.launch.channel import Channel, Message
from farandole.launch.fleet import SSH_PORT, Fleet, Member
from farandole.launch.hosts import Share
from farandole.launch.task import Task

_EVERYWHERE = "0.0.0.0"
"""Which hosts will come, and by which interface, is not known when the server begins to listen."""


@dataclass(eq=False)
class Guest(Member):
    """One host and its agent, and what waits until that is ready."""

    ready: bool = False
    waiting: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Numbers and variables of workers that are to be started there."""


class ElasticFleet(Fleet):
    """See the module. To be used as a ``Channel``."""

    def __init__(self, task: Task, local: early.Agent) -> None:
        self._task = task
        self._members: list[Member] = []
        self._guests: dict[str, Guest] = {}
        """The hosts of now, by name."""
        self._numbers: dict[int, Guest] = {}
        self._agent = local
        self._wish: dict[str, Any] = {}
        """The message that starts an agent's work."""
        self._secrets: dict[str, str] = {}
        """Variables that agents elsewhere know: they do not travel by the link, which hides
        nothing."""
        self._finishing = False
        self._open(_EVERYWHERE)

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message to the agents whom it concerns."""
        if kind == "start":
            self._wish = fields
        elif kind == "spawn":
            for number, own in zip(fields["numbers"], fields["ranks"], strict=True):
                self._spawn(number, own)
        elif kind in ("end", "stack"):
            guest = self._numbers.get(fields["rank"])
            if guest is not None:  # what could not be started needs no end
                guest.send(kind, **fields)
        else:
            for member in self._members:
                member.send(kind, **fields)
            if kind == "finish":
                self._finishing = True
                if self._local is None:
                    self._agent.socket.close()  # which ends it
                self._dismiss()
                self._tell_if_all_gone()
        self._watch_local()

    # ---- hosts

    def _spawn(self, number: int, own: dict[str, str]) -> None:
        host = own["HOROVOD_HOSTNAME"]
        self._secrets = {environment.SECRET: own[environment.SECRET]}
        try:
            guest = self._guest(host, int(own["FARANDOLE_LOCAL_SIZE"]))
        except FarandoleError as error:
            fields = {"rank": number, "why": f"could not be started: {error.message}"}
            self._messages.append(Message("lost", fields, b""))
            self._post(lambda: None)  # there is something to receive
            return
        self._numbers[number] = guest
        guest.running.add(number)
        guest.waiting.append((number, own))
        self._hand_over(guest)

    def _guest(self, host: str, slots: int) -> Guest:
        """The host, which is logged in to if it is new."""
        known = self._guests.get(host)
        if known is not None:
            return known
        guest = self._host_here(host) if route.is_own(host) else self._log_in_to(host, slots)
        self._guests[host] = guest
        return guest

    def _host_here(self, host: str) -> Guest:
        if isinstance(self._local, Guest):
            return self._local  # by another name
        guest = Guest(
            Share(host, range(0)), self._own_for_others(), channel=Channel(self._agent.socket)
        )
        assert guest.channel is not None
        self._local = guest
        self._members.append(guest)
        self._selector.register(guest.channel, 1)
        guest.send("start", **self._wish)
        guest.ready = True
        return guest

    def _own_towards(self, host: str) -> str:
        """This machine's address for another host. ``SetupError`` when nothing leads there."""
        name = ssh.real_name(self._task.ssh, host)
        try:
            return route.own_address(Address(name, SSH_PORT), self._interface())
        except OSError as error:
            raise SetupError(f"{host} cannot be reached: {error.strerror or error}.") from None

    def _own_for_others(self) -> str:
        """This machine's address for hosts that are named already, or else for any."""
        first = () if self._task.elastic is None else self._task.elastic.first
        for host in first:
            with contextlib.suppress(SetupError):
                if not route.is_own(host):
                    return self._own_towards(host)
        return route.outward_address(self._interface())

    def _interface(self) -> str | None:
        variables = {**config.environment(), **self._task.environment}
        return config.Settings.from_environment(variables).network_interface

    def _log_in_to(self, host: str, slots: int) -> Guest:
        own = self._own_towards(host)
        guest = Guest(Share(host, range(0)), own)
        self._members.append(guest)
        index = len(self._members) - 1
        wish = remote.wish_for(index, config.environment(), self._task.environment) | {
            "address": str(Address(own, self._server.address.port)),
            "secret": self._secret.hex(),
            "limit": self._task.start_timeout,
            "slots": slots,
            "task": {
                **self._wish,
                "environment": None,
                "terminal": {},
                "secrets": self._secrets,
            },
        }
        guest.login = ssh.Login(
            self._task.ssh, host, self._task.remote_python, wish, self._task.start_timeout
        )
        self._selector.register(guest.login, 1)
        self._later(self._task.start_timeout, lambda: self._on_late_guest(guest))
        return guest

    def _hand_over(self, guest: Guest) -> None:
        if not guest.ready or not guest.waiting:
            return
        waiting, guest.waiting = guest.waiting, []
        ranks = []
        for _, own in waiting:
            port = Address.parse(own["FARANDOLE_STORE"]).port
            known = {} if guest.channel is not None else self._secrets
            told = {name: text for name, text in own.items() if name not in known}
            ranks.append({**told, "FARANDOLE_STORE": str(Address(guest.own, port))})
        guest.send("spawn", numbers=[number for number, _ in waiting], ranks=ranks)

    # ---- what agents say

    def _on_ready(self, peer: Peer, index: int, address: str, port: int) -> None:
        guest = self._members[index]
        assert isinstance(guest, Guest)
        if guest.peer is not None or guest.gone:
            peer.close()
            return
        self._by_peer[peer] = guest
        guest.peer = peer
        guest.ready = True
        guest.send("start", master={"MASTER_ADDR": address, "MASTER_PORT": str(port)})
        self._hand_over(guest)

    def _translate(self, member: Member, message: Message) -> None:
        if message.kind == "gone":
            self._has_gone(member)
            return
        if message.kind == "exited":
            member.running.discard(message.fields["rank"])
        self._messages.append(message)

    def _listen_to(self, login: ssh.Login) -> None:
        login.read()
        if not login.ended:
            return
        self._selector.unregister(login)
        guest = next(each for each in self._guests.values() if each.login is login)
        why = login.why_lost() if guest.ready else login.why_not_started()
        self._later(0.0 if not guest.ready else 0.5, lambda: self._lose(guest, why))

    def _on_late_guest(self, guest: Guest) -> None:
        if not guest.ready:
            limit = self._task.start_timeout
            self._lose(guest, f"it did not get ready within {limit:g} s (--start-timeout)")

    def _lose(self, member: Member, why: str) -> None:
        if member.gone:
            return
        for name in [name for name, each in self._guests.items() if each is member]:
            del self._guests[name]
        self._end_ranks(member, "lost", why=f"was lost with {member.share.host}: {why}")
        if member.peer is not None:
            member.peer.close()
        self._has_gone(member)

    def _has_gone(self, member: Member) -> None:
        member.gone = True
        self._tell_if_all_gone()

    def _tell_if_all_gone(self) -> None:
        if self._finishing and all(each.gone for each in self._members):
            self._messages.append(Message("gone", {}, b""))
            self._post(lambda: None)
