"""Messages over TCP between processes of a job that prove to each other that they are.

:class:`Session` has the rules; here are the sockets for one end that blocks. ``core.server`` has
the end that serves many. Payloads are bytes, and nothing is ever unpickled.
"""

from __future__ import annotations

import collections
import errno
import select
import socket
import threading
import time

from farandole.core import forks
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import (
    AuthenticationError,
    ConnectionLost,
    DeadlineError,
    FarandoleError,
)
from farandole.core.secret import Secret
from farandole.core.session import MAX_FRAME, Session

__all__ = ["MAX_FRAME", "Address", "Connection", "Secret", "Session", "connect", "tune"]

SEND_LIMIT = 60.0
"""Seconds that the other end may take to read what is sent to it."""

ATTEMPTS = 5
"""How often a handshake is tried that the other end breaks off, as a crowded server may."""


_KEEPALIVE = (
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 60_000),
)


class Connection:
    """One end of an authenticated connection. Any thread may send, receive and close.

    Made by :func:`connect`. In a forked child it is closed: it stays the parent's alone.

    Example::

        with connect(Address("10.0.0.1", 4711), secret, Deadline.after(10.0)) as connection:
            connection.send(b"hello")
            answer = connection.receive(Deadline.after(5.0))
    """

    def __init__(self, sock: socket.socket, session: Session, address: Address) -> None:
        sock.setblocking(False)
        self.address = address
        self._socket = sock
        self._session = session
        self._messages: collections.deque[bytes] = collections.deque()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._closed_because = ""
        forks.abandon_in_children(self)

    def send(self, message: bytes) -> None:
        """Send one message; returns when the operating system has taken all of it.

        Raises ``ConnectionLost`` when the connection is closed, and closes it when the other end
        does not read for :data:`SEND_LIMIT` seconds; ``UsageError`` when the message is too long.
        """
        with self._writing:
            sealed = self._session.seal(message)
            try:
                self._write(sealed, Deadline.after(SEND_LIMIT))
            except BaseException:
                # Half a message may have left: nothing can follow it.
                self._shut("a message was broken off")
                raise

    def receive(self, deadline: Deadline) -> bytes:
        """The next message.

        Raises ``DeadlineError`` when none is complete in time (nothing is lost: call again),
        ``ConnectionLost`` when the connection is closed, ``AuthenticationError`` when somebody
        tampered with it.
        """
        remaining = deadline.remaining()
        if not self._reading.acquire(timeout=-1 if remaining is None else remaining):
            raise self._silent(deadline)
        try:
            while not self._messages:
                data = self._read(self._session.wanted, deadline)
                self._messages.extend(self._session.receive(data))
            return self._messages.popleft()
        except AuthenticationError as error:
            self._shut("it was tampered with")
            raise AuthenticationError(f"{self.address}: {error.message}") from None
        finally:
            self._reading.release()

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection; threads that wait in it get ``ConnectionLost``. Idempotent."""
        self._shut("it was closed here")
        with self._reading, self._writing:
            self._socket.close()

    def abandon(self) -> None:
        """Give up a forked child's copy of the socket. See ``core.forks``."""
        self._closed_because = self._closed_because or "it belongs to the parent process"
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shake_hands(self, deadline: Deadline) -> None:
        """Prove ourselves to the other end and have it prove itself. Part of :func:`connect`."""
        self._write(self._session.take_outgoing(), deadline)
        while not self._session.is_open:
            self._session.receive(self._read(self._session.wanted, deadline))
            self._write(self._session.take_outgoing(), deadline)

    def _read(self, limit: int, deadline: Deadline) -> bytes:
        while (data := self._read_now(limit)) is None:
            self._await(self._readable, deadline)
        if not data:
            raise self._lost(None)
        return data

    def _read_now(self, limit: int) -> bytes | None:
        try:
            return self._socket.recv(limit)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from None

    def _write(self, data: bytes, deadline: Deadline) -> None:
        rest = memoryview(data)
        while rest := rest[self._write_now(rest) :]:
            self._await(self._writable, deadline)

    def _write_now(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from None

    def _await(self, poll: select.poll, deadline: Deadline) -> None:
        remaining = deadline.remaining()
        if not poll.poll(None if remaining is None else remaining * 1000) and deadline.expired():
            raise self._silent(deadline)

    def _shut(self, because: str) -> None:
        """Wake whoever waits in the socket. It is closed when they have left it."""
        self._closed_because = self._closed_because or because
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other end, or an earlier call, was first.

    def _lost(self, error: OSError | None) -> ConnectionLost:
        because = self._closed_because
        if not because:
            because = "the other end closed it" if error is None else str(error)
        return ConnectionLost(f"The connection to {self.address} is gone: {because}.")

    def _silent(self, deadline: Deadline) -> DeadlineError:
        return DeadlineError(f"{self.address} did not answer{_within(deadline)}.")


def connect(
    address: Address,
    secret: Secret,
    deadline: Deadline,
    *,
    max_frame: int = MAX_FRAME,
    patient: bool = False,
) -> Connection:
    """Open an authenticated connection to a ``core.server.Server`` at ``address``.

    ``patient``: when nobody listens there yet, or the host cannot be found, try again until the
    deadline. Otherwise that is a ``ConnectionLost`` at once, as fits an address that was published
    by a process that listened there.

    Raises ``AuthenticationError`` when one end does not hold the other's secret, ``DeadlineError``
    when it takes too long.
    """
    pause, attempts = 0.01, 0
    while True:
        try:
            return _try_to_connect(address, secret, deadline, max_frame)
        except _BrokenOff as broken:
            attempts += 1
            failure, again = str(broken), attempts < ATTEMPTS
        except FarandoleError:
            raise  # Some of them are OSErrors too.
        except OSError as error:
            failure, again = f"Cannot connect to {address}: {error}.", patient
        left = deadline.remaining()
        if again and left is not None and left <= pause:
            raise DeadlineError(f"{failure} No success{_within(deadline)}.")
        if not again:
            raise ConnectionLost(failure)
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


class _BrokenOff(Exception):
    """The other end accepted us, and closed the connection in the handshake."""


def _try_to_connect(
    address: Address, secret: Secret, deadline: Deadline, max_frame: int
) -> Connection:
    left = deadline.remaining()
    try:
        # A timeout of 0 would mean: do not wait for the connection at all.
        sock = socket.create_connection(address, None if left is None else max(left, 0.001))
    except TimeoutError:
        raise DeadlineError(f"Cannot connect to {address}{_within(deadline)}.") from None
    if sock.getsockname() == sock.getpeername():
        # TCP lets a socket meet itself where nobody listens, if it drew that very port.
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    tune(sock)
    connection = Connection(sock, Session(secret, "client", max_frame), address)
    try:
        connection.shake_hands(deadline)
    except FarandoleError as error:
        connection.close()
        if isinstance(error, ConnectionLost):
            raise _BrokenOff(f"{address} broke the handshake off.") from None
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(
                f"{address}: {error.message} All ranks of a job need the same FARANDOLE_SECRET; "
                "or a process of another job listens there."
            ) from None
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice within about a minute that a host has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _within(deadline: Deadline) -> str:
    return "" if deadline.limit is None else f" within {deadline.limit:g} s"
