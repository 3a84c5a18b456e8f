"""Host and port, as text and as a pair."""

from __future__ import annotations

from typing import NamedTuple

from farandole.core.errors import UsageError


class Address(NamedTuple):
    """Where a socket listens: a host name or an IP address, and a TCP port.

    Example::

        Address.parse("[::1]:4711")     # Address(host="::1", port=4711)
        str(Address("node7", 4711))     # "node7:4711"
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port`` or ``[IPv6 address]:port``; ``UsageError`` for anything else."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        digits = port if port.isascii() and port.isdigit() and len(port) <= 5 else "0"
        if not colon or not host or any(c.isspace() for c in host) or not 0 < int(digits) < 65536:
            raise UsageError(
                f"{text!r} is not an address. Write host:port, or [address]:port for IPv6, with a "
                "port between 1 and 65535."
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
