from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from farandole.core.clock import Deadline
from farandole.core.secret import Secret

# How long an example takes says something about the machine, not about the code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Where a change is judged, the examples are the same each time; everywhere else they explore.
settings.register_profile("judge", settings.get_profile("steady"), derandomize=True)
settings.load_profile("judge" if os.environ.get("CI") else "steady")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure and keep is none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def secret() -> Secret:
    return Secret.new()


@pytest.fixture
def soon() -> Deadline:
    """Long enough for anything that happens at all."""
    return Deadline.after(20.0)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Every thread and descriptor that a test opens is gone when it ends."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    end = Deadline.after(10.0)
    while not (set(threading.enumerate()) <= threads and _descriptors() == descriptors):
        left_over = set(threading.enumerate()) - threads, _descriptors() ^ descriptors
        assert not end.expired(), left_over
        time.sleep(0.005)


def _descriptors() -> set[tuple[str, str]]:
    names = os.listdir("/proc/self/fd")
    paths = [f"/proc/self/fd/{name}" for name in names]
    # One of them was the listing's own.
    return {(path, os.readlink(path)) for path in paths if os.path.islink(path)}
