"""When a job has failed and who is to blame, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.verdict import CAUSE, PRINTING, ShowStack, Stop, Verdict


def _report(text: str = "x", *, victim: bool = False) -> dict[str, Any]:
    kind = "PeerLost" if victim else "ValueError"
    return {"exception": kind, "text": text, "traceback": f"{kind}: {text}", "victim": victim}


def test_all_well() -> None:
    verdict = Verdict(2, 120.0)
    verdict.on_init(0, 1.0)
    verdict.on_init(1, 2.0)
    verdict.on_exit(1, 0, 3.0)
    assert not verdict.over
    verdict.on_exit(0, 0, 4.0)
    assert verdict.over
    assert verdict.cause is None
    assert verdict.due(1000.0) is None
    assert verdict.next_due() is None


def test_an_exit_code_stops_the_others_at_once() -> None:
    verdict = Verdict(3, 120.0)
    verdict.on_exit(2, 3, 5.0)
    assert verdict.next_due() == 5.0
    assert verdict.due(5.0) == Stop()
    assert verdict.due(5.0) is None
    verdict.on_exit(0, -15, 5.1)
    verdict.on_exit(1, 7, 5.2)
    assert verdict.cause is not None
    assert (verdict.cause.rank, verdict.cause.exit_code) == (2, 3)
    assert verdict.fates()["stopped"] == [0, 1]


def test_ranks_that_are_lost_with_their_host_stop_the_others() -> None:
    verdict = Verdict(4, 120.0)
    verdict.on_exit(3, 0, 1.0)
    verdict.on_lost(2, "was lost with b", 5.0)
    assert verdict.due(5.0) == Stop()
    verdict.on_exit(0, -15, 5.1)
    verdict.on_exit(1, -15, 5.2)
    assert verdict.over
    assert verdict.cause is not None
    assert (verdict.cause.rank, verdict.cause.reason) == (2, "was lost with b")
    assert verdict.cause.exit_code == 1
    assert verdict.fates()["stopped"] == [0, 1]
    assert verdict.fates()["had finished"] == [3]


def test_an_exception_has_time_to_be_shown() -> None:
    verdict = Verdict(2, 120.0)
    verdict.on_report(1, _report(), 5.0)
    assert verdict.due(5.0) is None
    assert verdict.next_due() == 5.0 + PRINTING
    verdict.on_exit(1, 1, 5.2)
    assert verdict.due(5.2) == Stop()
    assert verdict.cause is not None
    assert verdict.cause.reason == "raised ValueError"
    assert verdict.cause.code == 1


def test_an_exception_that_does_not_end_its_rank_stops_the_others_all_the_same() -> None:
    verdict = Verdict(2, 120.0)
    verdict.on_report(1, _report(), 5.0)
    assert verdict.due(5.0 + PRINTING) == Stop()
    verdict.on_exit(1, -15, 6.5)
    assert verdict.cause is not None
    assert verdict.cause.exit_code == 1


def test_a_victim_that_ends_first_waits_for_the_cause() -> None:
    verdict = Verdict(3, 120.0)
    verdict.on_report(0, _report(victim=True), 5.0)
    verdict.on_exit(0, 1, 5.1)
    assert verdict.due(5.1) is None
    verdict.on_exit(1, -9, 5.3)
    assert verdict.due(5.3) == Stop()
    assert verdict.cause is not None
    assert verdict.cause.rank == 1
    assert verdict.fates()["failed because of it"] == [0]


def test_a_lone_victim_is_the_cause_in_the_end() -> None:
    verdict = Verdict(2, 120.0)
    verdict.ranks[0].remember(b"farandole.core.errors.PeerLost: rank 1\n")
    verdict.on_exit(0, 1, 5.0)
    assert verdict.due(5.0) is None
    assert verdict.due(5.0 + CAUSE) == Stop()
    assert verdict.cause is not None
    assert verdict.cause.rank == 0


def test_the_same_error_everywhere_is_told_once() -> None:
    verdict = Verdict(3, 120.0)
    for rank in (2, 0, 1):
        verdict.on_report(rank, _report("mismatch"), 5.0)
        verdict.on_exit(rank, 1, 5.1)
    assert verdict.cause is not None
    assert verdict.cause.rank == 2
    assert verdict.fates()["failed in the same way"] == [0, 1]


@pytest.mark.parametrize("order", ["ends first", "ends last"])
def test_a_rank_that_ends_without_init_fails_those_who_wait(order: str) -> None:
    verdict = Verdict(3, 120.0)
    steps = [lambda: verdict.on_exit(1, 0, 2.0), lambda: verdict.on_init(0, 2.0)]
    for step in steps if order == "ends first" else reversed(steps):
        step()
    assert verdict.due(2.0) == Stop()
    assert verdict.cause is not None
    assert verdict.cause.rank == 1
    assert "without calling init() while rank 0 waited" in verdict.cause.reason
    assert verdict.cause.exit_code == 1


def test_ranks_that_use_no_init_may_end_as_they_like() -> None:
    verdict = Verdict(2, 0.5)
    verdict.on_exit(0, 0, 1.0)
    assert verdict.due(1000.0) is None
    verdict.on_exit(1, 0, 2000.0)
    assert verdict.cause is None


def test_a_late_rank_shows_its_stack() -> None:
    verdict = Verdict(3, 120.0)
    verdict.on_init(1, 10.0)
    assert verdict.next_due() == 130.0
    assert verdict.due(129.9) is None
    assert verdict.due(130.0) == ShowStack(0)
    verdict.ranks[0].remember(b"Fatal Python error: Aborted\n  File x in load\n")
    verdict.on_exit(0, -6, 130.2)
    assert verdict.due(130.2) == Stop()
    cause = verdict.cause
    assert cause is not None
    assert "within 120 s" in cause.reason
    assert "nor have others of ranks 0, 2" in cause.reason
    assert "  File x in load" in cause.details
    assert cause.exit_code == 1


def test_a_late_rank_that_shows_nothing_is_stopped_all_the_same() -> None:
    verdict = Verdict(2, 120.0)
    verdict.on_init(1, 0.0)
    assert verdict.due(120.0) == ShowStack(0)
    assert verdict.due(120.0 + PRINTING) == Stop()
    assert verdict.cause is not None
    assert verdict.cause.rank == 0


def test_after_the_users_signal_nothing_is_a_failure() -> None:
    verdict = Verdict(2, 120.0)
    verdict.on_init(0, 0.0)
    verdict.stop()
    verdict.on_exit(0, 1, 1.0)
    verdict.on_exit(1, -15, 1.0)
    assert verdict.cause is None
    assert verdict.due(1000.0) is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["exit", "init", "report", "victim"]),
        st.integers(0, 3),
        st.sampled_from([0, 1, 3, -9]),
    ),
    max_size=12,
)


@given(EVENTS)
def test_a_failure_always_stops_the_job_in_bounded_time(
    events: list[tuple[str, int, int]],
) -> None:
    verdict = Verdict(4, 120.0)
    for now, (what, rank, code) in enumerate(events):
        if verdict.ranks[rank].code is not None:
            continue
        if what == "exit":
            verdict.on_exit(rank, code, float(now))
        elif what == "init":
            verdict.on_init(rank, float(now))
        elif verdict.ranks[rank].report is None:
            verdict.on_report(rank, _report(victim=what == "victim"), float(now))
    failed = verdict.cause is not None
    if failed:
        due = verdict.next_due()
        assert due is not None
        assert due <= len(events) + max(CAUSE, PRINTING)
        assert isinstance(verdict.due(due), Stop)
    codes = [rank.code for rank in verdict.ranks]
    if any(code not in (0, None) for code in codes):
        assert failed
