"""``horovod.run`` and ``horovodrun`` with ranks on other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
from farandole.horovod.runner import run

def place(offset):
    import os
    import horovod.torch as hvd, torch
    hvd.init()
    total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item()
    return hvd.rank() + offset, hvd.local_rank(), hvd.cross_rank(), total, os.environ["TOKEN"]

for result in run(place, args=(10,), num_proc=3, hosts="a:2,b:2"):
    print(*result)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Network(tmp_path_factory.mktemp("network"))
    yield made
    made.close()


@pytest.fixture
def environ(network: Network, tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose ``ssh`` knows the hosts."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/{network.ssh} "$@"\n')
    ssh.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOKEN": "of-the-user"}


def on_head(
    network: Network, environ: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        network.inside("head", sys.executable, *words),
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip


def test_a_function_is_called_on_two_hosts(network: Network, environ: dict[str, str]) -> None:
    done = on_head(network, environ, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "10 0 0 6.0 of-the-user",
        "11 1 0 6.0 of-the-user",
        "12 0 1 6.0 of-the-user",
    ]


def test_a_command_is_run_on_two_hosts(network: Network, environ: dict[str, str]) -> None:
    words = ["-np", "2", "-H", "a:1,b:1", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE"]
    done = on_head(network, environ, "-m", "farandole.horovod.runner.launch", *words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]
