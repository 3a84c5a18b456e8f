"""Messages between the job loop and an agent: a JSON object and, for output, raw bytes.

Both ends are event loops, so nothing here blocks: :meth:`Channel.send` queues, :meth:`flush` writes
what the socket takes, :meth:`receive` reads what is there. A message is eight bytes of lengths
(header, payload; big-endian), the header in JSON, the payload.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

_LENGTHS = struct.Struct("!II")
_CHUNK = 1 << 16


class Message(NamedTuple):
    """What was sent: its kind, its fields, and bytes that are no JSON."""

    kind: str
    fields: dict[str, Any]
    payload: bytes


class Channel:
    """One end of a connected stream socket, which it owns from then on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.closed = False
        """Whether the other end is gone. What it had sent has been received by then."""

    def fileno(self) -> int:
        """The socket's, to wait on."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken yet: wait for it to become writable."""
        return len(self._outgoing)

    def send(self, kind: str, payload: bytes = b"", /, **fields: Any) -> None:
        """Queue a message and write what the socket takes. Sending to a gone peer does nothing."""
        header = json.dumps({"kind": kind, **fields}).encode("ascii")
        self._outgoing += _LENGTHS.pack(len(header), len(payload)) + header + payload
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        while self._outgoing and not self.closed:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self.closed = True
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Message]:
        """The messages that have arrived; sets :attr:`closed` at the end of the stream."""
        try:
            chunk = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self.closed = True
        self._incoming += chunk
        return self._take()

    def close(self) -> None:
        """Give the socket back."""
        self.closed = True
        self._socket.close()

    def _take(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._incoming) - start >= _LENGTHS.size:
            header_length, payload_length = _LENGTHS.unpack_from(self._incoming, start)
            body = start + _LENGTHS.size
            end = body + header_length + payload_length
            if len(self._incoming) < end:
                break
            fields = json.loads(self._incoming[body : body + header_length])
            payload = bytes(self._incoming[body + header_length : end])
            messages.append(Message(fields.pop("kind"), fields, payload))
            start = end
        del self._incoming[:start]
        return messages
