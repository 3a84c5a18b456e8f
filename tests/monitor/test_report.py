"""The time sheet adds up events on a virtual clock; the table is text that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core import events
from farandole.monitor import report


class Training:
    """A script as the time sheet sees it: each act takes virtual time and emits its event."""

    def __init__(self) -> None:
        self.time = 100.0
        self.sheet = report.start(lambda: self.time)

    def load(self, seconds: float, samples: int = 32, *, training: bool = True) -> None:
        self.time += seconds
        events.emit(events.BatchLoaded(samples=samples, seconds=seconds, training=training))

    def communicate(self, seconds: float) -> None:
        self.time += seconds
        events.emit(events.WaitFinished(path="planned", seconds=seconds))

    def compute(self, seconds: float) -> None:
        self.time += seconds

    def step(self) -> None:
        events.emit(events.StepFinished(optimizer="SGD"))


@pytest.fixture
def training() -> Iterator[Training]:
    training = Training()
    yield training
    training.sheet.stop()


def test_time_divides_into_computing_communicating_and_waiting_for_data(training: Training) -> None:
    training.compute(50.0)  # before the first batch is asked for: not training time
    for _ in range(3):
        training.load(0.5)
        training.compute(2.0)
        training.communicate(0.25)
        training.compute(0.25)
        training.step()
    training.compute(70.0)  # after the last step
    totals = training.sheet.totals()
    assert totals == report.Totals(seconds=9.0, data=1.5, communication=0.75, samples=96, steps=3)
    assert totals.computing == 6.75


def test_validation_is_no_training_time(training: Training) -> None:
    for _ in range(2):
        training.load(1.0)
        training.compute(2.0)
        training.step()
        training.load(3.0, training=False)
        training.compute(5.0)
        training.communicate(7.0)  # the metrics of the epoch
    assert training.sheet.totals() == report.Totals(seconds=6.0, data=2.0, samples=64, steps=2)


def test_a_batch_without_a_step_counts_once_the_step_comes(training: Training) -> None:
    training.load(1.0)
    assert training.sheet.totals() == report.Totals()
    training.compute(1.0)
    training.load(1.0)
    training.compute(1.0)
    training.step()
    assert training.sheet.totals() == report.Totals(seconds=4.0, data=2.0, samples=64, steps=1)


def test_a_script_with_a_loader_of_its_own_is_measured_from_its_first_step(
    training: Training,
) -> None:
    training.communicate(1.0)
    training.step()
    for _ in range(4):
        training.compute(1.0)
        training.communicate(1.0)
        training.step()
    assert training.sheet.totals() == report.Totals(seconds=8.0, communication=4.0, steps=5)
    table = report.render({0: json.loads(training.sheet.to_json())})
    assert table.startswith("trained for 5 steps in 8.0 s on 1 rank\n")
    assert "not measured" in table


def test_a_stopped_sheet_listens_no_more(training: Training) -> None:
    training.sheet.stop()
    training.load(1.0)
    training.step()
    assert training.sheet.totals() == report.Totals()
    training.sheet.stop()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load", "validate", "communicate", "compute", "step"]),
            st.floats(0.0, 10.0),
        )
    )
)
def test_the_parts_never_exceed_the_whole(acts: list[tuple[str, float]]) -> None:
    training = Training()
    try:
        for act, seconds in acts:
            if act == "validate":
                training.load(seconds, training=False)
            elif act == "step":
                training.step()
            else:
                getattr(training, act)(seconds)
    finally:
        training.sheet.stop()
    totals = training.sheet.totals()
    assert totals.data + totals.communication <= totals.seconds + 1e-6
    assert totals.seconds <= training.time - 100.0 + 1e-6


def test_the_table_of_two_ranks() -> None:
    first = {"seconds": 4.0, "data": 0.4, "communication": 0.6, "samples": 8000, "steps": 250}
    second = {"seconds": 5.0, "data": 0.0, "communication": 2.5, "samples": 8000, "steps": 250}
    assert report.render({1: second, 0: first}) == "\n".join(
        [
            "trained on 16,000 samples in 5.0 s: 3,200 samples/s on 2 ranks",
            "rank     computing  communicating  waiting for data",
            "   0   3.0 s  75 %    0.6 s  15 %       0.4 s  10 %",
            "   1   2.5 s  50 %    2.5 s  50 %       0.0 s   0 %",
        ]
    )


def test_who_has_not_trained_prints_nothing() -> None:
    sheet = report.start()
    sheet.stop()
    assert report.render({0: json.loads(sheet.to_json())}) == ""
    assert report.render({}) == ""
