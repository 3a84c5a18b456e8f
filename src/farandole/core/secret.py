"""The job's secret: whoever holds it belongs to the job."""

from __future__ import annotations

import hmac
import secrets

from farandole.core.errors import UsageError

MINIMUM_BYTES = 16


class Secret:
    """A key of at least 16 random bytes. It never shows in ``repr``, errors or logs.

    Example::

        secret = Secret.new()
        child_environment["FARANDOLE_SECRET"] = secret.hex()
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < MINIMUM_BYTES:
            raise UsageError(f"A secret needs at least {MINIMUM_BYTES} bytes, got {len(key)}.")
        self._key = bytes(key)

    @classmethod
    def new(cls) -> Secret:
        """A fresh one of 32 bytes from the operating system's random source."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """Read what :meth:`hex` wrote; ``UsageError`` (without the text) for anything else."""
        try:
            key = bytes.fromhex(text)
        except ValueError:
            raise UsageError("A secret is written as hexadecimal digits.") from None
        return cls(key)

    def hex(self) -> str:
        """The key as hexadecimal digits: for a child's environment or a private file only."""
        return self._key.hex()

    def sign(self, message: bytes) -> bytes:
        """HMAC-SHA256 of ``message`` (32 bytes)."""
        return hmac.digest(self._key, message, "sha256")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return "Secret(hidden)"
