"""Watching a job while the network is not what it should be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, Fault

from farandole.core.errors import SetupError
from farandole.launch.kubernetes import client, following, kinds, naming, watching

pytest.importorskip("kr8s")

NAME = "train-1234"
LIMIT = 60.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    started = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(started.kubeconfig(tmp_path)))
    monkeypatch.setattr(client, "PATIENCE", 0.5)
    monkeypatch.setattr(watching, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(following, "PAUSE", 0.1)
    labels = naming.labels(NAME, "job")
    started.put(kinds.JOB, {"metadata": {"name": NAME, "labels": labels}, "spec": {}})
    started.put(kinds.POD, {
        "metadata": {"name": f"{NAME}-0", "labels": labels},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": "Running"},
    })  # fmt: skip
    yield started
    started.close()


class Watching:
    """One who watches the job, in this thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.said: list[str] = []
        self._changed = asyncio.Event()
        self.end = asyncio.create_task(self._watch())

    async def _watch(self) -> watching.End:
        return await watching.watch(
            await client.connect(), NAME, start_timeout=LIMIT,
            show=lambda line: self._note(self.lines, line.text.decode()),
            say=lambda text: self._note(self.said, text),
        )  # fmt: skip

    def _note(self, where: list[str], text: str) -> None:
        where.append(text)
        self._changed.set()

    async def until(self, what: list[str], count: int) -> None:
        """Until so much has been shown or said."""

        async def enough() -> None:
            while len(what) < count:
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(enough(), LIMIT)


def succeed(server: ApiServer) -> None:
    server.print(f"{NAME}-0", "", ended=True)
    server.change(kinds.POD, f"{NAME}-0", {"status": {"phase": "Succeeded"}})
    condition = {"type": "Complete", "status": "True"}
    server.change(kinds.JOB, NAME, {"status": {"conditions": [condition]}})


def test_no_line_is_lost_or_doubled_by_an_outage_that_is_longer_than_any_patience(
    server: ApiServer,
) -> None:
    async def run() -> tuple[Watching, watching.End]:
        one = Watching()
        for number in range(5):
            server.print(f"{NAME}-0", f"line {number}")
        await one.until(one.lines, 5)
        server.faults.append(Fault(lambda *_: True))
        server.print(f"{NAME}-0", "line 5")
        # More than one attempt has come to its end.
        await one.until(one.said, 2)
        server.print(f"{NAME}-0", "line 6")
        server.faults.clear()
        await one.until(one.lines, 7)
        server.print(f"{NAME}-0", "line 7")
        succeed(server)
        return one, await asyncio.wait_for(one.end, LIMIT)

    one, end = asyncio.run(run())
    assert end == watching.End("succeeded")
    assert one.lines == [f"line {number}" for number in range(8)]
    assert all("does not answer" in text for text in one.said)


@pytest.mark.parametrize("path", ["/pods", "/jobs"])
def test_a_right_that_is_taken_away_ends_the_watching_with_one_error(
    server: ApiServer, path: str
) -> None:
    async def run() -> Any:
        one = Watching()
        server.print(f"{NAME}-0", "line 0")
        await one.until(one.lines, 1)
        server.faults.append(Fault(lambda _, asked: asked.endswith(path), 403))
        await asyncio.wait_for(one.end, LIMIT)

    with pytest.raises(SetupError, match="injected"):
        asyncio.run(run())


def test_who_may_see_pods_but_not_their_logs_is_told_so(server: ApiServer) -> None:
    async def run() -> Any:
        server.faults.append(Fault(lambda _, asked: asked.endswith("/log"), 403))
        await asyncio.wait_for(Watching().end, 20)

    with pytest.raises(SetupError, match="injected"):
        asyncio.run(run())
