"""A flag that is raised once: whoever waits goes on, whoever comes later does not wait."""

from __future__ import annotations

import threading

from farandole.core.latch import Latch

LIMIT = 10.0


def test_nobody_waits_for_what_is_set():
    latch = Latch()
    assert not latch.is_set()
    assert not latch.wait(0.0)
    latch.set()
    latch.set()
    assert latch.is_set()
    assert latch.wait()
    assert latch.wait(0.0)


def wait_in_a_crowd() -> list[bool]:
    """What eight threads are told that wait while four others set it."""
    latch, told = Latch(), list[bool]()
    waiting = [threading.Thread(target=lambda: told.append(latch.wait(LIMIT))) for _ in range(8)]
    setting = [threading.Thread(target=latch.set) for _ in range(4)]
    for thread in [*waiting[:4], *setting, *waiting[4:]]:
        thread.start()
    for thread in [*waiting, *setting]:
        thread.join(LIMIT)
    return told


def test_all_that_wait_go_on_whoever_sets_it():
    for _ in range(50):
        assert wait_in_a_crowd() == [True] * 8
