"""What the spokes and the hub say to each other: a line of JSON, then the payloads' bytes.

::

    spoke → hub    hello     rank, size, generation, remaining (s until its start deadline)
                   gather    request, topic, members (null: all), what · payload
                   where     stuck, waits, begun, answered (gathers answered so far)
                   ping      -
                   order     parts, joins · headers: see ``comm.order.wire``
                   fail      error
                   stack     ask (number), text
                   goodbye   begun, reason (null: a clean end)
    hub → spoke    formed
                   gathered  request, which (index of each member's payload) · distinct payloads
                   refused   request, text: this gather cannot be, the group lives on
                   ordered   verdicts · headers: see ``comm.order.wire``
                   missed    topic: a gather misses this rank, which has joined
                   failed    error: the group is broken
                   ask       ask: where are you?
                   pong      to a ping
                   left      rank, begun: it said goodbye
                   farewell  after a goodbye: nothing more will come
                   closing   rank 0 has left, and the hub with it

Nothing here is trusted: a frame that is not of this form raises ``ValueError``, and the hub counts
who sent it as lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.core.errors import CollectiveError, FarandoleError


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Made once: json's own functions make one a call.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder(parse_constant=_refuse).decode


@dataclass(slots=True)
class Message:
    """A message that has been read."""

    kind: str
    fields: dict[str, Any]
    payloads: tuple[bytes, ...] = ()

    def integer(self, name: str) -> int:
        """A whole number among the fields; ``ValueError`` if it is none."""
        return whole(self.fields.get(name))

    def text(self, name: str) -> str:
        """A text among the fields; ``ValueError`` if it is none."""
        value = self.fields.get(name)
        if isinstance(value, str):
            return value
        raise ValueError(f"{name} of a {self.kind} message is not a text")


def whole(value: object) -> int:
    """``value`` as a whole number; ``ValueError`` if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not a whole number")


def seconds(value: object) -> float:
    """``value`` as a finite number of seconds; ``ValueError`` if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)


def pack(kind: str, payloads: Sequence[bytes] = (), **fields: Any) -> bytes:
    """The frame of one message. Fields must be JSON values."""
    head: dict[str, Any] = {"kind": kind, **fields}
    if payloads:
        head["sizes"] = [len(payload) for payload in payloads]
    return b"".join((_encode(head).encode(), b"\n", *payloads))


def unpack(frame: bytes) -> Message:
    """Read a frame; ``ValueError`` when it is not a message."""
    line, newline, rest = frame.partition(b"\n")
    try:
        head = _decode(line.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not newline or not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise ValueError("not a message")
    sizes = head.pop("sizes", None)
    if sizes is None and not rest:
        return Message(head.pop("kind"), head)
    fits = isinstance(sizes, list) and sum(map(whole, sizes)) == len(rest)
    if not fits or min(sizes, default=0) < 0:
        raise ValueError("payloads of other sizes than said")
    return Message(head.pop("kind"), head, tuple(_cut(rest, sizes)))


def _cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def pack_error(error: FarandoleError) -> dict[str, Any]:
    """An error as JSON values."""
    return {"class": type(error).__name__, "message": error.message, "ranks": list(error.ranks)}


def unpack_error(data: object) -> FarandoleError:
    """The error that :func:`pack_error` wrote. Only classes of our own tree are ever made."""
    if isinstance(data, dict) and isinstance(data.get("ranks"), list):
        kind = _classes().get(str(data.get("class")), CollectiveError)
        return kind(str(data.get("message")), ranks=[whole(rank) for rank in data["ranks"]])
    raise ValueError("not an error")


def _classes() -> dict[str, type[FarandoleError]]:
    found: dict[str, type[FarandoleError]] = {}
    pending: list[type[FarandoleError]] = [FarandoleError]
    while pending:
        each = pending.pop()
        if each.__module__ == FarandoleError.__module__:
            found[each.__name__] = each
            pending.extend(each.__subclasses__())
    return found
