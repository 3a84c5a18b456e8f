"""An agent whose node 0 is lost looks for the next one, which may not want it at first."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.launch import link
from farandole.launch.pod_agent import PAUSE

LIMIT = 30.0
REFUSALS = 2

AGENT = """
import sys
from farandole.core.address import Address
from farandole.core.secret import Secret
from farandole.launch import pod_agent

task = {"form": "command", "argv": ["true"], "environment": {}, "fork": False}
find = lambda: Address.parse(sys.argv[1])
end = lambda *_: sys.exit(1)
sys.exit(pod_agent.serve(3, find, Secret.from_hex(sys.stdin.read()), task, 30.0, end))
"""


class NodeZero:
    """Takes the agent in, is lost, refuses it some times, takes it in again and lets it go."""

    def __init__(self) -> None:
        self.came: list[float] = []

    def on_message(self, peer: Peer, message: bytes) -> None:
        """See ``core.server.Handler``."""
        if link.unpack(message).kind != "ready":
            return
        self.came.append(time.monotonic())
        if len(self.came) in (1, REFUSALS + 2):
            tell(peer, "prepare", stdin=False, environment=None)
            tell(peer, "start", ranks=[], replaces=True, terminal={})
        if len(self.came) == REFUSALS + 2:
            tell(peer, "finish", well=True)
        else:
            peer.close()

    def on_close(self, peer: Peer, error: Exception | None) -> None:
        """See ``core.server.Handler``."""


def tell(peer: Peer, kind: str, **fields: Any) -> None:
    peer.send(link.pack(kind, b"", fields))


def test_it_asks_now_and_then_while_it_is_refused() -> None:
    secret, node_0 = Secret.new(), NodeZero()
    server = Server(secret, node_0)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AGENT, str(server.address)],
            input=secret.hex(), capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    finally:
        server.close()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("node 0 is lost") == 1
    assert len(node_0.came) == REFUSALS + 2
    pairs = zip(node_0.came, node_0.came[1:], strict=False)
    assert min(later - earlier for earlier, later in pairs) >= PAUSE
