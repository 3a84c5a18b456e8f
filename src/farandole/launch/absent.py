"""What an agent has in place of its channel while node 0 is lost, and looked for."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.launch.channel import Channel, Message
from farandole.launch.link import Link

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


class Absent(Channel):
    """Looks for node 0 by ``connect``, in a thread; becomes readable when that is over.

    What workers print meanwhile goes to this process's own output: on a cluster, the pod's log.
    Everything else is for the agent to tell when node 0 is there again.
    """

    def __init__(self, connect: Callable[[], Link]) -> None:
        ours, self._wake = socket.socketpair()
        super().__init__(ours)
        self.found: Link | None = None
        """The connection to whoever is node 0 now."""
        self._connect = connect
        threading.Thread(target=self._look, name="farandole-search", daemon=True).start()

    def send(self, kind: str, payload: bytes = b"", /, **fields: Any) -> None:
        """See :class:`Channel`."""
        if kind == "output" and payload:
            os.write(_DESCRIPTORS[fields["stream"]], payload)

    def receive(self) -> list[Message]:
        """Nothing; closes when nobody was found."""
        self.closed = self.found is None
        return []

    def close(self) -> None:
        """See :class:`Channel`."""
        super().close()
        self._wake.close()

    def _look(self) -> None:
        try:
            self.found = self._connect()
        except FarandoleError as error:
            os.write(2, f"farandole: {error}\n".encode())
        finally:  # whatever went wrong: the agent must not wait for nothing
            with contextlib.suppress(OSError):  # it was noticed already
                self._wake.send(b"\0")
