"""The switch interval is short while requests wait for their agreement, and only then."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from farandole.comm.order import brisk


@pytest.fixture
def usual() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def test_it_is_short_from_the_first_to_the_last(usual: float) -> None:
    brisk.begin()
    brisk.begin(2)
    assert sys.getswitchinterval() == pytest.approx(brisk.BRISK)
    brisk.end(2)
    assert sys.getswitchinterval() == pytest.approx(brisk.BRISK)
    brisk.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_what_the_user_sets_is_left_alone(usual: float) -> None:
    brisk.begin()
    sys.setswitchinterval(0.002)
    brisk.end()
    assert sys.getswitchinterval() == pytest.approx(0.002)
    sys.setswitchinterval(brisk.BRISK / 4)
    brisk.begin()
    brisk.end()
    assert sys.getswitchinterval() == pytest.approx(brisk.BRISK / 4)
