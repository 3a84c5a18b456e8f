"""What is said of a host that cannot be used, and what travels to one that can."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import AuthenticationError, ConnectionLost, SetupError
from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.launch import link, remote, ssh

PYTHON = "/opt/python"


@pytest.mark.parametrize(
    ("code", "words", "said"),
    [
        (
            255,
            ["Warning: something", "ssh: connect to host b port 22: No route to host"],
            r"^b cannot be reached: ssh: connect .*: No route to host\. `ssh b true` must work",
        ),
        (255, [], r"^b cannot be reached: it gave no reason"),
        (127, ["sh: 1: exec: /opt/python: not found"], r"^b has no Python /opt/python .*--remote-"),
        (126, ["sh: /opt/python: Permission denied"], r"^b has no Python /opt/python"),
        (1, ["ModuleNotFoundError: No module named 'farandole'"], r"has no Farandole.*pip install"),
        (
            1,
            ["ImportError: cannot import name 'remote' from 'farandole.launch' (/x/__init__.py)"],
            r"has no Farandole, or an old one",
        ),
        (ssh.REFUSED, ["noise", "The folder /x is not there"], r"^b: The folder /x is not there$"),
        (-9, ["ValueError: 3"], r"^b: the agent there ended with code -9: ValueError: 3$"),
    ],
)
def test_why_a_host_cannot_be_used(code: int, words: list[str], said: str) -> None:
    assert re.search(said, ssh.explain("b", code, words, PYTHON))


def test_the_name_behind_an_alias(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu1\n  HostName 10.9.8.7\n")
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    command = ("ssh", "-F", str(config))
    assert ssh.real_name(command, "gpu1") == "10.9.8.7"
    assert ssh.real_name(command, "me@gpu1") == "10.9.8.7"
    assert ssh.real_name(command, "other") == "other"
    assert ssh.real_name(("false",), "me@other") == "other"
    with pytest.raises(SetupError, match="Ranks on other need ssh, and /no/such/ssh"):
        ssh.real_name(("/no/such/ssh",), "other")


def test_what_is_of_one_host_does_not_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {
        "PATH": "/bin", "HOME": "/home/me", "SSH_AUTH_SOCK": "/tmp/x", "XDG_RUNTIME_DIR": "/run/1",
        "CUDA_VISIBLE_DEVICES": "1", "DATA": "/data", "PYTHONPATH": f"src{os.pathsep}/abs",
    }  # fmt: skip
    wish = remote.wish_for(3, environ, {"CUDA_VISIBLE_DEVICES": "0"})
    assert sorted(wish["environ"]) == ["DATA", "PATH", "PYTHONPATH"]
    assert wish["given"] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert wish["pythonpath"] == [str(tmp_path / "src"), "/abs"]
    assert wish["folder"] == str(tmp_path)


def refusal(**changes: Any) -> str:
    """What the agent of another host says to such a wish."""
    wish = {
        **remote.wish_for(0, dict(os.environ), {}),
        "address": "127.0.0.1:1", "secret": Secret.new().hex(), "limit": 5.0,
        "task": {"form": "command", "argv": ["true"], "fork": False, "ranks": [{}]},
        **changes,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ssh.BOOTSTRAP],
        input=json.dumps(wish) + "\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ssh.REFUSED, done.stderr
    return ssh.explain("b", done.returncode, done.stderr.splitlines(), PYTHON)


def test_an_agent_that_cannot_do_what_is_wished_for_says_why() -> None:
    assert re.search(r"b: Farandole is \S+ there and 9\.9 here", refusal(version="9.9"))
    assert "The folder /no/such/folder cannot be entered there" in refusal(folder="/no/such/folder")
    assert "b: Cannot connect to 127.0.0.1:1" in refusal()


class Keeper:
    """A server's handler that keeps what comes."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.frames: list[bytes] = []

    def on_message(self, peer: Peer, message: bytes) -> None:
        self.peers.append(peer)
        self.frames.append(message)

    def on_close(self, peer: Peer, error: object) -> None:
        self.frames.append(b"")


def test_a_link_carries_messages_both_ways() -> None:
    secret, keeper = Secret.new(), Keeper()
    server = Server(secret, keeper)
    try:
        agent = link.connect(server.address, secret, Deadline.after(10.0))
        assert agent.own_address == "127.0.0.1"
        agent.send("output", bytes(range(256)) * 4000, rank=3)
        while not keeper.frames:
            agent.flush()
        message = link.unpack(keeper.frames[0])
        assert (message.kind, message.fields) == ("output", {"rank": 3})
        assert message.payload == bytes(range(256)) * 4000
        keeper.peers[0].send(link.pack("stop", b"", {"number": 15}))
        keeper.peers[0].close()
        got = []
        while not agent.closed:
            got += agent.receive()
        assert [(each.kind, each.fields) for each in got] == [("stop", {"number": 15})]
        agent.send("gone")  # to nobody
        agent.close()
    finally:
        server.close()


def test_a_link_is_made_with_those_alone_who_hold_the_secret() -> None:
    server = Server(Secret.new(), Keeper())
    try:
        with pytest.raises(AuthenticationError):
            link.connect(server.address, Secret.new(), Deadline.after(10.0))
    finally:
        server.close()
    with pytest.raises(ConnectionLost, match="Cannot connect"):
        link.connect(server.address, Secret.new(), Deadline.after(10.0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        with pytest.raises(OSError, match=r"did not answer within 0\.2 s"):
            link.connect(address, Secret.new(), Deadline.after(0.2))
