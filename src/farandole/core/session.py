"""The rules of a connection of ours, without any input or output.

Prior art: TLS with a pre-shared key. The standard library offers that only from Python 3.13, so
this does the two things we need: both ends prove that they hold the job's secret before either
says anything, and nobody in between can alter, repeat, drop or reorder a message unnoticed. It
does not hide what is said: values are no secrets.

The exchange, all by HMAC-SHA256::

    client                                      server
    hello: magic, nonce          ── 48 B ──▶
                                 ◀── 48 B ──    hello: magic, nonce
    proof(secret, "client", T)   ── 32 B ──▶    right: proof(secret, "server", T)
                                 ◀── 32 B ──    wrong: REFUSAL, and the connection ends
    T: both hellos. Each direction has a key made from the secret and T.

    message:  length (4 bytes) │ payload │ MAC of (how many came before, length, payload)

The server proves itself only to a client that has. Nothing is allocated for a length that is over
the limit, and nothing at all is parsed before the proof.

===============  =====================  ======================================================
state            wants                  then
===============  =====================  ======================================================
``HELLO``        the other's hello      client: send proof; both: ``PROOF``
``PROOF``        the other's proof      server: send proof; both: ``OPEN``
``OPEN``         messages               ``OPEN``
any              what it cannot accept  ``DEAD``: raises ``AuthenticationError``, now and later
===============  =====================  ======================================================
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from typing import Literal

from farandole.core.errors import AuthenticationError, UsageError
from farandole.core.secret import Secret

MAX_FRAME = 64 * 1024 * 1024
"""Bytes that a message may have, unless a connection says otherwise."""

MAGIC = b"farandole wire 1"
NONCE_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = 32
MAC_BYTES = 32
REFUSAL = b"refused: that is another secret."

_LENGTH = struct.Struct(">I")
_PREFIX = struct.Struct(">QI")
_CHUNK = 16 * 1024
_BULK = 1024 * 1024

Role = Literal["client", "server"]


class State(enum.Enum):
    """Where a session is; the table above says what follows."""

    HELLO = "hello"
    PROOF = "proof"
    OPEN = "open"
    DEAD = "dead"


class _Direction:
    """The key and the count of the messages that go one way."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._count = 0

    def next_mac(self, payload: bytes | memoryview) -> bytes:
        mac = self._keyed.copy()
        mac.update(_PREFIX.pack(self._count, len(payload)))
        mac.update(payload)
        self._count += 1
        return mac.digest()


class Session:
    """One end of a connection: bytes in, messages out, and the other way round.

    Give what was read to :meth:`receive`, and send what :meth:`take_outgoing` returns, first of
    all at the start. Sending and receiving may happen in two threads, each in one.

    Example::

        session = Session(secret, "client")
        send(session.take_outgoing())
        while not session.is_open:
            session.receive(read(session.wanted))
            send(session.take_outgoing())
        send(session.seal(b"hello"))
    """

    def __init__(self, secret: Secret, role: Role, max_frame: int = MAX_FRAME) -> None:
        self._secret = secret
        self._role = role
        self._max_frame = max_frame
        self._state = State.HELLO
        self._failure = ""
        self._hello = MAGIC + secrets.token_bytes(NONCE_BYTES)
        self._outgoing = self._hello
        self._transcript = b""
        self._incoming = bytearray()
        self._needed = HELLO_BYTES
        self._sends: _Direction | None = None
        self._receives: _Direction | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other end has proved itself, so that messages can be exchanged."""
        return self._state is State.OPEN

    @property
    def is_between_messages(self) -> bool:
        """Whether no part of a message has come: the end of the stream is a goodbye here."""
        return self._state is State.OPEN and not self._incoming

    @property
    def wanted(self) -> int:
        """How many bytes to read next, at most. Exactly the missing ones until it is open."""
        missing = self._needed - len(self._incoming)
        return missing if self._state is not State.OPEN else min(max(missing, _CHUNK), _BULK)

    def take_outgoing(self) -> bytes:
        """The part of the handshake that is to be sent now; empty when there is none."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def seal(self, payload: bytes) -> bytes:
        """The bytes to send for one message, in the order of the calls.

        Raises ``UsageError`` when the message is larger than the limit.
        """
        if len(payload) > self._max_frame:
            raise UsageError(
                f"A message of {len(payload)} bytes is over the limit of {self._max_frame}."
            )
        if self._sends is None:
            raise UsageError("The session is not open: the handshake comes first.")
        return b"".join((_LENGTH.pack(len(payload)), payload, self._sends.next_mac(payload)))

    def receive(self, data: bytes) -> list[bytes]:
        """Take bytes from the other end; returns the messages that are complete with them.

        Raises ``AuthenticationError`` when the other end does not hold the secret or the bytes
        are not what it sent. The session is of no more use then; messages that the same ``data``
        completed before are lost.
        """
        if self._state is State.DEAD:
            raise AuthenticationError(self._failure)
        self._incoming += data
        messages: list[bytes] = []
        while self._state is not State.OPEN and len(self._incoming) >= self._needed:
            self._shake_hands(self._take(self._needed))
        if self._receives is not None:
            self._unseal_all(self._receives, messages)
        return messages

    def _shake_hands(self, part: bytes) -> None:
        if self._state is State.HELLO:
            if not part.startswith(MAGIC):
                raise self._die("The other end is no Farandole process of this version.")
            is_client = self._role == "client"
            self._transcript = self._hello + part if is_client else part + self._hello
            self._state, self._needed = State.PROOF, PROOF_BYTES
            if is_client:
                self._outgoing += self._derive(b"client proof")
            return
        if self._role == "client" and hmac.compare_digest(part, REFUSAL):
            raise self._die("The other end refused us: it holds another secret.")
        other = b"server proof" if self._role == "client" else b"client proof"
        if not hmac.compare_digest(part, self._derive(other)):
            self._outgoing += REFUSAL if self._role == "server" else b""
            raise self._die("The other end does not hold the job's secret.")
        if self._role == "server":
            self._outgoing += self._derive(b"server proof")
        from_client = _Direction(self._derive(b"client key"))
        from_server = _Direction(self._derive(b"server key"))
        ours_first = self._role == "client"
        self._sends = from_client if ours_first else from_server
        self._receives = from_server if ours_first else from_client
        self._state, self._needed = State.OPEN, _LENGTH.size

    def _unseal_all(self, receives: _Direction, messages: list[bytes]) -> None:
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > self._max_frame:
                raise self._die(
                    f"The other end announced a message of {length} bytes, over the limit of "
                    f"{self._max_frame}."
                )
            self._needed = _LENGTH.size + length + MAC_BYTES
            if len(self._incoming) < self._needed:
                return
            frame = self._take(self._needed)
            payload, mac = frame[_LENGTH.size : -MAC_BYTES], frame[-MAC_BYTES:]
            if not hmac.compare_digest(mac, receives.next_mac(payload)):
                raise self._die("A message was altered, repeated or left out on its way.")
            messages.append(payload)
        self._needed = _LENGTH.size

    def _take(self, count: int) -> bytes:
        with memoryview(self._incoming) as view:
            part = bytes(view[:count])
        del self._incoming[:count]
        return part

    def _derive(self, purpose: bytes) -> bytes:
        return self._secret.sign(b"farandole " + purpose + b": " + self._transcript)

    def _die(self, failure: str) -> AuthenticationError:
        self._state = State.DEAD
        self._failure = failure
        self._incoming.clear()
        return AuthenticationError(failure)
