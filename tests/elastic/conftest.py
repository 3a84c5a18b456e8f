from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "launch"))
from launching import Launcher, wait_until


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Starts jobs; none of their processes is left, whatever happened to them."""
    shared_memory = set(Path("/dev/shm").iterdir())
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert wait_until(lambda: not made.running()), made.running()
    left = set(Path("/dev/shm").iterdir()) - shared_memory
    assert not {each for each in left if each.name.startswith("torch_")}, left
