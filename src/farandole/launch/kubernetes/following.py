"""The output of a job's pods, followed through disconnects without a lost or doubled line.

Kubernetes numbers no lines, but tells the time of each to the nanosecond. A connection that broke
off is begun anew a second before the last line that was seen, and what was seen is dropped: lines
of earlier times, and of the last time as many as there were.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from farandole.launch.kubernetes import kinds, naming, standing
from farandole.launch.kubernetes.cluster import Cluster, Refused, Unreachable
from farandole.launch.kubernetes.submission import Manifest

PAUSE = 1.0
"""Seconds between two attempts at a log that is not there or has broken off."""
ATTEMPTS = 10
"""At a log that is to be read once."""


@dataclass(frozen=True)
class Line:
    """One line of one pod."""

    time: str
    index: int
    pod: str
    text: bytes


class Tail:
    """Which lines of a log are new, whatever is sent again. Pure."""

    def __init__(self) -> None:
        self._last = ""
        """The time of the last line."""
        self._count = 0
        """Lines of that time."""
        self._again = 0
        """Of them, those that were sent again since the log was begun anew."""

    @property
    def since(self) -> str | None:
        """From when on to ask; ``None``: from the beginning."""
        if not self._last:
            return None
        whole = datetime.datetime.fromisoformat(self._last[:19] + "+00:00")
        return (whole - datetime.timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def begin(self) -> None:
        """The log is read anew, from :attr:`since` on."""
        self._again = 0

    def accept(self, time: str) -> bool:
        """Whether a line of this time, the next one, is new."""
        moment = _comparable(time)
        if moment < self._last:
            return False
        if moment > self._last:
            self._last, self._count, self._again = moment, 1, 1
            return True
        self._again += 1
        if self._again <= self._count:
            return False
        self._count = self._again
        return True


def _comparable(time: str) -> str:
    """Times of one length: Kubernetes leaves out zeros at the end."""
    whole, _, rest = time.rstrip("Z").partition(".")
    return f"{whole}.{rest:0<9}"


async def past(cluster: Cluster, name: str, say: Callable[[str], None]) -> list[Line]:
    """All lines of all pods that are there, earlier attempts too, in the order of their times.

    Pods whose node does not answer are left out; ``say`` is told so. Raises ``Unreachable`` when
    that is all of them.
    """
    pods = await cluster.find(kinds.POD, naming.selector(name))
    found: list[Line] = []
    unread: list[Unreachable] = []
    for pod in pods:
        try:
            found += await whole(cluster, pod)
        except Unreachable as error:  # noqa: PERF203 - the others are read all the same
            unread.append(error)
    if unread and len(unread) == len(pods):
        raise unread[0]
    for each in unread:
        say(str(each))
    return sorted(found, key=lambda line: (_comparable(line.time), line.index))


async def whole(cluster: Cluster, pod: Manifest) -> list[Line]:
    """The lines of one pod; what is missing after a connection broke off is asked for again."""
    tail = Tail()
    found: list[Line] = []
    for _ in range(ATTEMPTS):
        broken = await _read_on(cluster, pod, tail, found)
        if broken is None:
            return found
        await asyncio.sleep(PAUSE)
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "its node")
    raise Unreachable(f"The log of {name} on {node} cannot be read to its end: {broken}")


async def _read_on(
    cluster: Cluster, pod: Manifest, tail: Tail, found: list[Line]
) -> Unreachable | None:
    """Add what ``tail`` has not seen; ``None`` when that was all."""
    try:
        async for line in read(cluster, pod, tail):
            found.append(line)  # noqa: PERF401 - what came before a break counts
    except Unreachable as error:
        return error
    return None


async def follow(
    cluster: Cluster, name: str, over: Callable[[], bool] = lambda: False
) -> AsyncIterator[Line]:
    """The lines of all pods as they come, those of pods that start later too, until ``over()`` and
    all logs have ended."""
    lines: asyncio.Queue[Line | None] = asyncio.Queue()
    watcher = asyncio.create_task(_watch(cluster, name, lines, over))
    try:
        while (line := await lines.get()) is not None:
            yield line
    finally:
        watcher.cancel()
    await watcher


async def _watch(
    cluster: Cluster, name: str, lines: asyncio.Queue[Line | None], over: Callable[[], bool]
) -> None:
    """Have a task for the log of each pod."""
    readers: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            pods: list[Manifest] = []
            with contextlib.suppress(Unreachable):  # for as long as the user has patience
                pods = await cluster.find(kinds.POD, naming.selector(name))
            for pod in pods:
                key = pod["metadata"]["name"]
                if key not in readers and _has_log(pod):
                    readers[key] = asyncio.create_task(_pump(cluster, pod, lines))
            for reader in readers.values():
                if reader.done():
                    reader.result()  # what it was refused is not to look like an empty log
            if over() and all(reader.done() for reader in readers.values()):
                break
            await asyncio.sleep(PAUSE)
    finally:
        for reader in readers.values():
            reader.cancel()
        await asyncio.gather(*readers.values(), return_exceptions=True)
        lines.put_nowait(None)


async def _pump(cluster: Cluster, pod: Manifest, lines: asyncio.Queue[Line | None]) -> None:
    """Follow one pod's log to its end, through whatever breaks off."""
    tail = Tail()
    name = pod["metadata"]["name"]
    ended = False
    attempts = 0
    while attempts < ATTEMPTS:
        broken = False
        try:
            now = await cluster.get(kinds.POD, name)
            ended = now is None or now["status"].get("phase") in ("Succeeded", "Failed")
            async for line in read(cluster, pod, tail, follow=True):
                lines.put_nowait(line)
        except Refused as error:
            if error.code != 429 and error.code < 500:
                raise
            broken = True
        except Unreachable:
            broken = True  # there may be more, although the pod has ended
        if ended:
            if not broken:
                return
            attempts += 1  # its node may be gone, and the rest of its output with it
        await asyncio.sleep(PAUSE)


async def read(
    cluster: Cluster, pod: Manifest, tail: Tail | None = None, *, follow: bool = False
) -> AsyncIterator[Line]:
    """The lines of one pod that ``tail`` has not seen."""
    tail = tail or Tail()
    tail.begin()
    name = pod["metadata"]["name"]
    container = pod["spec"]["containers"][0]["name"]
    try:
        async for time, text in cluster.log(name, container, since=tail.since, follow=follow):
            if tail.accept(time):
                yield Line(time, standing.index_of(pod), name, text)
    except Refused as error:
        if error.code not in (400, 404):
            raise
        # Its container has not started, or the pod is gone: there is nothing to read.


def _has_log(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
