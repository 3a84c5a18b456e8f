"""Which of the other ranks are gone: those whose process ended, and those that said they leave."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence

from farandole.comm.engines.shm.arena import Arena


class Peers:
    """The other ranks' processes, held by pidfds (see ``witness``), so that no number can have been
    reused."""

    def __init__(
        self, rank: int, arenas: Sequence[Arena], pidfds: Mapping[int, Sequence[int]]
    ) -> None:
        self._rank = rank
        self._arenas = arenas
        self._ranks = {pidfd: other for other, each in pidfds.items() for pidfd in each}
        self._poll = select.poll()
        for pidfd in self._ranks:
            self._poll.register(pidfd, select.POLLIN)

    def farewell(self) -> str | None:
        """Who said that it leaves, and why; ``None`` if nobody did."""
        leaver = self._arenas[self._rank].leaver
        if leaver is None:
            return None
        return f"rank {leaver} left it ({self._arenas[leaver].reason})"

    def gone(self) -> str | None:
        """Who left, or died; ``None`` if all are there."""
        ended = [self._ranks[pidfd] for pidfd, _ in self._poll.poll(0)]
        died = [rank for rank in ended if not self._arenas[rank].reason]
        return f"the process of rank {min(died)} died" if died else self.farewell()

    def say_farewell(self, reason: str) -> None:
        """Tell all others that this rank leaves, for ``reason``."""
        self._arenas[self._rank].reason = reason
        for other, arena in enumerate(self._arenas):
            if other != self._rank and arena.leaver is None:
                arena.leaver = self._rank

    def close(self) -> None:
        """Let go of the processes."""
        for pidfd in self._ranks:
            os.close(pidfd)
        self._ranks = {}
