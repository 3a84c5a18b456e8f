"""Events become spans that lie one in another, whatever comes in which order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_format import check, rows, unfinished

from farandole.core import events
from farandole.core.events import RequestStaged, Stage
from farandole.monitor.trace import Translator, began_at


def staged(stage: Stage, at: float, *, name: str = "loss", **more: str) -> RequestStaged:
    fields = {"group": "0", "operation": "allreduce"} | more
    return RequestStaged(rank=3, name=name, stage=stage, at=at, **fields)  # type: ignore[arg-type]


def translated(*happened: object, seen: float = 100.0, shift: int = 0) -> list[dict[str, object]]:
    translator = Translator(3, host="node7", shift=shift)
    lines = translator.head()
    for event in happened:
        lines += translator.translate(event, seen)
    return check([json.loads(line) for line in lines])


def test_a_collective_is_a_row_of_horovods_spans() -> None:
    records = translated(
        staged(Stage.NEGOTIATING, 1.0),
        staged(Stage.QUEUED, 1.5),
        staged(Stage.PACKING, 1.75),
        staged(Stage.MOVING, 2.0, transport="gloo"),
        staged(Stage.UNPACKING, 3.0),
        staged(Stage.DONE, 3.5),
    )
    row = rows(records, 3)["allreduce.loss"]
    assert [(r["ph"], r["name"], r["ts"]) for r in row] == [
        ("B", "NEGOTIATE_ALLREDUCE", 1.0e6),
        ("E", "NEGOTIATE_ALLREDUCE", 1.5e6),
        ("B", "ALLREDUCE", 1.5e6),
        ("B", "QUEUE", 1.5e6),
        ("E", "QUEUE", 1.75e6),
        ("B", "MEMCPY_IN_FUSION_BUFFER", 1.75e6),
        ("E", "MEMCPY_IN_FUSION_BUFFER", 2.0e6),
        ("B", "GLOO_ALLREDUCE", 2.0e6),
        ("E", "GLOO_ALLREDUCE", 3.0e6),
        ("B", "MEMCPY_OUT_FUSION_BUFFER", 3.0e6),
        ("E", "MEMCPY_OUT_FUSION_BUFFER", 3.5e6),
        ("E", "ALLREDUCE", 3.5e6),
    ]


def test_the_rank_is_introduced() -> None:
    said = {str(r["name"]): r["args"] for r in translated()}
    assert said["process_name"] == {"name": "rank 3"}
    assert said["process_labels"] == {"labels": "node7"}
    assert said["process_sort_index"] == {"sort_index": 3}


def test_what_never_ends_stays_open() -> None:
    records = translated(staged(Stage.NEGOTIATING, 1.0), staged(Stage.MOVING, 2.0))
    assert unfinished(records) == [(3, "ALLREDUCE"), (3, "ENGINE_ALLREDUCE")]


def test_a_failure_says_why() -> None:
    records = translated(
        staged(Stage.NEGOTIATING, 1.0), staged(Stage.FAILED, 2.0, detail="Mismatched shapes")
    )
    failed = next(r for r in records if r["name"] == "FAILED")
    assert failed["args"] == {"error": "Mismatched shapes"}
    assert unfinished(records) == []


def test_a_beginning_that_was_not_seen_leaves_no_half_span() -> None:
    records = translated(staged(Stage.MOVING, 1.0), staged(Stage.DONE, 2.0))
    assert rows(records, 3) == {}


def test_unnamed_collectives_share_rows_and_one_name_in_two_groups_does_not() -> None:
    records = translated(
        staged(Stage.NEGOTIATING, 1.0, name="noname.1"),
        staged(Stage.NEGOTIATING, 1.5, name="noname.2"),
        staged(Stage.DONE, 2.0, name="noname.1"),
        staged(Stage.DONE, 2.0, name="noname.2"),
        staged(Stage.NEGOTIATING, 3.0, name="noname.3"),
        staged(Stage.NEGOTIATING, 1.0),
        staged(Stage.NEGOTIATING, 1.0, group="0.1"),
        staged(Stage.NEGOTIATING, 1.0, group="0/set1"),
    )
    assert set(rows(records, 3)) == {
        "allreduce.noname",
        "allreduce.noname #2",
        "allreduce.loss",
        "allreduce.loss in 0.1",
        "allreduce.loss in set1",
    }


def test_another_machines_clock_is_shifted() -> None:
    records = translated(staged(Stage.NEGOTIATING, 1.0), shift=250_000_000)
    assert rows(records, 3)["allreduce.loss"][0]["ts"] == 1.25e6


def reduced(name: str) -> events.CollectiveFinished:
    return events.CollectiveFinished(
        operation="allreduce", name=name, path="planned", engine="torch",
        bytes=4096, seconds=0.5, ranks=2,
    )  # fmt: skip


def test_a_bucket_that_does_not_come_back_stays_open() -> None:
    records = translated(
        reduced("bucket 0"),  # left before the recording began
        events.BucketLeft("bucket 0", 98.0),
        reduced("bucket 0"),
        events.BucketLeft("bucket 0", 99.0),
        seen=98.5,
    )
    assert unfinished(records) == [(3, "ALLREDUCE")]
    assert len(rows(records, 3)["gradients: bucket 0"]) == 3


def test_waits_steps_data_and_buckets_have_rows() -> None:
    records = translated(
        events.BatchLoaded(samples=8, seconds=1.0, training=True),
        events.WaitFinished(path="planned", seconds=0.25),
        events.WaitFinished(path="planned", seconds=1e-6),
        events.BucketLeft("bucket 1", 99.5),
        reduced("bucket 1"),
        events.StepFinished(optimizer="SGD"),
        events.CycleStarted(rank=3, group="0", at=99.0),
        seen=100.0,
    )
    found = {
        title: [(r["ph"], r["name"], r["ts"], r.get("dur")) for r in row]
        for title, row in rows(records, 3).items()
    }
    assert found == {
        "data": [("X", "DATA", 99.0e6, 1.0e6)],
        "waiting": [("X", "WAIT", 99.75e6, 0.25e6)],
        "gradients: bucket 1": [
            ("B", "ALLREDUCE", 99.5e6, None),
            ("E", "ALLREDUCE", 100.0e6, None),
        ],
        "steps": [("i", "STEP", 100.0e6, None)],
        "cycles": [("i", "CYCLE_START", 99.0e6, None)],
    }


def test_the_trace_is_tied_to_the_calendar() -> None:
    record = json.loads(began_at(wall=1_700_000_000.5, monotonic=0.5))
    assert record["name"] == "start_time_since_epoch_in_micros"
    assert record["args"] == {"start_time_since_epoch_in_micros": 1_700_000_000_000_000}


times = st.floats(0.0, 1e6, allow_nan=False)
durations = st.floats(0.0, 2.0, allow_nan=False)
anything = st.one_of(
    st.builds(
        RequestStaged,
        rank=st.just(3),
        group=st.sampled_from(["0", "0.1"]),
        operation=st.sampled_from(["allreduce", "broadcast"]),
        name=st.sampled_from(["a", "b", "noname.1", "noname.2"]),
        stage=st.sampled_from(Stage),
        at=times,
        transport=st.sampled_from(["", "gloo"]),
        detail=st.text(max_size=5),
    ),
    st.builds(events.BucketLeft, name=st.sampled_from(["bucket 0", "bucket 1"]), at=times),
    st.builds(reduced, st.sampled_from(["bucket 0", "bucket 1"])),
    st.builds(events.WaitFinished, path=st.just("named"), seconds=durations),
    st.builds(events.BatchLoaded, samples=st.just(1), seconds=durations, training=st.booleans()),
)


@given(st.lists(st.tuples(durations, anything), max_size=60), st.integers(0, 60))
def test_any_events_in_any_order_nest_and_may_be_cut_anywhere(
    happened: list[tuple[float, object]], cut: int
) -> None:
    translator = Translator(3)
    lines = translator.head()
    seen = 10.0
    for pause, event in happened:
        seen += pause
        lines += translator.translate(event, seen)
    records = [json.loads(line) for line in lines]
    check(records[: len(translator.head()) + cut])
    check(records)


@pytest.mark.parametrize("operation", ["allgather", "broadcast", "alltoall", "reducescatter"])
def test_other_operations_have_names_of_the_same_form(operation: str) -> None:
    records = translated(
        staged(Stage.NEGOTIATING, 1.0, operation=operation),
        staged(Stage.MOVING, 2.0, operation=operation, transport="nccl"),
    )
    names = [r["name"] for r in rows(records, 3)[f"{operation}.loss"]]
    upper = operation.upper()
    moved = "NCCL_BCAST" if operation == "broadcast" else f"NCCL_{upper}"
    assert names == [f"NEGOTIATE_{upper}", f"NEGOTIATE_{upper}", upper, moved]
