from __future__ import annotations

import pytest

from farandole.core.clock import SYSTEM_CLOCK, Deadline
from farandole.core.errors import UsageError
from farandole.testing.clock import VirtualClock


def test_a_deadline_counts_down_and_stays_at_zero() -> None:
    clock = VirtualClock()
    deadline = Deadline.after(5.0, clock)
    assert (deadline.remaining(), deadline.expired(), deadline.limit) == (5.0, False, 5.0)
    clock.advance(4.0)
    assert (deadline.remaining(), deadline.expired()) == (1.0, False)
    clock.sleep(1.0)
    assert (deadline.remaining(), deadline.expired()) == (0.0, True)
    clock.advance(10.0)
    assert (deadline.remaining(), deadline.expired(), deadline.limit) == (0.0, True, 5.0)


def test_no_deadline_never_expires() -> None:
    clock = VirtualClock()
    deadline = Deadline.after(None, clock)
    clock.advance(1e9)
    assert (deadline.remaining(), deadline.expired(), deadline.limit) == (None, False, None)


def test_the_systems_clock_goes_forward() -> None:
    before = SYSTEM_CLOCK.now()
    SYSTEM_CLOCK.sleep(0.01)
    assert SYSTEM_CLOCK.now() >= before + 0.009
    assert Deadline.after(0.0).expired()


def test_virtual_time_does_not_go_back() -> None:
    with pytest.raises(UsageError, match="go back"):
        VirtualClock().advance(-1.0)
