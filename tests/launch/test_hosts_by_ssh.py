"""Ranks on several hosts: what starts, what is seen of it, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher, wait_until
from network import ADDRESSES, IPV6, Network, why_not

from farandole.core.address import Address

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import os, sys, time
import torch
import farandole.torch as hvd
hvd.init()
torch.manual_seed(7)
model = torch.nn.Linear(8, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
torch.manual_seed(hvd.rank())
steps = int(sys.argv[1])
for step in range(steps):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    if step == 3:
        print("trains", flush=True)
    if steps > 1000:
        time.sleep(0.01)
weights = hvd.allgather(model.weight.detach().reshape(1, -1))
same = bool((weights == weights[0]).all())
env = os.environ
print("rank", hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
      env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["FARANDOLE_CROSS_RANK"],
      "same" if same else "differ", "good" if loss < 0.5 else "bad", env.get("GIVEN"), flush=True)
store = env["FARANDOLE_STORE"].rpartition(":")[0]
print("address", hvd.rank(), store, env["MASTER_ADDR"], flush=True)
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Network(tmp_path_factory.mktemp("network"))
    yield made
    made.close()


class Hosts:
    """Launches on some host of the network."""

    def __init__(self, network: Network, launcher: Launcher) -> None:
        self.network = network
        self.launcher = launcher

    def start(self, *arguments: str, on: str = "head", **env: str) -> subprocess.Popen[str]:
        options = ["--ssh", self.network.ssh, "--remote-python", self.network.python()]
        process = subprocess.Popen(
            self.network.inside(
                on, sys.executable, "-c", "from farandole.cli.main import main; main()", "run",
                *options, *arguments,
            ),
            cwd=self.launcher.folder,
            env={**os.environ, "FARANDOLE_TEST_MARK": self.launcher.mark, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.launcher.started.append(process)  # type: ignore[arg-type]
        return process

    def run(
        self, *arguments: str, on: str = "head", **env: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, on=on, **env)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def hosts(network: Network, launcher: Launcher) -> Hosts:
    return Hosts(network, launcher)


@pytest.mark.parametrize(
    ("on", "named", "addresses"),
    [
        ("head", "a:2,b:2", ADDRESSES),
        ("a", f"{ADDRESSES['a']}:2,b:2", ADDRESSES),
        ("head", f"[{IPV6['a']}]:2,[{IPV6['b']}]:2", IPV6),
    ],
)
def test_two_ranks_on_each_of_two_hosts_train(
    hosts: Hosts, on: str, named: str, addresses: dict[str, str]
) -> None:
    script = hosts.launcher.script(TRAIN)
    done = hosts.run("-v", "-H", named, script, "300", on=on, GIVEN="yes")
    assert done.returncode == 0, done.stderr
    assert "4 ranks forked: pids" in done.stderr
    for rank, local, cross in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)):
        assert (
            f"[{rank}] rank {rank} 4 {local} 2 {cross} {local} 2 {cross} same good yes"
            in done.stdout
        )
        store = str(Address(addresses[on], 1)).removesuffix(":1")
        assert f"[{rank}] address {rank} {store} {addresses['a']}" in done.stdout


def test_the_users_own_process_group_works_across_hosts(hosts: Hosts) -> None:
    script = hosts.launcher.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x); print('sum', x.item())\n"
        "dist.destroy_process_group()\n"
    )
    done = hosts.run("-H", "a:1,b:2", script, GLOO_SOCKET_IFNAME="cable")
    assert done.returncode == 0, done.stderr
    assert "[0-2] sum 3.0" in done.stdout


def test_secrets_and_environment_are_in_no_command_line(hosts: Hosts) -> None:
    script = hosts.launcher.script(
        "import os, time, pathlib\n"
        "pathlib.Path('secret-' + os.environ['RANK']).write_text(os.environ['FARANDOLE_SECRET'])\n"
        "print('there', flush=True)\ntime.sleep(1000)\n"
    )
    process = hosts.start("-H", "a:1,b:1", script, TOKEN="of-the-user")
    assert process.stdout is not None
    process.stdout.readline()
    secret = (hosts.launcher.folder / "secret-0").read_text()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(b"from farandole.launch import remote" in line for line in lines)
    assert not [line for line in lines if secret.encode() in line or b"of-the-user" in line]
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_the_first_failure_ends_all_hosts(hosts: Hosts) -> None:
    script = hosts.launcher.script(
        "import os, time\nif os.environ['RANK'] == '3': raise ValueError('of rank 3')\n"
        "time.sleep(1000)\n"
    )
    done = hosts.run("-H", "a:2,b:2", script)
    assert done.returncode == 1
    assert "rank 3 raised ValueError (stopped: ranks 0-2)" in done.stderr
    assert not hosts.launcher.running()


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_nothing_is_left_on_any_host(hosts: Hosts, how: str) -> None:
    script = hosts.launcher.script(
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('there', flush=True)\ntime.sleep(1000)\n"
    )
    process = hosts.start("-H", "a:2,b:2", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == (143 if how == "terminate" else -9)
    assert wait_until(lambda: not hosts.launcher.running(), limit=5.0), hosts.launcher.running()


def test_ctrl_c_while_hosts_get_ready(hosts: Hosts) -> None:
    process = hosts.start("-H", "a:2,10.78.0.77:2", hosts.launcher.script("pass"))
    assert wait_until(lambda: "10.78.0.77 exec" in str(hosts.launcher.running()), limit=20.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "ended by SIGINT" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-H", "a:1,10.78.0.77:1"], "10.78.0.77 cannot be reached: ssh: connect to host"),
        (["-H", "a:1,nobody@b:1"], "nobody@b cannot be reached: .*Permission denied"),
        (["-H", "a:1,no-such-host:1"], "no-such-host cannot be reached: no-such-host: "),
        (["-H", "a:1,b:1", "--remote-python", "/no/python"], "has no Python /no/python"),
        (
            ["-H", "a:1,b:1", "--remote-python", "/usr/bin/python3"],
            "has no Farandole|is not installed there",
        ),
        (["-H", "b:1", "--ssh", "/no/ssh"], "Ranks on b need ssh, and /no/ssh cannot be started"),
    ],
)
def test_a_host_that_cannot_be_used_is_named(hosts: Hosts, arguments: list[str], said: str) -> None:
    began = time.monotonic()
    done = hosts.run("--start-timeout", "8", *arguments, hosts.launcher.script("print('begun')"))
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr
    assert "begun" not in done.stdout
    assert time.monotonic() - began < 25


def test_an_unplugged_host_ends_the_job(hosts: Hosts) -> None:
    process = hosts.start("-H", "a:2,b:2", hosts.launcher.script(TRAIN), "1000000")
    assert process.stdout is not None
    while "trains" not in (line := process.stdout.readline()):
        assert line
    hosts.network.unplug("b")
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    took = time.monotonic() - began
    assert process.returncode == 1
    assert "rank 2 was lost with b (that is, ranks 2-3): ssh says: Timeout, server" in err
    assert took < 30
    # The unplugged host notices by itself.
    assert wait_until(lambda: not hosts.launcher.running(), limit=30.0), hosts.launcher.running()
