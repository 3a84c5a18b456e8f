"""Which of this machine's addresses another host can reach. The routing table knows."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from typing import Any

from farandole.core.address import Address
from farandole.core.errors import UsageError

_SIOCGIFADDR = 0x8915
_ANYWHERE = Address("192.0.2.1", 9)
"""An address that no machine has (RFC 5737): what leads there is the default route."""


def own_address(towards: Address, interface: str | None = None) -> str:
    """The address from which packets to ``towards`` leave; of ``interface``, if one is named.

    Sends nothing. ``OSError`` when the name cannot be resolved or nothing leads there;
    ``UsageError`` when the interface has no IPv4 address.
    """
    if interface is not None:
        return _address_of(interface)
    family, kind, protocol, _, target = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # connecting UDP sends nothing
        probe.connect(target)
        return str(probe.getsockname()[0])


def outward_address(interface: str | None = None) -> str:
    """An address of this machine for others of which none is known yet.

    That of ``interface``, if one is named; else where the default route leaves; else of any
    interface; else loopback.
    """
    if interface is not None:
        return _address_of(interface)
    with contextlib.suppress(OSError):
        return own_address(_ANYWHERE)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(UsageError):
            if name != "lo":
                return _address_of(name)
    return "127.0.0.1"


def is_own(host: str) -> bool:
    """Whether ``host``, a name or an address, is this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"FARANDOLE_INTERFACE is {interface!r}, which has no IPv4 address here "
                f"({error.strerror}). This machine has: {names}."
            ) from None
    return socket.inet_ntoa(answer[20:24])
