from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
from control_ranks import QUICK, Ranks, eventually

from farandole.core.config import Settings


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Every thread and descriptor that a test opens is gone when it ends."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    eventually(lambda: set(threading.enumerate()) <= threads)
    assert _descriptors() <= descriptors


@pytest.fixture
def ranks(no_leaks: None) -> Iterator[Callable[..., Ranks]]:
    """Make :class:`Ranks`; what they leave open is closed, and nothing may leak."""
    made: list[Ranks] = []

    def make(size: int, settings: Settings = QUICK) -> Ranks:
        made.append(Ranks(size, settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _descriptors() -> set[str]:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    # One of them was the listing's own.
    return {path for path in paths if os.path.islink(path)}
