"""Sockets of ours must not live on in forked children.

A data loader's worker that inherits a rank's connection would keep it open after the rank's death,
and nobody would notice that the rank is gone. So every owner of a socket is told in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something with descriptors that a forked child has no use for."""

    def abandon(self) -> None:
        """Close this process's copies of the descriptors. No lock may be taken: it may be held."""
        ...


_owners: weakref.WeakSet[Inherited] = weakref.WeakSet()


def abandon_in_children(owner: Inherited) -> None:
    """Call ``owner.abandon()`` in every child that is forked from now on, while it exists."""
    _owners.add(owner)


def _abandon_all() -> None:
    for owner in list(_owners):
        owner.abandon()
    _owners.clear()


os.register_at_fork(after_in_child=_abandon_all)
