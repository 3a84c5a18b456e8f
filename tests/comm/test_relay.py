"""A work of several stages: when each begins, and how it ends."""

from __future__ import annotations

import pytest

from farandole.comm.engines.base import Work
from farandole.comm.engines.relay import Relay
from farandole.core.errors import PeerLost


class Stage(Work):
    """Is over after so many waits that are too short."""

    def __init__(self, waits: int = 0) -> None:
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self._waits = 0
        elif self._waits:
            self._waits -= 1
            return False
        return True

    def done(self) -> bool:
        return not self._waits


def test_the_first_stage_begins_at_once_and_the_others_when_waited_for():
    begun = []

    def steps():
        for number in range(3):
            begun.append(number)
            yield Stage()
        begun.append("end")

    work = Relay(steps())
    assert begun == [0]
    assert not work.done()
    assert work.wait()
    assert begun == [0, 1, 2, "end"]
    assert work.done()
    assert work.wait(0.0)


def test_a_wait_that_is_too_short_goes_on_later():
    def steps():
        yield Stage(waits=1)
        yield Stage(waits=2)

    work = Relay(steps())
    assert [work.wait(0.0) for _ in range(4)] == [False, False, False, True]


def test_an_error_is_raised_each_time():
    def steps():
        yield Stage()
        raise PeerLost("rank 1 is gone")

    work = Relay(steps())
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            work.wait()
        assert work.done()


def test_without_any_stage():
    work = Relay(iter(()))
    assert work.done()
    assert work.wait()
