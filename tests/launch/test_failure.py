"""Which failure is shown, and how."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.failure import (
    Failure,
    describe,
    last_words,
    looks_like_victim,
    root_cause,
    shortened,
)

FAILURES = st.lists(
    st.builds(Failure, rank=st.integers(0, 9), at=st.floats(0, 9), victim=st.booleans()),
    min_size=1,
)


@given(FAILURES)
def test_the_root_cause_is_the_first_that_is_no_victim(failures: list[Failure]) -> None:
    cause = root_cause(failures)
    candidates = [each for each in failures if not each.victim] or failures
    assert cause in candidates
    assert cause.at == min(each.at for each in candidates)


def test_exit_codes() -> None:
    assert Failure(rank=0, at=0, code=3).exit_code == 3
    assert Failure(rank=0, at=0, code=-9).exit_code == 137
    assert Failure(rank=0, at=0, code=0).exit_code == 1
    assert Failure(rank=0, at=0).exit_code == 1


def test_last_words_are_the_last_traceback() -> None:
    stderr = b"warning\nTraceback (most recent call last):\n  a\nValueError: x\n"
    assert last_words(stderr * 2) == ["Traceback (most recent call last):", "  a", "ValueError: x"]
    assert last_words(b"\n".join(b"%d" % n for n in range(20))) == [str(n) for n in range(10, 20)]
    assert last_words(b"\r 10%\r 20%\xff\n") == [" 20%\ufffd"]
    assert last_words(b"") == []


def test_victims_are_known_by_their_last_line() -> None:
    assert looks_like_victim(b"Traceback\n  x\nfarandole.core.errors.PeerLost: rank 1 was lost\n")
    assert not looks_like_victim(b"ValueError: PeerLost\n")
    assert not looks_like_victim(b"")


def test_long_tracebacks_are_shortened() -> None:
    lines = shortened([str(n) for n in range(100)])
    assert lines[0] == "0"
    assert lines[-1] == "99"
    assert "60 lines left out" in lines[20]


def test_the_message() -> None:
    cause = Failure(rank=1, at=0.0, code=3, details=["ValueError: x"])
    assert describe(cause, {"stopped": [0, 2, 3], "failed too": []}, killed_for_memory=0) == (
        "farandole: rank 1 exited with code 3 (stopped: ranks 0, 2-3).\n"
        "  What rank 1 said last:\n    ValueError: x"
    )
    killed = Failure(rank=1, at=0.0, code=-9)
    assert "memory was used up" in describe(killed, {}, killed_for_memory=1)
    assert "dmesg" in describe(killed, {}, killed_for_memory=0)
    assert "signal 99." in describe(Failure(rank=1, at=0.0, code=-99), {}, killed_for_memory=0)
