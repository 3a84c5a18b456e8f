from __future__ import annotations

import pytest

from farandole.core.events import GroupClosed, StepFinished, emit, subscribe, wanted


def test_handlers_get_the_events_of_their_class_in_order_until_they_stop() -> None:
    seen: list[tuple[int, str]] = []
    stop_first = subscribe(StepFinished, lambda event: seen.append((1, event.optimizer)))
    stop_second = subscribe(StepFinished, lambda event: seen.append((2, event.optimizer)))
    emit(StepFinished("a"))
    emit(GroupClosed(rank=0, generation=1))
    stop_first()
    emit(StepFinished("b"))
    assert wanted(StepFinished)
    stop_second()
    stop_second()
    emit(StepFinished("c"))
    assert not wanted(StepFinished)
    assert seen == [(1, "a"), (2, "a"), (2, "b")]


def test_a_handler_that_fails_is_not_silent() -> None:
    def fail(event: StepFinished) -> None:
        raise LookupError(event.optimizer)

    stop = subscribe(StepFinished, fail)
    with pytest.raises(LookupError):
        emit(StepFinished("a"))
    stop()
