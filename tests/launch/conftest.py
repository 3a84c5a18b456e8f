from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher, wait_until

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # These tests run in the background of a shell; the launchers that they start do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert wait_until(lambda: not made.running()), made.running()
