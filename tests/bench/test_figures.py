"""What measured seconds say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.bench import compare
from farandole.bench.compare import Case, Comparison
from farandole.bench.figures import (
    parse_size,
    ratio,
    seconds_label,
    size_label,
    slowest,
    spread,
    summary,
)

SECONDS = st.floats(1e-6, 1e3)


@given(st.lists(SECONDS, min_size=1, max_size=30))
def test_the_median_lies_between_its_quarters(series: list[float]) -> None:
    found = spread(series)
    assert min(series) <= found.low <= found.median <= found.high <= max(series)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30))
def test_a_common_slowdown_of_a_round_leaves_its_ratio(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    slowed = [
        (one * factor, other * factor)
        for factor, (one, other) in zip([1.0, 8.0] * 15, pairs, strict=False)
    ]
    noisy_ours, noisy_theirs = zip(*slowed, strict=True)
    assert ratio(noisy_ours, noisy_theirs) == pytest.approx(ratio(ours, theirs))


def test_the_slowest_rank_counts_in_each_round() -> None:
    ranks = [[[1.0, 5.0], [7.0, 7.0]], [[2.0, 3.0], [6.0, 9.0]]]
    assert slowest(ranks) == [[2.0, 5.0], [7.0, 9.0]]


@given(st.integers(1, 1 << 35))
def test_a_size_reads_as_it_is_written(size: int) -> None:
    assert (
        parse_size(size_label(size).removesuffix("B") if size % 1024 else size_label(size)) == size
    )


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1.5KiB", "one"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "label"),
    [
        (2.5e-7, "0.25 µs"),
        (1.73e-5, "17.3 µs"),
        (0.0042, "4.20 ms"),
        (0.5, "500 ms"),
        (3, "3.00 s"),
    ],
)
def test_seconds_read_well(seconds: float, label: str) -> None:
    assert seconds_label(seconds) == label


def test_speedups_are_inverse_ratios() -> None:
    assert summary({"gloo 2 ranks 1MiB": 0.25}) == {
        "ratios": {"gloo 2 ranks 1MiB": 0.25},
        "speedups": {"gloo 2 ranks 1MiB": 4.0},
    }


def comparison() -> Comparison:
    seconds = {"shm": [1.0, 1.0, 2.0], "gloo": [4.0, 4.0, 4.0]}
    pairs = {"gloo": ("shm", "gloo")}
    return Comparison(
        "Collectives",
        [
            Case(2, "allreduce", 1 << 20, seconds, pairs),
            Case(4, "allgather", 4096, seconds, pairs),
        ],
        {"torch": "2"},
    )


def test_the_final_line_names_rival_ranks_and_size() -> None:
    figures = json.loads(json.dumps(comparison().figures()))
    assert figures["ratios"] == {"gloo 2 ranks 1MiB": 0.25, "gloo allgather 4 ranks 4KiB": 0.25}
    assert figures["speedups"]["gloo 2 ranks 1MiB"] == 4.0
    assert figures["seconds"]["shm 2 ranks 1MiB"] == 1.0
    assert figures["versions"] == {"torch": "2"}


def test_the_table_has_a_line_for_each_case() -> None:
    lines = list(comparison().lines())
    assert "vs gloo" in lines[0]
    assert "2 ranks 1MiB" in lines[1]
    assert "4.00x" in lines[1]
    assert len(lines) == 4


def test_steps_compare_our_optimizer_and_our_backend_with_ddp() -> None:
    pairs = compare._pairs_of_steps({"farandole": [1.0], "ddp": [1.0], "backend": [1.0]})
    assert pairs == {"ddp": ("farandole", "ddp"), "backend": ("backend", "ddp")}
    assert compare._pairs_of_steps({"backend": [1.0], "local": [1.0]}) == {}
