"""What each rank has for itself, kept by the next rank: with ``--on-loss-size hold``.

Where a replacement takes the lost rank's number, training is to go on as if nothing had happened.
Most of the state is alike on all ranks, and any of them has it. The rest (random states, buffers
that are not averaged) is copied to the next rank at each commit, before the vote: so when the vote
has told anybody that all have come, everything is in two places. The copies of two commits are
kept, since a rank that dies in the vote may be ahead of the others or not.

If a rank and the next one are lost together, what the first had for itself is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from farandole.comm import group as groups
from farandole.comm.group import Group

_log = logging.getLogger(__name__)

NAME = "elastic.neighbour"


def holds() -> bool:
    """Whether replacements take the numbers of lost ranks in this job."""
    meeting = groups.root().meeting
    summons = None if meeting is None else meeting.summons
    world = None if summons is None else summons.world
    return world is not None and world.holds


class Neighbour:
    """What this rank keeps for the one before it."""

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}
        """By the number of the commit."""

    def exchange(self, group: Group, commit: int, mine: bytes) -> None:
        """Give ``mine`` to the next rank, and keep what the one before gives. Collective."""
        splits = [0] * group.size
        splits[(group.rank + 1) % group.size] = len(mine)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        received, _ = group.alltoall(sent, splits, name=NAME)
        last = {each: data for each, data in self._kept.items() if each == commit - 1}
        self._kept = {**last, commit: received.numpy().tobytes()}

    def give_back(self, group: Group, commit: int, lacking: Sequence[bool]) -> bytes | None:
        """What the next rank has kept of this one for ``commit``, if this one is ``lacking``.

        ``lacking`` says of every rank whether it is. Collective. ``None``: this rank lacks nothing,
        or what it had is gone.
        """
        before = (group.rank - 1) % group.size
        kept = self._kept.get(commit, b"") if lacking[before] else b""
        answers = group.agree("neighbour", kept, "what ranks have for themselves")
        if not lacking[group.rank]:
            return None
        answer = answers[(group.rank + 1) % group.size]
        if not answer:
            _log.warning(
                "The random states and local buffers of rank %d were lost with it and its "
                "neighbour: they begin anew here.",
                group.rank,
            )
        return answer or None
