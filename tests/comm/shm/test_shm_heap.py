"""``comm.engines.shm.heap``: parts in use never overlap, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.engines.shm.heap import Heap

START, STOP, UNIT = 3 * 64, 103 * 64, 64


def widest_gap(used: list[tuple[int, int]]) -> int:
    ends = [START, *sorted(stop for _, stop in used)]
    begins = [*sorted(start for start, _ in used), STOP]
    return max(begin - end for end, begin in zip(ends, begins, strict=True))


@given(st.lists(st.one_of(st.integers(0, 40 * UNIT), st.integers(-20, -1)), max_size=60))
def test_parts_are_whole_apart_and_come_back(actions: list[int]) -> None:
    """Positive: allocate so many bytes. Negative: free one of the parts in use."""
    heap = Heap(START, STOP, UNIT)
    used: list[tuple[int, int]] = []
    for action in actions:
        if action >= 0:
            part = heap.allocate(action)
            if part is None:
                assert widest_gap(used) < action
                continue
            start, stop = part
            assert START <= start < stop <= STOP
            assert start % UNIT == stop % UNIT == 0
            assert action <= stop - start < action + UNIT or stop - start == UNIT
            assert all(stop <= begin or end <= start for begin, end in used)
            used.append(part)
        elif used:
            heap.free(*used.pop(action % len(used)))
    for part in used:
        heap.free(*part)
    assert heap.allocate(STOP - START) == (START, STOP)


def test_a_range_without_room() -> None:
    heap = Heap(64, 64, 64)
    assert heap.allocate(1) is None
