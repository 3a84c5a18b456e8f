"""Folding and prefixing: no line lost, order kept, whatever the bytes."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farandole.launch.output import LONGEST_LINE, Folder, Line, Splitter
from farandole.launch.screen import Screen, Surface

PIPE = Surface({"stdout": False, "stderr": False}, colour=False, columns=80)
TERMINAL = Surface({"stdout": True, "stderr": True}, colour=False, columns=40)


PIECES = st.one_of(st.binary(max_size=20), st.sampled_from([b"\r", b"\n", b"a\r", b"\rb"]))


@given(st.lists(PIECES, max_size=20))
@example([b"a\r\r"])
@example([b"a\r", b"\r"])
def test_a_splitter_loses_nothing(chunks: list[bytes]) -> None:
    splitter = Splitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    lines += splitter.end()
    whole = [part.rstrip(b"\r").rpartition(b"\r")[2] for part in b"".join(chunks).split(b"\n")]
    last = whole.pop()
    assert lines[: len(whole)] == whole
    assert lines[len(whole) :] in ([last], [] if not last.strip() else [last])


def test_a_splitter_keeps_what_would_stand_on_the_screen() -> None:
    splitter = Splitter()
    assert splitter.feed(b"\r 10%|#") == []
    assert splitter.unfinished == b" 10%|#"
    assert splitter.feed(b"\r 20%|##\r") == []
    assert splitter.unfinished == b" 20%|##"
    assert splitter.feed(b"\n") == [b" 20%|##"]
    assert splitter.feed(b"windows\r\n") == [b"windows"]
    assert splitter.feed(b"\rbar\r   \r") == []
    assert splitter.end() == []


def test_a_huge_line_comes_in_pieces_and_memory_stays_small() -> None:
    splitter = Splitter()
    pieces = [piece for _ in range(50) for piece in splitter.feed(b"x" * 20_000)]
    pieces += splitter.end()
    assert sum(map(len, pieces)) == 1_000_000
    assert max(map(len, pieces)) == LONGEST_LINE


SAID = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["stdout", "stderr"]),
        st.sampled_from([b"a", b"b", b"c", b"epoch 1"]),
        st.floats(0, 0.2),
    ),
    max_size=60,
)


@given(SAID)
def test_folding_keeps_every_line_and_the_order_of_each_rank(
    said: list[tuple[int, str, bytes, float]],
) -> None:
    folder = Folder(4, window=0.1)
    shown: list[Line] = []
    now = 0.0
    for rank, stream, text, pause in said:
        now += pause
        shown += folder.due(now)
        folder.feed(rank, stream, [text], now)
        shown += folder.due(now)
        soon = folder.next_due()
        assert soon is None or now <= soon <= now + 0.1
    shown += folder.flush()
    for rank in range(4):
        heard = [(line.stream, line.text) for line in shown if rank in line.ranks]
        assert heard == [(stream, text) for who, stream, text, _ in said if who == rank]
    assert all(list(line.ranks) == sorted(set(line.ranks)) for line in shown)


def test_the_same_line_of_all_ranks_is_shown_at_once_and_once() -> None:
    folder = Folder(3, window=0.1)
    for rank in range(3):
        assert folder.due(0.0) == []
        folder.feed(rank, "stdout", [b"hello"], 0.0)
    assert folder.due(0.0) == [Line((0, 1, 2), "stdout", b"hello")]


def test_a_line_waits_no_longer_than_the_window() -> None:
    folder = Folder(3, window=0.1)
    folder.feed(2, "stdout", [b"alone"], 1.0)
    assert folder.next_due() == pytest.approx(1.1)
    assert folder.due(1.05) == []
    assert folder.due(1.1) == [Line((2,), "stdout", b"alone")]


def test_a_rank_that_is_done_is_not_waited_for() -> None:
    folder = Folder(3, window=0.1)
    folder.fall_silent(1)
    folder.feed(0, "stdout", [b"x"], 0.0)
    folder.feed(2, "stdout", [b"x"], 0.0)
    assert folder.due(0.0) == [Line((0, 2), "stdout", b"x")]


def test_different_first_lines_do_not_keep_later_ones_apart() -> None:
    folder = Folder(2, window=0.1)
    folder.feed(0, "stdout", [b"rank 0", b"same", b"again"], 0.0)
    folder.feed(1, "stdout", [b"rank 1", b"same", b"again"], 0.0)
    assert folder.due(0.1) == [
        Line((0,), "stdout", b"rank 0"),
        Line((1,), "stdout", b"rank 1"),
        Line((0, 1), "stdout", b"same"),
        Line((0, 1), "stdout", b"again"),
    ]


def test_streams_are_not_mixed() -> None:
    folder = Folder(2, window=0.1)
    folder.feed(0, "stdout", [b"x"], 0.0)
    folder.feed(1, "stderr", [b"x"], 0.0)
    assert folder.due(0.2) == [Line((0,), "stdout", b"x"), Line((1,), "stderr", b"x")]


def test_prefixes() -> None:
    screen = Screen(6, PIPE)
    for rank in (0, 1, 2, 5):
        screen.feed(rank, "stdout", b"hello\n", 0.0)
    assert screen.due(1.0) == [("stdout", b"[0-2,5] hello\n")]
    coloured = Screen(2, PIPE._replace(colour=True))
    assert coloured.prefix([1]) == b"\x1b[33m[1]\x1b[0m "


def test_the_last_line_needs_no_newline() -> None:
    screen = Screen(2, PIPE)
    screen.feed(1, "stderr", b"half", 0.0)
    assert screen.due(5.0) == []
    assert screen.finish(5.0) == [("stderr", b"[1] half\n")]


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=30)), max_size=9)
)
def test_one_rank_passes_untouched(written: list[tuple[str, bytes]]) -> None:
    screen = Screen(1, TERMINAL)
    passed = [piece for stream, chunk in written for piece in screen.feed(0, stream, chunk, 0.0)]
    passed += screen.finish(0.0)
    for stream in ("stdout", "stderr"):
        assert _text(passed, stream) == b"".join(chunk for s, chunk in written if s == stream)


def test_a_progress_bar_of_rank_0_stays_in_the_last_row() -> None:
    screen = Screen(2, TERMINAL)
    screen.feed(0, "stderr", b"\r 10%|#   |", 0.0)
    assert screen.due(0.0) == []
    assert screen.due(0.1) == [("stderr", b"[0]  10%|#   |")]
    screen.feed(0, "stderr", b"\r 20%|##  |", 0.2)
    assert screen.due(0.2) == [("stderr", b"\r\x1b[K"), ("stderr", b"[0]  20%|##  |")]
    screen.feed(1, "stdout", b"note\n", 0.3)
    screen.feed(1, "stderr", b"\r 15%|#+  |", 0.3)
    assert screen.due(0.4) == [
        ("stderr", b"\r\x1b[K"),
        ("stdout", b"[1] note\n"),
        ("stderr", b"[0]  20%|##  |"),
    ]
    screen.feed(0, "stderr", b"\r100%|####|\n", 0.5)
    assert screen.due(0.6) == [("stderr", b"\r\x1b[K"), ("stderr", b"[0] 100%|####|\n")]
    assert screen.finish(1.0) == [("stderr", b"[1]  15%|#+  |\n")]


def test_a_live_line_is_cut_to_the_width_of_the_terminal() -> None:
    screen = Screen(2, TERMINAL._replace(columns=12))
    screen.feed(0, "stdout", b"abcdefghijklmnop", 0.0)
    assert screen.due(0.2) == [("stdout", b"[0] abcdefg")]
    screen.resize(14)
    screen.feed(0, "stdout", b"q", 0.3)
    assert screen.due(0.3)[-1] == ("stdout", b"[0] abcdefghi")
    assert screen.finish(1.0)[-1] == ("stdout", b"[0] abcdefghijklmnopq\n")


def test_a_rank_0_that_moves_the_cursor_has_the_screen_for_itself() -> None:
    screen = Screen(2, TERMINAL)
    screen.feed(0, "stdout", b"before\n", 0.0)
    two_bars = b"\n\r 10%\x1b[A\r 30%"
    passed = screen.feed(0, "stdout", two_bars, 0.0)
    assert passed == [("stdout", b"[0] before\n"), ("stdout", two_bars)]
    screen.feed(1, "stdout", b"note\n", 0.1)
    assert _text(screen.due(1.0), "stdout") == b"\r\n[1] note\n"
    assert screen.feed(0, "stdout", b"\x1b[B done\n", 1.0) == [("stdout", b"\x1b[B done\n")]


@pytest.mark.parametrize("size", [1, 2])
def test_a_cursor_that_rank_0_has_hidden_is_shown_at_the_end(size: int) -> None:
    screen = Screen(size, TERMINAL)
    screen.feed(0, "stdout", b"\x1b[?25l drawing", 0.0)
    assert screen.finish(1.0)[-1] == ("stdout", b"\x1b[?25h")
    screen = Screen(size, TERMINAL)
    screen.feed(0, "stdout", b"\x1b[?25l drawing \x1b[?25h", 0.0)
    assert not screen.finish(1.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["stdout", "stderr"]), st.binary(max_size=12)),
        max_size=30,
    )
)
def test_nothing_is_lost_in_a_pipe(written: list[tuple[int, str, bytes]]) -> None:
    screen = Screen(3, PIPE)
    pieces = []
    for number, (rank, stream, chunk) in enumerate(written):
        # Each line its own, so that none folds.
        chunk = chunk.replace(b"\r", b"").replace(b"\n", b"-%d-%d\n" % (rank, number))
        pieces += screen.feed(rank, stream, chunk or b"-", number / 10) + screen.due(number / 10)
    pieces += screen.finish(100.0)
    shown = b"".join(data for _, data in pieces)
    for _, _, chunk in written:
        for part in chunk.replace(b"\r", b"").split(b"\n"):
            assert part in shown


def _text(pieces: list[tuple[str, bytes]], stream: str) -> bytes:
    return b"".join(data for name, data in pieces if name == stream)
