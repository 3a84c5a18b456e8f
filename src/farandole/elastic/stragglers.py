"""Workers that live and do not come while others wait: who is named, and who is ended. Pure.

A part of :mod:`farandole.elastic.membership`. In a world the watch of the control channel sees who
hangs; this is for between two worlds, and before the first one, when there is no group to watch.
Somebody who hangs is ended so that its stack is shown; if it does not die of that, it is killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from farandole.core.errors import describe_ranks
from farandole.core.worlds import World
from farandole.elastic.decisions import Decision, Kill, Say
from farandole.elastic.policy import Policy
from farandole.elastic.roster import Worker

SHOWING = 5.0
"""Seconds that a worker may take to show where it is and to die of it."""


def show(worker: Worker, why: str, now: float) -> Kill:
    """End a worker so that it shows where it is."""
    worker.last_moment = now + SHOWING
    return Kill(worker.number, why, show=True)


def end_for_good(workers: Iterable[Worker], now: float) -> list[Decision]:
    """Those that did not die of :func:`show`."""
    decisions: list[Decision] = []
    for worker in workers:
        if worker.last_moment is not None and now >= worker.last_moment:
            worker.last_moment = math.inf  # once is enough
            decisions.append(Kill(worker.number, "it did not die of showing where it is"))
    return decisions


def end_latecomers(starting: Iterable[Worker], policy: Policy, now: float) -> list[Decision]:
    """Those that do not come to ``init()`` while others wait there; their end is a loss."""
    limit = policy.start_timeout
    why = f"it has not called init() within {limit:g} s (--start-timeout)"
    late = [each for each in starting if now >= each.since + limit and each.last_moment is None]
    return [show(worker, why, now) for worker in late]


def end_stuck(
    world: World, members: Sequence[Worker], policy: Policy, now: float
) -> list[Decision]:
    """Members that are somewhere else while others wait to form the next world with them.

    They are named first; their end is a loss.
    """
    since = _waited_since(members)
    if since is None:
        return []
    warning, limit = policy.stall_warning, policy.stall_timeout
    stuck = [worker for worker in members if worker.ready_since is None]
    if 0 < limit <= now - since:
        why = f"the others have waited {limit:g} s for it (--stall-timeout)"
        return [show(worker, why, now) for worker in stuck if worker.last_moment is None]
    fresh = [worker for worker in stuck if not worker.named]
    if not fresh or not 0 < warning <= now - since:
        return []
    for worker in fresh:
        worker.named = True
    whom = describe_ranks(world.rank_of(worker.number) for worker in fresh)
    end = f" It is ended after {limit:g} s (--stall-timeout)." if limit > 0 else ""
    return [Say(
        f"for {now - since:.0f} s the others have waited for {whom} of generation "
        f"{world.generation} to leave it and form the next one.{end}"
    )]  # fmt: skip


def times(workers: Iterable[Worker], members: Sequence[Worker], policy: Policy) -> list[float]:
    """When :func:`end_for_good` and :func:`end_stuck` may have something to say."""
    found = [each.last_moment for each in workers if each.last_moment is not None]
    since = _waited_since(members)
    if since is not None:
        found += [since + limit for limit in (policy.stall_warning, policy.stall_timeout) if limit]
    return found


def _waited_since(members: Sequence[Worker]) -> float | None:
    """Since when members that have left the latest world wait for one that has not."""
    waiting = [each.ready_since for each in members if each.ready_since is not None]
    return min(waiting, default=None) if len(waiting) < len(members) else None
