"""Many authenticated connections, one thread.

Guarantees
    *Strangers.* Nobody's bytes reach the handler before a proof that they hold the secret. A
    connection without proof is dropped after :data:`HANDSHAKE_LIMIT` seconds; of more than
    :data:`MAX_STRANGERS` at a time the further ones wait in the operating system's queue, and
    those that are in are given only :data:`CROWDED_LIMIT` seconds. At most 80 bytes are read from
    each. None of them holds up those who have proved themselves. A refusal is logged once for
    each host.

    *Idle means idle.* Without messages and timers the thread sleeps.

    *One thread.* The handler and the timers are only ever called in the server's thread, so they
    need no locks; and they must not block, since everybody waits for them.

    *Forks.* A forked child holds none of the sockets, and has no server.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from farandole.core import forks, wire
from farandole.core.address import Address
from farandole.core.clock import SYSTEM_CLOCK, Deadline
from farandole.core.errors import (
    AuthenticationError,
    ConnectionLost,
    FarandoleBug,
    FarandoleError,
    SetupError,
)
from farandole.core.loop import Loop, Timer
from farandole.core.secret import Secret
from farandole.core.session import MAX_FRAME, Session

__all__ = ["Handler", "Peer", "Server", "Timer"]

MAX_STRANGERS = 256
HANDSHAKE_LIMIT = 10.0
CROWDED_LIMIT = 1.0
FLUSH_LIMIT = 1.0
"""Seconds that closing gives the other end to read what was sent to it before."""

ACCEPTS_AT_ONCE = 64
DESCRIPTOR_PAUSE = 1.0
MAX_NAMED_HOSTS = 1024

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """What a server does with its peers. Called in the server's thread; must not block."""

    def on_message(self, peer: Peer, message: bytes) -> None:
        """A message came. An exception from here drops the peer."""
        ...

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        """A peer is gone: nothing comes from it any more, and nothing reaches it.

        ``error`` is ``None`` when it closed the connection between two messages, or we did. Called
        once for each peer, but not for those that are there when the server itself is closed.
        """
        ...


class Peer:
    """The other end of one connection of a server. Compared by identity; usable as a key."""

    def __init__(self, server: Server, sock: socket.socket, session: Session, address: Address):
        self.address = address
        """Where it connects from."""
        self._server = server
        self._socket = sock
        self._session = session
        self._lock = threading.Lock()  # For the sending half of the session, and what follows.
        self._backlog: collections.deque[memoryview] = collections.deque()
        self._backlog_bytes = 0
        self._closing = False
        self._gone = False

    def send(self, message: bytes) -> None:
        """Send one message, from any thread, without blocking: what does not fit now waits here.

        Whether it arrived shows in ``on_close`` alone; to a peer that is gone nothing is sent. A
        peer that lets more than four times the largest message pile up is dropped. Raises
        ``UsageError`` when the message is too long.
        """
        with self._lock:
            if self._gone or self._closing:
                return
            sealed = self._session.seal(message)
            self._backlog.append(memoryview(sealed))
            self._backlog_bytes += len(sealed)
            error = self._flush() if len(self._backlog) == 1 else self._overflow()
            settled = not self._backlog and error is None
        if not settled:
            self._server.call_soon(lambda: self._server._attend(self, error))

    def close(self) -> None:
        """Drop the peer when it has what was sent to it, or after :data:`FLUSH_LIMIT` seconds."""
        with self._lock:
            self._closing = True
        self._server.call_soon(lambda: self._server._attend(self, None))
        self._server.call_later(FLUSH_LIMIT, lambda: self._server._drop(self, None))

    def _flush(self) -> ConnectionLost | None:
        """Send what the socket takes. The lock is held."""
        try:
            while self._backlog:
                first = self._backlog[0]
                sent = self._socket.send(first)
                self._backlog_bytes -= sent
                if sent == len(first):
                    self._backlog.popleft()
                else:
                    self._backlog[0] = first[sent:]
        except BlockingIOError:
            return None
        except OSError as error:
            return ConnectionLost(f"The connection from {self.address} is gone: {error}.")
        return None

    def _overflow(self) -> ConnectionLost | None:
        if self._backlog_bytes <= 4 * self._server.max_frame:
            return None
        return ConnectionLost(f"{self.address} does not read what is sent to it.")


class Server:
    """Listens at once, and serves in its own thread until :meth:`close`.

    ``host`` is an address of this machine; ``port`` 0 takes a free one. ``SetupError`` when that
    is not possible.

    Example::

        class Echo:
            def on_message(self, peer, message):
                peer.send(message)

            def on_close(self, peer, error):
                pass

        server = Server(secret, Echo())
        connection = connect(server.address, secret, Deadline.after(5.0))
    """

    def __init__(
        self,
        secret: Secret,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_frame: int = MAX_FRAME,
    ) -> None:
        self.max_frame = max_frame
        self._secret = secret
        self._handler = handler
        self._listener = _listen(host, port)
        self.address = Address(*self._listener.getsockname()[:2])
        """Where it listens, with the port that it got."""
        self._strangers: dict[Peer, float] = {}  # Since when; the oldest first.
        self._stranger_timer: Timer | None = None
        self._peers: set[Peer] = set()
        self._short_of_descriptors = False
        self._named_hosts: set[str] = set()
        self._loop = Loop("farandole-server", self._at_end)
        forks.abandon_in_children(self)
        self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self._loop.start()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call in the server's thread, soon. Any thread; in the order of the calls."""
        self._loop.call_soon(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call in the server's thread after ``seconds``, unless cancelled. Any thread."""
        return self._loop.call_later(seconds, callback)

    def close(self) -> None:
        """Stop listening, give peers a second to read what was sent, and end the thread.

        Any thread, the server's own included (there it returns before the end). Idempotent.
        """
        self._loop.stop()

    def abandon(self) -> None:
        """Give up a forked child's copies of the sockets. See ``core.forks``."""
        self._close_sockets()

    def _attend(self, peer: Peer, error: FarandoleError | None) -> None:
        """Watch for what the peer's connection now needs, or drop it."""
        with peer._lock:
            if peer._gone:
                return
            finished = peer._closing and not peer._backlog
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer._backlog else 0)
        if finished or error is not None:
            self._drop(peer, error)
        else:
            self._watch(peer, events)

    def _watch(self, peer: Peer, events: int) -> None:
        self._loop.watch(peer._socket, events, lambda ready: self._serve(peer, ready))

    def _drop(self, peer: Peer, error: FarandoleError | None) -> None:
        """Close the peer's connection and tell the handler."""
        with peer._lock:
            if peer._gone:
                return
            peer._gone = True
            peer._backlog.clear()
            self._loop.watch(peer._socket, 0, lambda ready: None)
            peer._socket.close()
        if self._strangers.pop(peer, None) is not None:
            self._listen_or_not()
        elif peer in self._peers:
            self._peers.remove(peer)
            try:
                self._handler.on_close(peer, error)
            except Exception:
                logger.exception("The server at %s failed on a peer's end.", self.address)

    def _is_crowded(self) -> bool:
        return len(self._strangers) >= MAX_STRANGERS

    def _listen_or_not(self) -> None:
        wanted = not self._is_crowded() and not self._short_of_descriptors
        events = selectors.EVENT_READ if wanted else 0
        self._loop.watch(self._listener, events, self._accept)

    def _accept(self, _ready: int) -> None:
        for _ in range(min(ACCEPTS_AT_ONCE, MAX_STRANGERS - len(self._strangers))):
            sock = self._accept_one()
            if sock is None:
                break
            self._welcome(sock)
        self._listen_or_not()
        if self._stranger_timer is None or self._is_crowded():
            self._drop_slow_strangers()

    def _accept_one(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except OSError as error:
            # All others mean that there is nobody, or not any more.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                logger.error("%s cannot accept connections now: %s.", self.address, error)
                self._short_of_descriptors = True
                self.call_later(DESCRIPTOR_PAUSE, self._accept_again)
            return None

    def _accept_again(self) -> None:
        self._short_of_descriptors = False
        self._listen_or_not()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            wire.tune(sock)
            address = Address(*sock.getpeername()[:2])
        except OSError:
            sock.close()  # It is gone already.
            return
        peer = Peer(self, sock, Session(self._secret, "server", self.max_frame), address)
        self._strangers[peer] = SYSTEM_CLOCK.now()
        self._watch(peer, selectors.EVENT_READ)
        self._answer_handshake(peer)

    def _drop_slow_strangers(self) -> None:
        """Drop those whose time is up, and come back when that of the next is."""
        if self._stranger_timer is not None:
            self._stranger_timer.cancel()
            self._stranger_timer = None
        while self._strangers:
            peer, since = next(iter(self._strangers.items()))
            limit = CROWDED_LIMIT if self._is_crowded() else HANDSHAKE_LIMIT
            left = since + limit - SYSTEM_CLOCK.now()
            if left > 0:
                self._stranger_timer = self.call_later(left, self._drop_slow_strangers)
                return
            self._refuse(peer, "it did not prove in time that it belongs to the job")

    def _refuse(self, peer: Peer, reason: str) -> None:
        host = peer.address.host
        if host not in self._named_hosts and len(self._named_hosts) < MAX_NAMED_HOSTS:
            self._named_hosts.add(host)
            logger.warning(
                "Refused a connection from %s to %s: %s. Further ones from there are refused "
                "without a word.",
                peer.address,
                self.address,
                reason,
            )
        self._drop(peer, None)

    def _serve(self, peer: Peer, ready: int) -> None:
        if peer._gone:  # By an earlier event of the same round.
            return
        if ready & selectors.EVENT_WRITE:
            with peer._lock:
                error = peer._flush()
            self._attend(peer, error)
        if ready & selectors.EVENT_READ and not peer._gone:
            self._read(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer._socket.recv(peer._session.wanted)
        except BlockingIOError:
            return
        except OSError as error:
            self._on_end(peer, f"The connection from {peer.address} is gone: {error}.")
            return
        if not data:
            between = peer._session.is_between_messages
            self._on_end(peer, "" if between else f"{peer.address} left in mid-message.")
            return
        try:
            messages = peer._session.receive(data)
        except AuthenticationError as error:
            self._on_intruder(peer, error)
            return
        if peer in self._strangers:
            self._answer_handshake(peer)
        for message in messages:
            self._hand_over(peer, message)

    def _answer_handshake(self, peer: Peer) -> None:
        outgoing = peer._session.take_outgoing()
        try:
            # A fresh socket takes these few bytes; who has no room for them is no peer of ours.
            complete = not outgoing or peer._socket.send(outgoing) == len(outgoing)
        except OSError:
            complete = False
        if not complete:
            self._drop(peer, None)
        elif peer._session.is_open:
            del self._strangers[peer]
            self._peers.add(peer)
            self._listen_or_not()

    def _on_end(self, peer: Peer, failure: str) -> None:
        if peer in self._strangers:
            self._refuse(peer, "it left without proving that it belongs to the job")
        else:
            self._drop(peer, ConnectionLost(failure) if failure else None)

    def _on_intruder(self, peer: Peer, error: AuthenticationError) -> None:
        if peer in self._strangers:
            with contextlib.suppress(OSError):  # It is refused whether it hears of it or not.
                peer._socket.send(peer._session.take_outgoing())
            self._refuse(peer, error.message.rstrip("."))
        else:
            logger.error("Dropped the connection from %s: %s", peer.address, error)
            self._drop(peer, AuthenticationError(f"{peer.address}: {error.message}"))

    def _hand_over(self, peer: Peer, message: bytes) -> None:
        if peer._gone:
            return
        try:
            self._handler.on_message(peer, message)
        except FarandoleError as error:
            logger.error("Dropped %s because of its message: %s", peer.address, error)
            self._drop(peer, error)
        except Exception as error:
            logger.exception("The server at %s failed on a message.", self.address)
            self._drop(peer, FarandoleBug(f"Handling a message failed: {error!r}."))

    def _at_end(self) -> None:
        self._listener.close()
        end = Deadline.after(FLUSH_LIMIT)
        unread = [peer for peer in self._peers if self._is_unread(peer)]
        while unread and not end.expired():
            SYSTEM_CLOCK.sleep(0.01)
            unread = [peer for peer in unread if self._is_unread(peer)]
        self._close_sockets()

    def _is_unread(self, peer: Peer) -> bool:
        with peer._lock:
            return peer._flush() is None and bool(peer._backlog)

    def _close_sockets(self) -> None:
        self._listener.close()
        for peer in (*self._strangers, *self._peers):
            peer._gone = True
            peer._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(socket.SOMAXCONN)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise SetupError(f"Cannot listen at {host} port {port}: {error}.") from None
    return listener
