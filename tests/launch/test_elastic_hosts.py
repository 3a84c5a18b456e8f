"""An elastic job on several hosts: one that is lost, one that comes, over a network that breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from launching import Launcher, wait_until
from network import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import os, sys, time
import torch
import farandole.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    print("trains on", hvd.size(), "from", state.step, flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
        # All ranks look at the same moment, or one would leave the others alone.
        if hvd.allreduce(torch.tensor([float(os.path.exists("enough"))]), name="enough") > 0:
            break
        state.commit()

train(state)
print("done on", hvd.size(), os.environ["HOROVOD_HOSTNAME"], flush=True)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Network(tmp_path_factory.mktemp("network"))
    yield made
    made.close()


def start(network: Network, launcher: Launcher, *options: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        network.inside(
            "head", sys.executable, "-c", "from farandole.cli.main import main; main()", "run",
            "--ssh", network.ssh, "--remote-python", network.python(), *options,
            launcher.script(TRAIN),
        ),
        cwd=launcher.folder,
        env={**os.environ, "FARANDOLE_TEST_MARK": launcher.mark, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    launcher.started.append(process)  # type: ignore[arg-type]
    return process


def wait_for(process: subprocess.Popen[str], text: str, seen: list[str]) -> None:
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, "".join(seen)
        seen.append(line)
    seen.append(line)


@pytest.mark.parametrize("first", ["10.78.0.254 slots=1\n", "10.78.0.254 slots=1\na slots=1\n"])
def test_a_job_that_begins_on_the_launchers_machine_takes_in_others(
    network: Network, launcher: Launcher, first: str
) -> None:
    hosts = launcher.folder / "hosts"
    hosts.write_text(first)
    process = start(network, launcher, "-np", "1", "--min-np", "1", "--hostfile", str(hosts))
    seen: list[str] = []
    wait_for(process, f"trains on {first.count('slots')}", seen)
    hosts.write_text("10.78.0.254 slots=1\na slots=2\n")
    wait_for(process, "trains on 3", seen)
    (launcher.folder / "enough").touch()
    assert process.stdout is not None
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0, "".join(seen) + rest
    assert "done on 3 10.78.0.254" in rest
    assert "done on 3 a" in rest


def test_a_host_comes_in_and_one_whose_cable_is_pulled_is_done_without(
    network: Network, launcher: Launcher
) -> None:
    hosts = launcher.folder / "hosts"
    hosts.write_text("a slots=2\n")
    process = start(network, launcher, "-np", "2", "--min-np", "1", "--hostfile", str(hosts))
    seen: list[str] = []
    wait_for(process, "trains on 2", seen)
    hosts.write_text("a slots=2\nb slots=1\n")
    wait_for(process, "trains on 3", seen)
    network.unplug("b")
    wait_for(process, "training goes on with 2 ranks", seen)
    wait_for(process, "trains on 2", seen)
    (launcher.folder / "enough").touch()
    assert process.stdout is not None
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0, "".join(seen) + rest
    assert "done on 2 a" in rest
    # The unplugged host notices by itself.
    assert wait_until(lambda: not launcher.running(), limit=30.0), launcher.running()
