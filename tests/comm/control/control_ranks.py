"""Ranks of a control channel: threads that share a store, or real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from farandole.comm.control.channel import Control
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.secret import Secret
from farandole.core.store import LocalStore

LIMIT = 20.0
"""Seconds after which a test says that something hangs."""

QUICK = Settings(block_notice=0.02, deadlock_after=0.3)
"""A watch in a hurry, so that tests need not wait for it."""


class Ranks:
    """The ranks of one or more generations, as threads of this process."""

    def __init__(self, size: int, settings: Settings = QUICK) -> None:
        self.size = size
        self.settings = settings
        self.store = LocalStore()
        self.secret = Secret.new()
        self.controls: dict[int, Control] = {}
        self.meeting = threading.Barrier(size)

    def form(self, rank: int, generation: int = 0, limit: float = LIMIT) -> Control:
        control = Control.form(
            self.store,
            rank,
            self.size,
            generation,
            self.settings,
            self.secret,
            "127.0.0.1",
            Deadline.after(limit),
        )
        self.controls[rank] = control
        return control

    def run(self, act: Callable[[Control], Any]) -> list[Any]:
        """``act(control)`` on every rank, once all have formed; what each returned or raised."""

        def be(rank: int) -> Any:
            control = self.form(rank)
            self.meeting.wait(LIMIT)
            return act(control)

        return self.each(be)

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """``act(rank)`` on a thread for every rank; what each returned or raised."""
        results: list[Any] = [None] * self.size

        def be(rank: int) -> None:
            try:
                results[rank] = act(rank)
            except Exception as error:  # noqa: BLE001 - it is the result
                results[rank] = error

        threads = [
            threading.Thread(target=be, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(LIMIT)
            assert not thread.is_alive(), f"rank {rank} hangs"
        return results

    def close(self) -> None:
        for control in self.controls.values():
            control.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Look until it holds; fail after :data:`LIMIT` seconds."""
    deadline = Deadline.after(LIMIT)
    while not condition():
        assert not deadline.expired(), "it never came true"
        time.sleep(0.005)
