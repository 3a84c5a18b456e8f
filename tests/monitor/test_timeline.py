"""Recordings of several ranks in one file; here the ranks share a process and a local store."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from trace_format import Record, read, rows, unfinished

from farandole.core import events
from farandole.core.clock import Deadline
from farandole.core.events import CycleStarted, RequestStaged, Stage
from farandole.core.store import LocalStore
from farandole.monitor import clock_shift, timeline
from farandole.monitor.timeline import Place, Timeline


def start(
    path: Path,
    rank: int,
    store: LocalStore,
    *,
    size: int = 2,
    number: int = 1,
    cycles: bool = False,
) -> Timeline:
    place = Place(rank=rank, hosts=["here"] * size, store=store)
    return timeline.start(str(path), number, place, mark_cycles=cycles)


def reduce(rank: int, name: str, *stages: Stage) -> None:
    for stage in stages or (Stage.NEGOTIATING, Stage.MOVING, Stage.DONE):
        events.emit(RequestStaged(rank, "0", "allreduce", name, stage, time.perf_counter(), "gloo"))


def eventually(path: Path, title: str, rank: int) -> list[Record]:
    """The file's records as soon as the rank has that row; it is valid at every look."""
    end = Deadline.after(20.0)
    while title not in rows(records := read(path), rank):
        assert not end.expired(), records
        time.sleep(0.01)
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline.json"


@pytest.mark.usefixtures("no_leaks")
def test_every_rank_is_a_process_of_one_file(path: Path) -> None:
    store = LocalStore()
    recordings = [start(path, rank, store) for rank in (0, 1)]
    reduce(0, "loss")
    reduce(1, "loss")
    for recording in reversed(recordings):
        recording.stop()
    records = read(path)
    for rank in (0, 1):
        assert [r["name"] for r in rows(records, rank)["allreduce.loss"]] == [
            "NEGOTIATE_ALLREDUCE",
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
            "GLOO_ALLREDUCE",
            "GLOO_ALLREDUCE",
            "ALLREDUCE",
        ]
    assert unfinished(records) == []
    assert [key for key in store.keys("") if not key.endswith("bell")] == []


def test_the_file_fills_while_the_ranks_run(path: Path) -> None:
    store = LocalStore()
    recordings = [start(path, rank, store) for rank in (0, 1)]
    reduce(1, "stuck", Stage.NEGOTIATING)
    records = eventually(path, "allreduce.stuck", 1)
    assert unfinished(records) == [(1, "NEGOTIATE_ALLREDUCE")]
    reduce(0, "loss")
    eventually(path, "allreduce.loss", 0)
    for recording in reversed(recordings):
        recording.stop()


def test_cycles_are_shown_when_asked_for(path: Path) -> None:
    for cycles in (True, False):
        recording = start(path, 0, LocalStore(), size=1, cycles=cycles)
        events.emit(CycleStarted(0, "0", time.perf_counter()))
        recording.stop()
        assert ("cycles" in rows(read(path), 0)) is cycles


def test_recordings_follow_each_other_although_ranks_are_ahead(tmp_path: Path) -> None:
    """Rank 1 ends its first and begins its second recording before rank 0 has ended its first."""
    store = LocalStore()
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    zero = start(first, 0, store)
    one = start(first, 1, store)
    reduce(1, "a")
    one.stop()
    one = start(second, 1, store, number=2)
    reduce(1, "b")
    reduce(0, "a")
    zero.stop()
    zero = start(second, 0, store, number=2)
    one.stop()
    zero.stop()
    assert set(rows(read(first), 1)) == {"allreduce.a"}
    assert set(rows(read(second), 1)) == {"allreduce.b"}


def test_rank_0_does_not_wait_for_a_rank_that_records_nothing(path: Path) -> None:
    recording = start(path, 0, LocalStore(), size=3)
    reduce(0, "loss")
    begin = time.monotonic()
    recording.stop(patience=60.0)
    assert time.monotonic() - begin < 30.0
    assert set(rows(read(path), 0)) == {"allreduce.loss"}


def test_a_rank_that_died_is_waited_for_no_longer_than_patience(path: Path) -> None:
    store = LocalStore()
    recordings = [start(path, rank, store) for rank in (0, 1)]
    reduce(1, "loss", Stage.NEGOTIATING)
    eventually(path, "allreduce.loss", 1)
    recordings[0].stop(patience=0.0)  # rank 1 never says that it has ended
    assert unfinished(read(path)) == [(1, "NEGOTIATE_ALLREDUCE")]
    recordings[1].stop()


def test_what_comes_after_rank_0_has_ended_goes_nowhere(path: Path) -> None:
    store = LocalStore()
    recordings = [start(path, rank, store) for rank in (0, 1)]
    reduce(1, "loss")
    eventually(path, "allreduce.loss", 1)
    recordings[0].stop(patience=0.0)
    reduce(1, "late")
    recordings[1].stop()
    assert set(rows(read(path), 1)) == {"allreduce.loss"}
    assert [key for key in store.keys("") if "batch" in key] == []


def test_a_removed_file_ends_the_recording_and_is_not_made_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = start(path, 0, LocalStore(), size=1)
    path.unlink()
    reduce(0, "loss")
    recording.stop()
    assert not path.exists()
    assert "timeline of rank 0 ends early" in caplog.text


def test_ranks_that_write_while_others_read_never_show_half(path: Path) -> None:
    store = LocalStore()
    size = 3
    recordings = [start(path, rank, store, size=size) for rank in range(size)]
    done = threading.Event()

    def work(rank: int) -> None:
        for number in itertools.count():
            reduce(rank, f"tensor {number % 7}")
            if done.wait(0.001):
                return

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for rank in range(size):
        eventually(path, "allreduce.tensor 6", rank)
    for _ in range(20):
        read(path)
    done.set()
    for thread in threads:
        thread.join(20.0)
    for recording in reversed(recordings):
        recording.stop()
    assert unfinished(read(path)) == []


@pytest.mark.usefixtures("no_leaks")
def test_the_clock_of_another_machine_is_found(soon: Deadline) -> None:
    store = clock_shift.place(LocalStore(), 5)
    ahead = 1234.5
    answering = threading.Thread(
        target=clock_shift.answer, args=(store, lambda: time.perf_counter() + ahead, soon)
    )
    answering.start()
    begin = time.perf_counter()
    shift = clock_shift.measure(store, time.perf_counter, soon)
    took = time.perf_counter() - begin
    answering.join(20.0)
    assert abs(shift - ahead) <= took / 2
    assert store.keys("") == [] or all(key.startswith("answer") for key in store.keys(""))


def test_ranks_of_several_machines_exchange_their_times(path: Path) -> None:
    store = LocalStore()
    places = [Place(rank=rank, hosts=["a", "b"], store=store) for rank in (0, 1)]
    recordings = [timeline.start(str(path), 1, place, mark_cycles=False) for place in places]
    for turn in ("first", "second"):
        for rank in (0, 1):
            reduce(rank, turn)
    for recording in reversed(recordings):
        recording.stop()
    records = read(path)
    for rank in (0, 1):
        assert set(rows(records, rank)) == {"allreduce.first", "allreduce.second"}
    begin = {rank: rows(records, rank)["allreduce.second"][0]["ts"] for rank in (0, 1)}
    assert 0.0 < begin[1] - begin[0] < 5e6  # one clock here: the shift found is about nothing
