"""What ranks and the coordinator say to each other about named requests. No torch.

A rank sends *parts*, one for each group that it submitted something in::

    [group, members, generation, bits, [[key, cacheable], …]] · a header for each key
    [group, members]                                            this rank has closed the group

The coordinator answers with *verdicts*, to all members of a group the same, in one order::

    ["known", group, bits]                                requests that were agreed on before
    ["agreed", group, key, number, which] · headers       agreed; ``number`` in the cache, or null
    ["refused", group, key, text]                         the ranks asked for different things
    ["flush", group]                                      the cache of the group begins anew
    ["joined", last]                                      all ranks have joined

A *key* names a request within its group. ``bits`` are hexadecimal: bit n stands for the request
that has number n in the group's cache, with the same header as when it was agreed on. ``which``
gives for each member the index of its header, or -1 for a member that has joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.comm.control import message
from farandole.comm.control.message import Message
from farandole.comm.header import Header

CAPACITY = 1024
"""Requests of one group that are known by their number; when there are more, all begin anew."""


def key_of(header: Header, unnamed: int) -> str:
    """How a request is known within its group; ``unnamed`` counts those without a name."""
    if header.name is None:
        return f"noname.{unnamed}"
    return f"{'grouped_' if header.grouped else ''}{header.operation}.{header.name}"


def topic_of(group: str, key: str) -> str:
    """What the watch calls the agreement on a request."""
    return f"order/{group}/{key}"


JOIN_TOPIC = "order/join"


@dataclass
class Part:
    """What one rank submits in one group."""

    group: str
    members: tuple[int, ...]
    generation: int = 0
    bits: int = 0
    new: list[tuple[str, bool, bytes]] = field(default_factory=list)
    """Key, whether it may be known by a number, header."""
    closes: bool = False


@dataclass(frozen=True)
class Known:
    """Requests that are agreed on again, as bits."""

    group: str
    bits: int


@dataclass(frozen=True)
class Agreed:
    """A request that all members asked for alike."""

    group: str
    key: str
    number: int | None
    which: tuple[int, ...]
    headers: tuple[bytes, ...]


@dataclass(frozen=True)
class Refused:
    """A request that cannot be."""

    group: str
    key: str
    text: str


@dataclass(frozen=True)
class Flush:
    """The numbers of the group's cache mean nothing any more."""

    group: str


@dataclass(frozen=True)
class Joined:
    """All ranks have joined."""

    last: int


Verdict = Known | Agreed | Refused | Flush | Joined


def pack_parts(parts: Sequence[Part], *, joins: bool) -> tuple[list[bytes], dict[str, Any]]:
    """Payloads and fields of the message ``order``."""
    rows: list[list[Any]] = []
    payloads: list[bytes] = []
    for part in parts:
        if part.closes:
            rows.append([part.group, part.members])
            continue
        keys = [[key, cacheable] for key, cacheable, _ in part.new]
        payloads.extend(header for _, _, header in part.new)
        rows.append([part.group, part.members, part.generation, f"{part.bits:x}", keys])
    return payloads, {"parts": rows, "joins": joins}


def read_parts(received: Message) -> list[Part]:
    """What :func:`pack_parts` wrote; ``ValueError`` or ``TypeError`` when it is not that."""
    parts: list[Part] = []
    if sum(len(row[4]) for row in received.fields["parts"] if len(row) > 2) != len(
        received.payloads
    ):
        raise ValueError("as many headers as keys are needed")
    payloads = iter(received.payloads)
    for row in received.fields["parts"]:
        group, members = str(row[0]), tuple(map(message.whole, row[1]))
        if len(row) == 2:
            parts.append(Part(group, members, closes=True))
            continue
        generation, bits, keys = row[2:]
        new = [(str(key), cacheable is True, next(payloads)) for key, cacheable in keys]
        parts.append(Part(group, members, message.whole(generation), int(bits, 16), new))
    return parts


def pack_verdicts(verdicts: Sequence[Verdict]) -> tuple[list[bytes], dict[str, Any]]:
    """Payloads and fields of the message ``ordered``."""
    rows: list[list[Any]] = []
    payloads: list[bytes] = []
    for verdict in verdicts:
        match verdict:
            case Known(group, bits):
                rows.append(["known", group, f"{bits:x}"])
            case Agreed(group, key, number, which, headers):
                rows.append(["agreed", group, key, number, which, len(headers)])
                payloads.extend(headers)
            case Refused(group, key, text):
                rows.append(["refused", group, key, text])
            case Flush(group):
                rows.append(["flush", group])
            case Joined(last):
                rows.append(["joined", last])
    return payloads, {"verdicts": rows}


def read_verdicts(received: Message) -> list[Verdict]:
    """What :func:`pack_verdicts` wrote."""
    payloads = iter(received.payloads)
    verdicts: list[Verdict] = []
    for row in received.fields["verdicts"]:
        kind, *values = row
        if kind == "known":
            verdicts.append(Known(values[0], int(values[1], 16)))
        elif kind == "agreed":
            group, key, number, which, count = values
            headers = tuple(next(payloads) for _ in range(count))
            verdicts.append(Agreed(group, key, number, tuple(which), headers))
        elif kind == "refused":
            verdicts.append(Refused(*values))
        elif kind == "flush":
            verdicts.append(Flush(*values))
        elif kind == "joined":
            verdicts.append(Joined(*values))
        else:
            raise ValueError(f"{kind!r} is not a verdict")
    return verdicts


def numbers_in(bits: int) -> list[int]:
    """The numbers that stand in ``bits``, ascending."""
    found: list[int] = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
