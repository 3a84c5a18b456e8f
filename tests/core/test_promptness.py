"""A thread can ask to run soon after it wakes; others are left as they are."""

from __future__ import annotations

import threading

import pytest

from farandole.core.promptness import SLICE, be_prompt, slice_of_thread


def test_it_is_for_the_calling_thread_alone():
    usual = slice_of_thread()
    found: list[tuple[bool, int | None]] = []
    thread = threading.Thread(target=lambda: found.append((be_prompt(), slice_of_thread())))
    thread.start()
    thread.join(10.0)
    ((known, asked),) = found
    if not known:
        pytest.skip("this system has no slices")
    if usual:
        assert asked == SLICE
    assert slice_of_thread() == usual
