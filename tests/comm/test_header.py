"""What the ranks say of a collective, and the judgement on it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.header import Header, find_mismatch

LOSS = Header(
    operation="allreduce",
    name="loss",
    dtypes=("float32",),
    shapes=((2, 3),),
    op="Average",
    device="cpu",
)

shapes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
headers = st.builds(
    Header,
    operation=st.sampled_from(["allreduce", "allgather", "barrier"]),
    name=st.none() | st.text(max_size=8),
    grouped=st.booleans(),
    op=st.none() | st.sampled_from(["Sum", "Min"]),
    scales=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
    root=st.none() | st.integers(0, 9),
    device=st.sampled_from(["", "cpu", "cuda"]),
    splits=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtypes=st.just(("int8", "float8_e5m2")),
    shapes=st.tuples(shapes, shapes),
)


@given(headers)
def test_headers_survive_the_wire(header):
    assert Header.decode(header.encode()) == header


@given(st.lists(headers, min_size=1, max_size=4))
def test_judgement_is_the_same_text_for_everybody_and_only_where_needed(said):
    ranks = list(range(len(said)))
    text = find_mismatch(said, ranks)
    if text is None:
        assert len({(h.operation, h.name, h.op, h.root, h.device) for h in said}) == 1
    else:
        assert find_mismatch(list(said), ranks) == text
        assert "rank" in text


@pytest.mark.parametrize(
    ("changes", "stem"),
    [
        ({"operation": "broadcast"}, "Mismatched operations: One rank did an allreduce, but"),
        ({"name": "accuracy"}, 'Mismatched names: One rank did allreduce "loss", but another'),
        ({"name": None}, "Mismatched names"),
        ({"grouped": True}, "Mismatched names"),
        ({"op": "Sum"}, "Mismatched reduction operation: One rank specified Average, but another"),
        ({"scales": (0.5, 1.0)}, "Mismatched prescale and/or postscale factors"),
        ({"device": "cuda"}, "Mismatched allreduce CPU/GPU device selection: One rank specified"),
        ({"dtypes": ("float64",)}, "Mismatched data types: One rank had type float32, but another"),
        ({"shapes": ((2, 4),)}, "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of"),
        ({"shapes": ((3, 3),)}, "Mismatched ALLREDUCE tensor shapes"),
        ({"shapes": ((2,),)}, "Mismatched ALLREDUCE tensor shapes"),
        (
            {"shapes": ((2, 3), (1,)), "dtypes": ("float32", "int8")},
            "Mismatched number of tensors",
        ),
    ],
)
def test_a_mismatch_names_both_sides_and_the_ranks(changes, stem):
    other = dataclasses.replace(LOSS, **changes)
    text = find_mismatch([LOSS, LOSS, other, LOSS], ranks=[0, 1, 5, 7])
    assert text is not None
    assert text.startswith(stem)
    assert "ranks 0-1, 7: " in text
    assert "rank 5: " in text


def test_roots_are_named():
    said = [Header(operation="broadcast", name="w", root=root) for root in (0, 1)]
    text = find_mismatch(said, ranks=[0, 1])
    assert text is not None
    assert text.startswith("Mismatched broadcast root ranks: One rank specified root rank 0")


@pytest.mark.parametrize("operation", ["allgather", "alltoall"])
def test_first_dimension_may_differ_where_rows_travel(operation):
    said = [
        Header(operation=operation, dtypes=("int8",), shapes=((rows, 4),), splits=(rows, 0))
        for rows in (0, 3)
    ]
    assert find_mismatch(said, ranks=[0, 1]) is None
    said[1] = dataclasses.replace(said[1], shapes=((3, 5),))
    text = find_mismatch(said, ranks=[0, 1])
    assert text is not None
    assert "Only the first dimension may differ" in text
