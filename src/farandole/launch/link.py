"""The messages of :mod:`farandole.launch.channel` over a network: to those who hold a secret only.

Each message is one frame of :mod:`farandole.core.session`: both ends have proved themselves before
it, and nobody can alter, repeat or drop one. It is not hidden, so secrets and environments do not
travel here; see :mod:`farandole.launch.ssh`.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from farandole.core import wire
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import AuthenticationError, ConnectionLost, DeadlineError
from farandole.core.secret import Secret
from farandole.core.session import Session
from farandole.launch.channel import Channel, Message

SILENCE = 20.0
"""Seconds after which a host that does not even confirm packets is taken for gone."""

_LENGTH = struct.Struct("!I")


def pack(kind: str, payload: bytes, fields: dict[str, Any]) -> bytes:
    """A message as one frame's content."""
    header = json.dumps({"kind": kind, **fields}).encode("ascii")
    return _LENGTH.pack(len(header)) + header + payload


def unpack(frame: bytes) -> Message:
    """What :func:`pack` made a frame of."""
    (length,) = _LENGTH.unpack_from(frame)
    body = _LENGTH.size + length
    fields = json.loads(frame[_LENGTH.size : body])
    return Message(fields.pop("kind"), fields, frame[body:])


class Link(Channel):
    """An agent's end of its connection to a job loop on another host. Made by :func:`connect`."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        super().__init__(sock)
        self._session = session

    @property
    def own_address(self) -> str:
        """The address of this host from which the job loop is reached."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: str, payload: bytes = b"", /, **fields: Any) -> None:
        """See :class:`Channel`."""
        self._outgoing += self._session.seal(pack(kind, payload, fields))
        self.flush()

    def receive(self) -> list[Message]:
        """See :class:`Channel`. Somebody who tampers with the connection closes it."""
        try:
            data = self._socket.recv(self._session.wanted)
            frames = self._session.receive(data)
        except BlockingIOError:
            return []
        except (OSError, AuthenticationError):
            self.closed = True
            return []
        self.closed = self.closed or not data
        return [unpack(frame) for frame in frames]

    def flush(self) -> None:
        """See :class:`Channel`."""
        try:
            super().flush()
        except OSError:  # the host at the other end has vanished
            self.closed = True


def connect(address: Address, secret: Secret, deadline: Deadline) -> Link:
    """Connect an agent to its job loop.

    ``ConnectionLost`` or ``DeadlineError`` when nobody can be reached there, and
    ``AuthenticationError`` when that is somebody else.
    """
    limit = deadline.remaining()
    try:
        sock = socket.create_connection(address, timeout=limit)
        session = Session(secret, "client")
        sock.sendall(session.take_outgoing())
        while not session.is_open:
            data = sock.recv(session.wanted)
            if not data:
                raise ConnectionLost(f"{address} broke the handshake off.")
            session.receive(data)
            sock.sendall(session.take_outgoing())
    except TimeoutError:
        raise DeadlineError(f"{address} did not answer within {deadline.limit:g} s.") from None
    except ConnectionLost:
        raise
    except OSError as error:
        raise ConnectionLost(f"Cannot connect to {address}: {error}.") from None
    wire.tune(sock)
    _end_after_silence(sock)
    return Link(sock, session)


def _end_after_silence(sock: socket.socket) -> None:
    """Let the kernel close the connection when nothing has been confirmed for that long."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 8)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
