"""Plans: purely from metadata."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.fusion import plan as plans

SIZES = {"float16": 2, "float32": 4, "float64": 8}


def spec(name: str, shape: tuple[int, ...] = (4,), dtype: str = "float32", **more):
    stride = plans.dense_stride(shape, torch.empty(shape).stride())
    return plans.ParameterSpec(name, shape, stride, dtype, SIZES[dtype], "cpu#0", **more)


@st.composite
def parameters(draw):
    count = draw(st.integers(1, 20))
    return [
        spec(
            f"p{i}",
            tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            draw(st.sampled_from(sorted(SIZES))),
            family=draw(st.sampled_from([None, None, None, 0, 1])),
        )
        for i in range(count)
    ]


@given(parameters(), st.randoms(), st.integers(0, 2000), st.integers(0, 2000))
def test_every_parameter_has_one_place_of_its_own(specs, random, limit, first):
    order = list(range(len(specs)))
    random.shuffle(order)
    plan = plans.make_plan(specs, order, bucket_bytes=limit, first_bucket_bytes=first)

    placed = [slot.index for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(specs)))
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset * SIZES[bucket.dtype] % plans.ALIGNMENT == 0
            assert slot.numel == math.prod(specs[slot.index].shape)
            assert specs[slot.index].dtype == bucket.dtype
            end = slot.offset + slot.numel
        assert end <= bucket.payload
        assert bucket.length == bucket.payload + len(bucket.slots) + plans.GUARDS + 1


@given(parameters(), st.randoms(), st.integers(0, 2000))
def test_buckets_keep_the_order_and_the_limit(specs, random, limit):
    order = list(range(len(specs)))
    random.shuffle(order)
    plan = plans.make_plan(specs, order, bucket_bytes=limit, first_bucket_bytes=limit)
    expected = {index: place for place, index in enumerate(order)}

    last = [expected[bucket.slots[-1].index] for bucket in plan.buckets]
    assert last == sorted(last)
    assert [bucket.number for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        places = [expected[slot.index] for slot in bucket.slots]
        assert places == sorted(places)
        members = [specs[slot.index] for slot in bucket.slots]
        assert len({(each.dtype, each.family) for each in members}) == 1
        if len(members) > 1 and members[0].family is None:
            assert bucket.payload * SIZES[bucket.dtype] <= limit


def test_the_first_bucket_is_small():
    specs = [spec(f"p{i}", (256,)) for i in range(6)]
    plan = plans.make_plan(specs, range(6), bucket_bytes=3072, first_bucket_bytes=1024)
    assert [len(bucket.slots) for bucket in plan.buckets] == [1, 3, 2]


def test_a_family_shares_a_bucket_of_its_own():
    specs = [spec(f"p{i}", (256,), family=0 if i in (1, 3) else None) for i in range(4)]
    plan = plans.make_plan(specs, range(4), bucket_bytes=1024, first_bucket_bytes=1024)
    assert [plan.names(bucket.number) for bucket in plan.buckets] == [
        ("p0",),
        ("p2",),
        ("p1", "p3"),
    ]


def test_a_wrong_order_is_refused():
    with pytest.raises(ValueError, match="not an order"):
        plans.make_plan([spec("a"), spec("b")], [0, 0], bucket_bytes=1, first_bucket_bytes=1)


@given(parameters())
def test_proposals_travel(specs):
    order = tuple(reversed(range(len(specs))))
    proposal = plans.Proposal(tuple(specs), order, 1000, 100, {"op": "Sum"})
    again = plans.Proposal.from_bytes(proposal.to_bytes())
    assert again == proposal
    assert again.plan().digest == proposal.plan().digest


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.empty([shape[dim] for dim in order])
    back = [order.index(dim) for dim in range(len(shape))]
    return tensor.permute(back) if shape else tensor


@given(layouts())
def test_a_dense_layout_is_kept(tensor):
    stride = plans.dense_stride(tuple(tensor.shape), tensor.stride())
    view = torch.empty(max(1, tensor.numel())).as_strided(tuple(tensor.shape), stride)
    assert view.shape == tensor.shape
    for dim, length in enumerate(tensor.shape):
        if length > 1 and tensor.numel():
            assert stride[dim] == tensor.stride(dim)


def test_a_layout_with_gaps_becomes_contiguous():
    assert plans.dense_stride((2, 3), (1, 9)) == (3, 1)
    assert plans.dense_stride((2, 3), (0, 1)) == (3, 1)
    assert plans.dense_stride((), ()) == ()


def differences(*proposals: tuple[list[plans.ParameterSpec], dict[str, str]]) -> list[str]:
    return plans.differences(
        [plans.Proposal(tuple(specs), tuple(range(len(specs))), 1, 1, terms)
         for specs, terms in proposals]
    )  # fmt: skip


def test_equal_proposals_do_not_differ():
    assert differences(([spec("a")], {"op": "Sum"}), ([spec("a")], {"op": "Sum"})) == []


def test_differences_name_ranks_and_parameters():
    same = [spec("a"), spec("b", (2, 2))]
    assert differences((same, {}), ([spec("a")], {}), (same, {})) == [
        "parameter 'b' exists on ranks 0, 2, not on rank 1"
    ]
    assert differences((same, {}), ([spec("a"), spec("b", (2, 3))], {})) == [
        "parameter 'b' has shape (2, 2) on rank 0, (2, 3) on rank 1",
        "parameter 'b' has stride (2, 1) on rank 0, (3, 1) on rank 1",
    ]
    assert differences((same, {}), ([spec("a", dtype="float64"), same[1]], {})) == [
        "parameter 'a' has dtype float32 on rank 0, float64 on rank 1"
    ]
    assert differences((same, {"op": "Sum"}), (same, {"op": "Average"})) == [
        "op Sum on rank 0, Average on rank 1"
    ]
    assert differences((same, {}), (same[::-1], {})) == [
        "parameter 0 is 'a' on rank 0, 'b' on rank 1"
    ]
