"""The hosts of a job: read from a command line or a host file, and the ranks that each one gets.

Both common formats of host files are read, line by line::

    node1 slots=4              # Horovod's and Open MPI's
    node2 slots=4 max_slots=8
    node3:2                    # MPICH's
    node4                      # one slot; a host that stands twice has the slots of both lines
    fe80::1%eth0 slots=2       # an IPv6 address; as [fe80::1%eth0]:2 in brackets
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farandole.core.errors import UsageError

_NAME = re.compile(r"(?:\w[\w.-]*@)?\w(?:[\w.-]*\w)?", re.ASCII)
"""A host name or an IPv4 address, with the name of a user before it if ssh is to use another."""

_MOST_SLOTS = 65536
"""More on one host is a typing error."""

_SYNTAX = (
    "Write hosts as node1:4,node2:4 (name or address, colon, number of ranks), and IPv6 addresses "
    "in brackets: [fe80::1]:4."
)


@dataclass(frozen=True, slots=True)
class Host:
    """A host that may run ranks: ``str()`` gives it back in the syntax of ``-H``."""

    name: str
    """Host name, ``user@name``, or address; IPv6 addresses without brackets."""
    slots: int
    """How many ranks it takes, at least 1."""

    def __str__(self) -> str:
        return f"[{self.name}]:{self.slots}" if ":" in self.name else f"{self.name}:{self.slots}"


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of one host: they follow each other."""

    host: str
    ranks: range


def parse(text: str) -> tuple[Host, ...]:
    """Read the value of ``-H``; each host once, in order of first mention.

    ``UsageError`` names the part that cannot be read.

    Example::

        parse("node1:4,node2,[::1]:2")   # slots 4, 1 and 2
    """
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise UsageError(f"-H {text!r} names no host. {_SYNTAX}")
    return _merged(_host(part, f"-H {text}") for part in parts if part)


def read_file(path: str) -> tuple[Host, ...]:
    """Read a host file; ``UsageError`` names the file, the line and what is wrong with it.

    Blank lines and what follows ``#`` count for nothing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"The host file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The host file {path} is not text.") from None
    found = [
        _line(words, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if (words := line.partition("#")[0].split())
    ]
    if not found:
        raise UsageError(f"The host file {path} names no host. Write a line such as: node1 slots=4")
    return _merged(found)


def assign(hosts: Sequence[Host], size: int | None = None) -> tuple[Share, ...]:
    """Deal ``size`` ranks to hosts: each is filled before the next; hosts without a rank drop out.

    ``size`` ``None``: a rank for every slot. ``UsageError`` when there are fewer slots than ranks.

    Example::

        assign(parse("a:2,b:2"), 3)   # Share("a", range(0, 2)), Share("b", range(2, 3))
    """
    slots = sum(host.slots for host in hosts)
    if size is not None and size > slots:
        raise UsageError(
            f"{size} ranks are wanted and the hosts have {slots} slots: "
            f"{', '.join(map(str, hosts))}. Ask for fewer ranks, or give the hosts more slots."
        )
    left = slots if size is None else size
    shares: list[Share] = []
    for host in hosts:
        count = min(host.slots, left)
        if count:
            first = shares[-1].ranks.stop if shares else 0
            shares.append(Share(host.name, range(first, first + count)))
        left -= count
    return tuple(shares)


def _line(words: list[str], where: str) -> Host:
    # Alone in its word, an address needs no brackets.
    bare = _is_ipv6(words[0])
    host = Host(words[0], 1) if bare else _host(words[0], where)
    slots = None if bare or not words[0].endswith(f":{host.slots}") else host.slots
    limit: int | None = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "max_slots", "max-slots"):
            raise UsageError(f"{where}: {word!r} is not understood. Write a line as: node1 slots=4")
        count = _count(value, f"{where}: {word!r}")
        if key != "slots":
            limit = count
        elif slots is not None and slots != count:
            raise UsageError(f"{where}: both {slots} and {count} slots are given.")
        else:
            slots = count
    if slots is None:
        slots = limit or 1
    if limit is not None and slots > limit:
        raise UsageError(f"{where}: slots={slots} is more than max_slots={limit}.")
    return Host(host.name, slots)


def _host(text: str, where: str) -> Host:
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (rest and not rest.startswith(":")):
            raise UsageError(f"{where}: {text!r} is not an IPv6 address in brackets. {_SYNTAX}")
        slots = rest[1:] if rest else "1"
    else:
        name, colon, slots = text.partition(":")
        if not _NAME.fullmatch(name):
            raise UsageError(f"{where}: {text!r} does not begin with a host's name. {_SYNTAX}")
        slots = slots if colon else "1"
    return Host(name, _count(slots, f"{where}: {text!r}"))


def _count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= _MOST_SLOTS:
        raise UsageError(
            f"{where}: {text!r} is not a number of ranks from 1 to {_MOST_SLOTS}. {_SYNTAX}"
        )
    return int(text)


def _is_ipv6(text: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(text), ipaddress.IPv6Address)
    except ValueError:
        return False


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once; names are compared as the network does, without case."""
    names: dict[str, str] = {}
    slots: dict[str, int] = {}
    for host in hosts:
        key = host.name.lower()
        names.setdefault(key, host.name)
        slots[key] = slots.get(key, 0) + host.slots
    return tuple(Host(name, slots[key]) for key, name in names.items())
