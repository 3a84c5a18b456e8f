"""What an agent has instead of a channel, while node 0 is looked for."""

from __future__ import annotations

import select
import threading

import pytest

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import SetupError
from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.launch import link
from farandole.launch.absent import Absent

LIMIT = 20.0


class Quiet:
    """A handler of nothing."""

    def on_message(self, peer: Peer, message: bytes) -> None:
        """See ``core.server.Handler``."""

    def on_close(self, peer: Peer, error: Exception | None) -> None:
        """See ``core.server.Handler``."""


def wait_for(absent: Absent) -> None:
    readable, _, _ = select.select([absent], [], [], LIMIT)
    assert readable


def test_it_has_the_connection_when_node_0_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    secret, server_is_there = Secret.new(), threading.Event()
    where: list[Address] = []

    def connect() -> link.Link:
        assert server_is_there.wait(LIMIT)
        return link.connect(where[0], secret, Deadline.after(LIMIT))

    absent = Absent(connect)
    # What workers print is not lost, and holds nobody up.
    absent.send("output", b"a loss\n", rank=3, stream="stdout")
    absent.send("output", b"a warning\n", rank=3, stream="stderr")
    absent.send("output", rank=3, stream="stdout")
    absent.send("exited", rank=3, code=0)
    assert absent.unsent == 0
    assert absent.found is None
    server = Server(secret, Quiet())
    where.append(server.address)
    server_is_there.set()
    wait_for(absent)
    assert absent.receive() == []
    assert absent.found is not None
    assert not absent.closed
    absent.found.close()
    absent.close()
    server.close()
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("a loss\n", "a warning\n")


def test_it_closes_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: shown.set())

    def connect() -> link.Link:
        raise ValueError("no address")

    absent = Absent(connect)
    wait_for(absent)
    assert absent.receive() == []
    assert absent.closed
    assert shown.wait(LIMIT)
    absent.close()


def test_it_closes_when_nobody_was_found(capfd: pytest.CaptureFixture[str]) -> None:
    def connect() -> link.Link:
        raise SetupError("Node 0 did not answer.")

    absent = Absent(connect)
    wait_for(absent)
    assert absent.receive() == []
    assert absent.closed
    absent.close()
    assert "farandole: Node 0 did not answer." in capfd.readouterr().err
