"""Real processes that die, stop and fork, and what the others hear of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.core.secret import Secret
from farandole.core.store import StoreServer

SCRIPT = Path(__file__).with_name("rank_process.py")
LIMIT = 30.0
PROMPT = 1.0
"""Seconds for news that takes milliseconds, on a machine that is busy with other tests."""


class Process:
    def __init__(self, scenario: str, rank: int, size: int, store: str, secret: Secret) -> None:
        self.rank = rank
        self._popen = subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), str(size), store],
            env={**os.environ, "FARANDOLE_SECRET": secret.hex()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.errors = ""
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._heard: dict[str, dict[str, Any]] = {}
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _read_errors(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self.errors += line

    def hear(self, kind: str) -> dict[str, Any]:
        """Wait until it says something of this kind."""
        while kind not in self._heard:
            said = self._said.get(timeout=LIMIT)
            assert said is not None, f"rank {self.rank} ended without {kind}: {self.errors}"
            self._heard[said["kind"]] = said
        return self._heard.pop(kind)

    def hear_error(self, words: str) -> str:
        """Wait until ``words`` are on its standard error; all that is there."""
        deadline = time.monotonic() + LIMIT
        while words not in self.errors:
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.01)
        return self.errors

    def send(self, number: signal.Signals) -> float:
        at = time.monotonic()
        self._popen.send_signal(number)
        return at

    def stop(self) -> None:
        """Stop it, and wait until the last of its threads has."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(LIMIT)
        for reader in self._readers:
            reader.join(LIMIT)


Start = Callable[[str, int], list[Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ranks and wait until their group has formed; end them with the test."""
    secret = Secret.new()
    server = StoreServer(secret)
    processes: list[Process] = []

    def begin(scenario: str, size: int) -> list[Process]:
        store = str(server.address)
        processes.extend(Process(scenario, rank, size, store, secret) for rank in range(size))
        return processes

    yield begin
    for process in processes:
        process.end()
    server.close()


def all_hear_of(lost: set[int], processes: list[Process], since: float) -> None:
    """The survivors fail promptly, once, and with one text."""
    news = [each.hear("failed") for each in processes if each.rank not in lost]
    (text,) = {said["text"] for said in news}
    assert {said["error"] for said in news} == {"PeerLost"}
    assert set(news[0]["ranks"]) <= lost
    assert "was lost: its connection closed without a goodbye" in text
    assert max(said["at"] for said in news) - since < PROMPT


def formed(processes: list[Process]) -> list[Process]:
    for process in processes:
        process.hear("formed")
    return processes


@pytest.mark.parametrize("scenario", ["gather", "poll", "idle"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_news_for_all(start: Start, scenario: str, victim: int) -> None:
    processes = formed(start(scenario, 3))
    since = processes[victim].send(signal.SIGKILL)
    all_hear_of({victim}, processes, since)


def test_two_killed_at_once_are_one_cause(start: Start) -> None:
    processes = formed(start("poll", 4))
    since = processes[1].send(signal.SIGKILL)
    processes[3].send(signal.SIGKILL)
    all_hear_of({1, 3}, processes, since)


def test_idle_ranks_use_no_processor(start: Start) -> None:
    for process in formed(start("idle", 2)):
        assert process.hear("idle")["seconds"] < 0.02


def test_a_forked_child_neither_keeps_a_dead_rank_alive_nor_disturbs(start: Start) -> None:
    processes = formed(start("fork", 3))
    processes[1].hear("forked")
    assert "was forked from rank 1" in processes[1].hear("child")["text"]
    since = processes[1].send(signal.SIGKILL)
    all_hear_of({1}, processes, since)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_may_come_back(start: Start, stopped: int) -> None:
    """Also when it is rank 0, which would have told."""
    processes = formed(start("stall", 3))
    processes[stopped].stop()
    processes[1].go_on()
    teller = processes[2] if stopped == 0 else processes[0]
    text = teller.hear_error("does not answer")
    assert ("for rank 1:" if stopped else "and rank 0, which keeps the watch") in text
    assert 'allreduce "loss"' in text
    processes[stopped].send(signal.SIGCONT)
    for process in processes:
        process.hear("gathered")
        process.hear("closed")
