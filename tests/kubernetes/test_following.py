"""Following logs: no line lost, none doubled, wherever the connection breaks off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.kubernetes.following import Tail

moments = st.lists(st.integers(0, 3_000_000_000), min_size=1, max_size=30).map(sorted)
"""Nanoseconds; several lines may share one."""


def stamp(nanoseconds: int) -> str:
    """As the server writes it: zeros at the end left out."""
    seconds, rest = divmod(nanoseconds, 10**9)
    fraction = f".{rest:09d}".rstrip("0").rstrip(".")
    return f"2026-12-01T10:00:{seconds:02d}{fraction}Z"


@given(moments, st.lists(st.integers(0, 30), max_size=6))
def test_every_line_is_taken_once_wherever_the_connection_breaks(
    times: list[int], cuts: list[int]
) -> None:
    lines = [(stamp(time), number) for number, time in enumerate(times)]
    tail = Tail()
    taken: list[int] = []
    for cut in [*cuts, len(lines)]:
        since = tail.since
        sent = [each for each in lines if since is None or each[0][:19] >= since[:19]]
        tail.begin()
        taken += [number for time, number in sent[:cut] if tail.accept(time)]
    assert taken == list(range(len(lines)))
