"""Watching a job that was submitted: why it waits, what it prints, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from farandole.launch.kubernetes import following, jobs, submitting
from farandole.launch.kubernetes.cluster import Cluster
from farandole.launch.kubernetes.following import Line

LOOK_EVERY = 1.0
SAY_EVERY = 30.0
"""Seconds between two words on why a job still waits."""


@dataclass(frozen=True)
class End:
    """How it ended, as far as it was watched."""

    state: str
    """As in ``standing.Standing``; ``given up``: it did not start in time and was stopped."""
    causes: tuple[str, ...] = ()
    """Why, most likely first."""


async def watch(
    cluster: Cluster,
    name: str,
    *,
    start_timeout: float,
    show: Callable[[Line], None],
    say: Callable[[str], None],
) -> End:
    """Show the output of the job ``name`` until it is over.

    While it waits, the most likely cause is said; when it has not started within ``start_timeout``
    seconds, it is stopped, so that it holds no GPUs, and the cause is the result. Cancelling ends
    the watching alone.
    """
    over = asyncio.Event()
    printing = asyncio.create_task(_print(cluster, name, show, over))
    try:
        end = await _until_over(cluster, name, start_timeout, say)
    except BaseException:
        printing.cancel()
        raise
    over.set()
    await printing
    return end


async def _print(
    cluster: Cluster, name: str, show: Callable[[Line], None], over: asyncio.Event
) -> None:
    async for line in following.follow(cluster, name, over.is_set):
        show(line)


async def _until_over(
    cluster: Cluster, name: str, start_timeout: float, say: Callable[[str], None]
) -> End:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    next_word = begin + LOOK_EVERY
    started = False
    while True:
        found = await jobs.find(cluster, name)
        standing = found.standing
        if standing.over:
            causes = await jobs.why(cluster, found) if standing.state == "failed" else []
            return End(standing.state, tuple(map(str, causes)))
        started = started or standing.state == "running"
        now = loop.time()
        if not started and now >= next_word:
            causes = await jobs.why(cluster, found)
            word = str(causes[0]) if causes else f"{name} is {standing.state}"
            say(f"waiting ({now - begin:.0f} s): {word}")
            next_word = now + SAY_EVERY
        if not started and now - begin > start_timeout:
            causes = await jobs.why(cluster, found)
            await cluster.patch(found.kind, name, submitting.suspension(found.kind, on=True))
            return End("given up", tuple(map(str, causes)))
        await asyncio.sleep(LOOK_EVERY)
