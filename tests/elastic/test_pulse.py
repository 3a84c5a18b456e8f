"""Who is frozen: told by the state and the CPU time of its process, on a clock of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from farandole.launch.pulse import FROZEN, PULSE, Look, Pulse, read


class Table:
    """What /proc would say."""

    def __init__(self, **states: tuple[str, int]) -> None:
        self.of: dict[int, Look] = {int(pid[1:]): look for pid, look in states.items()}
        self.pulse = Pulse(self.of.get)
        self.now = 0.0

    def look(self, until: float) -> list[tuple[int, str, float]]:
        """What is told by looks a second apart, of which the last is at ``until``."""
        told = []
        while self.now < until:
            self.now = min(until, self.now + PULSE)
            told += self.look_once()
        return told

    def look_once(self) -> list[tuple[int, str, float]]:
        return list(self.pulse.look({pid % 10: pid for pid in self.of}, self.now))


def test_a_stopped_process_is_told_of_once_after_its_time() -> None:
    table = Table(p10=("T", 5), p11=("S", 0), p12=("R", 7))
    table.look_once()
    assert table.look(FROZEN - 1) == []
    assert table.look(FROZEN) == [(0, "T", FROZEN)]
    assert table.look(10 * FROZEN) == []


def test_a_process_that_goes_on_in_between_is_not_frozen() -> None:
    table = Table(p10=("T", 5))
    table.look(9.0)
    table.of[10] = ("S", 5)
    table.look(10.0)
    table.of[10] = ("T", 5)
    assert table.look(10.0 + FROZEN) == []
    assert table.look(11.0 + FROZEN) == [(0, "T", FROZEN)]


def test_a_process_that_uses_time_between_two_looks_is_not_frozen() -> None:
    table = Table(p10=("D", 5))
    table.look(10.0)
    table.of[10] = ("D", 6)
    assert table.look(10.0 + FROZEN) == []
    assert table.look(11.0 + FROZEN) == [(0, "D", FROZEN)]


def test_sleeping_computing_and_debugged_processes_are_left_alone() -> None:
    table = Table(p10=("S", 0), p11=("R", 0), p12=("t", 0), p13=("Z", 0))
    assert table.look(1e3) == []


def test_who_was_suspended_together_with_the_looker_is_not_frozen() -> None:
    table = Table(p10=("T", 5))
    table.look(FROZEN)
    table.now += 3600.0
    assert table.look_once() == []
    table.of[10] = ("R", 5)
    assert table.look(table.now + 2 * FROZEN) == []


def test_the_kernel_tells_a_stopped_process_from_a_sleeping_one() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "print('ready', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        seen = read(process.pid)
        assert seen is not None
        assert seen[0] == "T"
        assert seen[1] > 0 or seen == ("T", 0)
    finally:
        process.kill()
        process.wait()
    assert read(process.pid) is None
