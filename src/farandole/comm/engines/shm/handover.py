"""Handing a descriptor to another process of the job, where ``/proc`` does not let it be opened.

The owner listens on a Unix socket with a random abstract name. Anybody on the machine may connect
to such a socket, so the descriptor goes only to who names the token, which stands in the job's
store, and whose user is the owner's (the kernel says which). Whoever says nothing holds nobody up
for longer than :data:`PATIENCE`.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct

from farandole.core.clock import Deadline

PATIENCE = 0.5
"""Seconds within which who has connected must name the token."""

TOKEN = 32
"""Bytes of a token."""

_CREDENTIALS = struct.Struct("3i")


class Counter:
    """Where a process hands out ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._token = secrets.token_bytes(TOKEN)
        self._name = f"farandole-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(1024)

    @property
    def ticket(self) -> dict[str, str]:
        """What a process needs for :func:`ask`. To be told to nobody else."""
        return {"name": self._name, "token": self._token.hex()}

    def serve(self, count: int, deadline: Deadline) -> None:
        """Hand the descriptor to ``count`` processes that hold a ticket.

        Raises ``OSError`` when they have not all come by ``deadline``.
        """
        while count:
            self._socket.settimeout(deadline.remaining())
            connection, _ = self._socket.accept()
            with connection:
                if self._admits(connection):
                    socket.send_fds(connection, [b"!"], [self._descriptor])
                    count -= 1

    def close(self) -> None:
        """Hand out nothing any more."""
        self._socket.close()

    def _admits(self, connection: socket.socket) -> bool:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
            return False
        connection.settimeout(PATIENCE)
        try:
            said = connection.recv(TOKEN, socket.MSG_WAITALL)
        except OSError:
            return False
        return hmac.compare_digest(said, self._token)


def ask(ticket: dict[str, str]) -> socket.socket:
    """Ask for the descriptor of the :class:`Counter` that gave ``ticket``; does not wait for it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{ticket['name']}")
        connection.sendall(bytes.fromhex(ticket["token"]))
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, deadline: Deadline) -> int:
    """The descriptor that was asked for. Raises ``OSError`` when it does not come."""
    connection.settimeout(deadline.remaining())
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError("its owner does not hand it over")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
