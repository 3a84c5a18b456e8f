"""Values of any size in a job's store: cut into parts that a message can carry."""

from __future__ import annotations

from farandole.core.clock import Deadline
from farandole.core.store import LocalStore, Store

PART = 16 << 20
"""Bytes of one part: far below the longest message."""


def put(store: Store, key: str, value: bytes) -> None:
    """Lay a value down; who waits for it is woken when all of it is there."""
    starts = range(0, len(value), PART)
    for start in starts:
        store.set(f"{key}/{start // PART}", value[start : start + PART])
    store.set(key, str(len(starts)).encode())


def get(store: Store, key: str, deadline: Deadline) -> bytes:
    """Wait for a value. ``DeadlineError`` names the key."""
    parts = int(store.get(key, deadline))
    return b"".join(store.get(f"{key}/{part}", deadline) for part in range(parts))


def take(store: LocalStore, key: str) -> bytes | None:
    """Take a value out of a store of this process; ``None`` when it is not there."""
    parts = store.peek(key)
    if parts is None:
        return None
    names = [f"{key}/{part}" for part in range(int(parts))]
    value = b"".join(store.peek(name) or b"" for name in names)
    for name in [key, *names]:
        store.delete(name)
    return value
