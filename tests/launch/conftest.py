from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher, wait_until


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert wait_until(lambda: not made.running()), made.running()
