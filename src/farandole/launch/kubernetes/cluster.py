"""A cluster, as narrow as we need it: the verbs, and what can go wrong in each.

The implementation is kr8s's (:mod:`farandole.launch.kubernetes.client`); tests may have another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from farandole.core.errors import SetupError
from farandole.launch.kubernetes.kinds import Kind
from farandole.launch.kubernetes.submission import Manifest


class Refused(SetupError):
    """The server said no. ``code`` is HTTP's, ``reason`` Kubernetes' word for it."""

    def __init__(self, message: str, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Unreachable(SetupError):
    """The server did not answer, however often it was asked."""


class Cluster(Protocol):
    """One namespace of one cluster, by the rights of one user."""

    @property
    def namespace(self) -> str:
        """Where objects are made and looked for."""
        ...

    @property
    def server(self) -> str:
        """Its address, for people."""
        ...

    async def version(self) -> tuple[int, int]:
        """Major and minor version of the server."""
        ...

    async def serves(self, kind: Kind) -> bool:
        """Whether the server knows objects of this kind."""
        ...

    async def rules(self) -> list[Manifest]:
        """What this user may do in the namespace, as rules of a Role; perhaps not all of them.

        Servers that ask others (a cloud's own rights) do not know all rules: what is not among
        them has to be asked for by :meth:`allowed`.
        """
        ...

    async def allowed(self, verb: str, kind: Kind, subresource: str = "") -> bool:
        """Whether this user may do ``verb`` with objects of ``kind`` in the namespace."""
        ...

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object, strictly: a field that the server does not know is refused.

        ``dry_run``: only ask whether it would be accepted. Returns what the server made of it.
        """
        ...

    async def get(self, kind: Kind, name: str) -> Manifest | None:
        """An object; ``None`` when there is none of that name."""
        ...

    async def find(self, kind: Kind, selector: str = "") -> list[Manifest]:
        """The objects that labels select."""
        ...

    async def patch(self, kind: Kind, name: str, change: Manifest) -> Manifest:
        """Change fields of an object (a JSON merge patch)."""
        ...

    async def delete(self, kind: Kind, name: str) -> bool:
        """Delete an object and, in the background, what it owns; whether there was one."""
        ...

    def log(
        self,
        pod: str,
        container: str,
        *,
        since: str | None = None,
        follow: bool = False,
        previous: bool = False,
    ) -> AsyncIterator[tuple[str, bytes]]:
        """The lines of a container's output, each with its time (RFC 3339); from ``since`` on.

        Raises :class:`Unreachable` when the connection breaks off.
        """
        ...


def say(kind: Kind, verb: str, error: Refused) -> str:
    """What was refused and what to do, in one line."""
    what = f"{verb} {kind.plural}"
    if error.code == 401:
        return error.message
    if error.code == 403:
        return (
            f"You may not {what} in this namespace: {error.message} Ask for the rights of "
            "`farandole submit --print-rbac`."
        )
    return f"The cluster refused to {what}: {error.message}"
