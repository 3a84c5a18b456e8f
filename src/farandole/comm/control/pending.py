"""Gathers and waits of one rank that have not ended yet."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

from farandole.comm.control.position import Position
from farandole.comm.control.watch import GatherKey
from farandole.core.errors import FarandoleBug, FarandoleError


class PendingGather:
    """An allgather under way. Made by ``Control.start_allgather``.

    Example::

        pending = control.start_allgather("named/0/17", header)
        control.wait_for(pending.wait, position)
        headers = pending.result
    """

    def __init__(self, key: GatherKey, position: Position) -> None:
        self.key = key
        self.position = position
        self._ended = threading.Event()
        self._parts: list[bytes] = []
        self._error: FarandoleError | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (``None``: until it ends) and say whether it has ended."""
        return self._ended.wait(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def result(self) -> list[bytes]:
        """The members' payloads, in their order. Raises what the gather failed with."""
        if not self._ended.is_set():
            raise FarandoleBug("The result of a gather was asked for before it was there.")
        if self._error is not None:
            raise copy.copy(self._error)
        return list(self._parts)

    def settle(self, payloads: Sequence[bytes], which: Sequence[int]) -> None:
        """It has come: distinct payloads, and for each member the index of its own."""
        order = which or [0] * len(self.key[1])
        self._parts = [payloads[index] for index in order]
        self._ended.set()

    def fail(self, error: FarandoleError) -> None:
        """It will not come."""
        self._error = error
        self._ended.set()
