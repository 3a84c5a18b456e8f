"""Watching a job that was submitted: why it waits, what it prints, how it ends.

A cluster that does not answer is waited for: the job goes on without us, and a laptop that was
asleep, or has changed its network, is to show the rest when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from farandole.launch.kubernetes import following, jobs, submitting
from farandole.launch.kubernetes.cluster import Cluster, Unreachable
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
    ending = asyncio.create_task(_until_over(cluster, name, start_timeout, say))
    try:
        await asyncio.wait({printing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if printing.done():
            printing.result()  # it has failed: else it does not end before the job
        end = await ending
        over.set()
        await printing
    finally:
        printing.cancel()
        ending.cancel()
    return end


async def _print(
    cluster: Cluster, name: str, show: Callable[[Line], None], over: asyncio.Event
) -> None:
    async for line in following.follow(cluster, name, over.is_set):
        show(line)


async def _until_over(
    cluster: Cluster, name: str, start_timeout: float, say: Callable[[str], None]
) -> End:
    look = _Look(cluster, name, start_timeout, say)
    while True:
        end = await look.once_more()
        if end is not None:
            return end
        await asyncio.sleep(LOOK_EVERY)


class _Look:
    """At a job, again and again."""

    def __init__(
        self, cluster: Cluster, name: str, start_timeout: float, say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._start_timeout = start_timeout
        self._say = say
        self._begin = asyncio.get_running_loop().time()
        self._next_word = self._begin + LOOK_EVERY
        self._started = False

    async def once_more(self) -> End | None:
        """How it has ended; ``None`` when it has not, or the cluster does not answer."""
        try:
            return await self._judge()
        except Unreachable as error:
            self._say(f"{error.message} The job goes on; this tries again, until Ctrl-C.")
            return None

    async def _judge(self) -> End | None:
        found = await jobs.find(self._cluster, self._name)
        standing = found.standing
        if standing.over:
            causes = await self._why(found) if standing.state == "failed" else ()
            return End(standing.state, causes)
        self._started = self._started or standing.state == "running"
        if self._started:
            return None
        now = asyncio.get_running_loop().time()
        waited = now - self._begin
        if waited > self._start_timeout:
            causes = await self._why(found)
            stop = submitting.suspension(found.kind, on=True)
            await self._cluster.patch(found.kind, self._name, stop)
            return End("given up", causes)
        if now >= self._next_word:
            causes = await self._why(found)
            word = causes[0] if causes else f"{self._name} is {standing.state}"
            self._say(f"waiting ({waited:.0f} s): {word}")
            self._next_word = now + SAY_EVERY
        return None

    async def _why(self, found: jobs.Found) -> tuple[str, ...]:
        return tuple(map(str, await jobs.why(self._cluster, found)))
