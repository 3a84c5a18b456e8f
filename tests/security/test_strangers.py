"""Nobody without the job's secret gets anything from a running job, or changes what it computes.

A job trains on two ranks while strangers connect, again and again, to every socket on which any of
its processes listens, from before the ranks have met until they end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from farandole.core.session import HELLO_BYTES, MAGIC

sys.path.append(str(Path(__file__).parents[1] / "launch"))
from launching import Launcher, wait_until

Where = tuple[str, int]

SCRIPT = """
import pathlib, sys
import torch
import farandole.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
model = torch.nn.Linear(16, 4)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
)
alone = torch.nn.Linear(16, 4)
alone.load_state_dict(model.state_dict())
plain = torch.optim.SGD(alone.parameters(), lr=0.01)
step, ending = 0, 0.0
while not ending:
    step += 1
    total = hvd.allreduce(torch.full((500,), float(step * (rank + 1))), op=hvd.Sum, name="total")
    assert total.tolist() == [step * 3.0] * 500, (step, total)
    inputs = torch.ones(size, 16) * torch.arange(1.0, size + 1).unsqueeze(1) / step
    model(inputs[rank]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sum(alone(inputs[one]).sum() for one in range(size)).div(size).backward()
    plain.step()
    plain.zero_grad()
    asked = float(pathlib.Path("end").exists())
    ending = hvd.allreduce(torch.tensor(asked), op=hvd.Max, name="ending").item()
    if step == 20:
        pathlib.Path(f"under-way-{rank}").touch()
for ours, theirs in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(ours, theirs)
print("right after", "enough" if step > 20 else step, "steps")
"""


class Opens:
    """What executes code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("intruded", "w")


PAYLOADS = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\nHost: job\r\n\r\n",
    "zeros": bytes(4096),
    "huge lengths": b"\xff" * 4096,
    "a pickle": pickle.dumps(Opens()),
    "a pickle behind its length": len(pickle.dumps(Opens())).to_bytes(8, "little")
    + pickle.dumps(Opens()),
    "noise": os.urandom(1024),
    "a hello with a wrong proof": MAGIC + bytes(HELLO_BYTES - len(MAGIC)) + b"\x01" * 32,
    "a hello and a message": MAGIC + bytes(HELLO_BYTES - len(MAGIC)) + b"\x00\x00\x00\x01" * 64,
}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert wait_until(lambda: not made.running()), made.running()


def listening(launcher: Launcher) -> set[Where]:
    """The addresses on which processes of the job accept connections."""
    found: set[Where] = set()
    for line in launcher.running():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(line.split()[0]))
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((one.laddr.ip, one.laddr.port))
    return found


class Strangers:
    """Threads that connect to all that listens, and send what they like, until told to stop."""

    def __init__(self, launcher: Launcher) -> None:
        self.ours: set[Where] = set()
        """Those that greeted as our servers do."""
        self.others: set[Where] = set()
        self.answers: set[bytes] = set()
        """What came after the greeting."""
        self.unfinished: list[str] = []
        """Connections to our servers that were not ended by them."""
        self._launcher = launcher
        self._silent: list[socket.socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        for one in self._silent:
            one.close()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            for where in listening(self._launcher):
                if where not in self.ours | self.others:
                    with contextlib.suppress(OSError):
                        self._silent.append(socket.create_connection(where, timeout=5.0))
                for name, payload in PAYLOADS.items():
                    self._bother(where, name, payload)

    def _bother(self, where: Where, name: str, payload: bytes) -> None:
        try:
            with socket.create_connection(where, timeout=5.0) as stranger:
                stranger.settimeout(0.2 if where in self.others else 5.0)
                stranger.sendall(payload)
                stranger.shutdown(socket.SHUT_WR)
                self._listen_to(stranger, where, name)
        except TimeoutError:
            if where in self.ours:
                self.unfinished.append(name)
            else:
                self.others.add(where)  # Gloo says nothing to strangers, and keeps them waiting
        except OSError:
            pass  # refused by closing the connection, which is as good

    def _listen_to(self, stranger: socket.socket, where: Where, name: str) -> None:
        said = b""
        while more := stranger.recv(4096):
            said += more
            if said.startswith(MAGIC):
                self.ours.add(where)
        if where in self.ours and len(said) >= HELLO_BYTES:
            self.answers.add(said[HELLO_BYTES:])
        elif said:
            self.answers.add(said)
        else:
            self.others.add(where)


@pytest.fixture(scope="module")
def store_hello() -> bytes:
    """What a client of torch's key-value store says first; the store echoes its last 4 bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def knock() -> None:
            with contextlib.suppress(RuntimeError):
                dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=1))

        client = threading.Thread(target=knock)
        client.start()
        said = b""
        with listener.accept()[0] as connection:
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while True:
                    said += connection.recv(4096)
    client.join(20.0)
    return said


def speaks_tcp_store(where: Where, hello: bytes) -> bool:
    """Whether torch's key-value store, which asks nobody for a secret, answers there."""
    with contextlib.suppress(OSError), socket.create_connection(where, timeout=5.0) as stranger:
        stranger.settimeout(2.0)
        stranger.sendall(hello)
        return stranger.recv(4096) == hello[-4:]
    return False


@pytest.mark.slow
def test_strangers_at_every_socket_of_a_job_change_nothing(
    launcher: Launcher, tmp_path: Path, store_hello: bytes
) -> None:
    script = launcher.script(SCRIPT)
    process = launcher.start("-np", "2", script)
    with Strangers(launcher) as strangers:
        under_way: Callable[[], bool] = lambda: all(  # noqa: E731
            (tmp_path / f"under-way-{rank}").exists() for rank in (0, 1)
        )
        met = wait_until(lambda: under_way() or process.poll() is not None, 80.0)
        assert met
        assert process.poll() is None, process.communicate()
        assert wait_until(lambda: bool(strangers.ours) and bool(strangers.others), 30.0)
        stores = [where for where in listening(launcher) if speaks_tcp_store(where, store_hello)]
    (tmp_path / "end").touch()
    out, err = process.communicate(timeout=60.0)
    assert process.returncode == 0, err.decode()
    assert "[0-1] right after enough steps" in out.decode().splitlines()
    assert stores == []
    assert strangers.unfinished == []
    assert strangers.answers <= {b"", b"refused: that is another secret."}
    assert not (tmp_path / "intruded").exists()
    refusals = [line for line in err.decode().splitlines() if "Refused a connection" in line]
    servers = [line.partition(" to ")[2].partition(": ")[0] for line in refusals]
    assert len(servers) == len(set(servers)) == len(strangers.ours), err.decode()


@pytest.mark.slow
def test_a_tcp_store_would_be_found(store_hello: bytes) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert speaks_tcp_store(("127.0.0.1", store.port), store_hello)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not speaks_tcp_store(silent.getsockname(), store_hello)
