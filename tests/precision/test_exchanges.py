"""What every exchange with error feedback promises, on the ``threads`` engine."""

from __future__ import annotations

import math

import pytest
import torch
from exchange_ranks import TAIL, errors_of, layout_of, open_engine, random_buffer, run
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.codec import Layout, Memory
from farandole.comm.fusion.encoding import EncodedSum
from farandole.precision.hosts import AcrossHosts
from farandole.precision.int8 import Int8
from farandole.precision.powersgd import PowerSGD
from farandole.precision.topk import TopK
from farandole.testing.ranks import run_threads
from farandole.torch.compression import BF16Compressor

CODECS = [Int8(), PowerSGD(2), TopK(0.05)]
SHAPES = [(40, 33), (5,), (16, 8, 3, 3), (), (300, 1), (0, 4), (64, 64)]

codecs = pytest.mark.parametrize("codec", CODECS, ids=str)


@codecs
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_bits(codec, size):
    (first, _), *others = run(size, codec, layout_of(SHAPES), steps=4)
    for results, _ in others:
        assert all(map(torch.equal, first, results))


@codecs
def test_what_is_in_no_block_and_what_is_not_worth_it_is_exact(codec):
    layout, size = layout_of(SHAPES), 3
    results, _ = run(size, codec, layout, steps=2)[0]
    exact = [block for block in layout.blocks if not codec.encodes(block.shape)]
    assert {block.name for block in exact} >= {"p1", "p3", "p5"}
    for step, result in enumerate(results):
        expected = sum(random_buffer(layout, rank, step).double() for rank in range(size))
        assert torch.equal(result[-TAIL:].double(), expected[-TAIL:])
        for block in exact:
            part = slice(block.offset, block.offset + block.numel)
            torch.testing.assert_close(result[part].double(), expected[part], rtol=1e-5, atol=1e-6)
        for block, after in zip(layout.blocks, layout.blocks[1:], strict=False):
            assert not result[block.offset + block.numel : after.offset].any()


def shapes_of_blocks():
    length = st.integers(0, 40)
    return st.lists(
        st.one_of(st.tuples(length), st.tuples(length, length), st.tuples(length, length, length)),
        max_size=4,
    )


@settings(max_examples=25, deadline=None)
@given(
    codec=st.sampled_from([*CODECS, PowerSGD(1), TopK(1.0), TopK(1e-6)]),
    size=st.integers(1, 4),
    shapes=shapes_of_blocks(),
    steps=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_nothing_is_lost(codec, size, shapes, steps, dtype):
    """All that went in has come out, but for the errors of now."""
    layout = layout_of(shapes)

    def make(layout, rank, step):
        return random_buffer(layout, rank, step, dtype)

    ranks = run(size, codec, layout, steps, make)
    went_in = sum(
        make(layout, rank, step).double() for rank in range(size) for step in range(steps)
    )
    results, _ = ranks[0]
    came_out = sum(result.double() for result in results)
    left = sum(errors_of(memory, layout) for _, memory in ranks)
    # Results are rounded to the buffer's dtype, and sums made in it.
    rounding = 2.0 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(came_out + left, went_in, rtol=0, atol=rounding)


@codecs
def test_the_average_over_steps_converges_to_the_true_one(codec):
    """Of constant gradients, that differ between ranks: what was left out comes later."""
    layout, size = layout_of([(40, 33), (64, 64)]), 2
    results, _ = run(
        size, codec, layout, 200, lambda layout, rank, _: random_buffer(layout, rank, 0)
    )[0]
    truth = sum(random_buffer(layout, rank, 0) for rank in range(size))
    payload = slice(0, layout.payload)

    def distance(steps):
        average = sum(results[:steps]) / steps
        return float((average - truth)[payload].norm() / truth[payload].norm())

    assert distance(200) < 0.1
    assert distance(200) < 0.3 * distance(20) or distance(200) < 1e-3


@codecs
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_overflowed_is_seen_by_all_and_forgotten(codec, value):
    layout = layout_of([(40, 33), (64, 64)])

    def make(layout, rank, step):
        buffer = random_buffer(layout, rank, step)
        if (rank, step) == (1, 1):
            buffer[50] = value
        return buffer

    ranks = run(2, codec, layout, 4, make)
    for results, memory in ranks:
        assert results[0].isfinite().all()
        assert not results[1][: layout.blocks[0].numel].isfinite().all()
        assert results[2].isfinite().all()
        assert results[3].isfinite().all()
        assert results[3][: layout.payload].any()
        assert errors_of(memory, layout).isfinite().all()


@codecs
def test_gradients_that_are_zero_for_a_while(codec):
    layout = layout_of([(40, 33)])

    def make(layout, rank, step):
        return random_buffer(layout, rank, step) * (step > 0)

    (results, _), _ = run(2, codec, layout, 60, make)
    assert not results[0][: layout.payload].any()
    went_in = sum(make(layout, rank, step) for rank in range(2) for step in range(60))
    assert (sum(results) - went_in).norm() < 0.6 * went_in.norm()


@codecs
def test_errors_move_with_their_parameter_to_other_buckets(codec):
    before, after = layout_of([(40, 33), (64, 64)]), layout_of([(8, 8), (64, 64), (40, 33)])
    names = {"p1": "p1", "p0": "p2"}

    def rank_function(rank):
        engine, memory = open_engine(), Memory()
        exchange = codec.exchange(before, memory)
        engine.sum_encoded(random_buffer(before, rank, 0), exchange).wait()
        errors = {name: error.clone() for name, error in memory.errors.items()}
        renamed = Memory({names[name]: error for name, error in errors.items()})
        exchange = codec.exchange(after, renamed)
        buffer = torch.zeros(after.length)
        engine.sum_encoded(buffer, exchange).wait()
        return errors, buffer, errors_of(renamed, after)

    ranks = run_threads(2, rank_function)
    result = ranks[0][1].double()
    for old, new in names.items():
        block = next(each for each in after.blocks if each.name == new)
        part = slice(block.offset, block.offset + block.numel)
        sent_later = result[part] + sum(left[part] for _, _, left in ranks)
        unsent = sum(errors[old].double() for errors, _, _ in ranks)
        assert unsent.any()
        torch.testing.assert_close(sent_later, unsent, rtol=1e-4, atol=1e-4)


@codecs
def test_an_absent_rank_sends_zeros_and_keeps_its_errors(codec):
    layout = layout_of([(40, 33), (64, 64)])

    def rank_function(rank):
        engine, memory = open_engine(), Memory()
        exchange = codec.exchange(layout, memory)
        absent = codec.exchange(layout, memory.of_absent())
        results, errors = [], []
        for step in range(6):
            stays_away = rank == 1 and 2 <= step < 4
            buffer = random_buffer(layout, rank, step)
            if stays_away:
                buffer.zero_()
            engine.sum_encoded(buffer, absent if stays_away else exchange).wait()
            results.append(buffer)
            errors.append(errors_of(memory, layout).clone())
        return results, errors

    (first, errors_0), (second, errors_1) = run_threads(2, rank_function)
    assert all(map(torch.equal, first, second))
    assert torch.equal(errors_1[1], errors_1[3])
    assert not torch.equal(errors_1[3], errors_1[4])
    # Without the absent rank's part of the errors.
    sent = sum(random_buffer(layout, 0, step).double() for step in (2, 3))
    came_out = first[2].double() + first[3].double() + errors_0[3] - errors_0[1]
    tolerance = 0.3 if isinstance(codec, Int8) else 1e-3  # the sum's own error is the absent's
    torch.testing.assert_close(
        came_out[: layout.payload], sent[: layout.payload], rtol=0, atol=tolerance
    )


@codecs
def test_forgotten_errors_are_not_sent(codec):
    layout = layout_of([(40, 33)])

    def rank_function(rank):
        engine, memory = open_engine(), Memory()
        exchange = codec.exchange(layout, memory)
        engine.sum_encoded(random_buffer(layout, rank, 0), exchange).wait()
        memory.forget_errors()
        buffer = torch.zeros(layout.length)
        engine.sum_encoded(buffer, exchange).wait()
        return buffer

    for buffer in run_threads(2, rank_function):
        assert not buffer.any()


@codecs
def test_in_parts(codec):
    """As an engine that divides the buffer among the ranks of a host does it."""
    layout = layout_of(SHAPES)

    def rank_function(rank):
        engine, memory = open_engine(), Memory()
        exchange = codec.exchange(layout, memory)
        sums = torch.zeros(layout.length, dtype=torch.float64)
        for step in range(30):
            buffer = random_buffer(layout, rank, step)
            start = 0
            for length, part in exchange.parts(3):
                engine.sum_encoded(buffer[start : start + length], part).wait()
                start += length
            assert start == layout.length
            sums += buffer
        return sums, errors_of(memory, layout)

    ranks = run_threads(2, rank_function)
    assert torch.equal(ranks[0][0], ranks[1][0])
    went_in = sum(random_buffer(layout, r, s).double() for r in range(2) for s in range(30))
    came_out = ranks[0][0] + ranks[0][1] + ranks[1][1]
    torch.testing.assert_close(came_out, went_in, rtol=1e-4, atol=1e-2)


@settings(max_examples=100, deadline=None)
@given(shapes=shapes_of_blocks(), count=st.integers(1, 6))
def test_a_layout_is_cut_into_all_of_its_blocks(shapes, count):
    layout = layout_of(shapes)
    parts = layout.cut(count)
    assert len(parts) == count
    assert sum(part.length for part in parts) == layout.length
    start, found = 0, []
    for part in parts:
        assert part.payload <= part.length
        found += [(block.name, block.offset + start, block.shape) for block in part.blocks]
        start += part.length
    assert found == [(block.name, block.offset, block.shape) for block in layout.blocks]


def test_a_layout_is_cut_evenly():
    layout = layout_of([(100,)] * 12, gap=0)
    assert [len(part.blocks) for part in layout.cut(4)] == [3, 3, 3, 3]
    assert [part.length for part in layout.cut(4)] == [300, 300, 300, 300 + TAIL]


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_across_hosts(hosts):
    """Exact within one host; between hosts as its codec does."""
    layout = layout_of([(64, 64)])
    codec = AcrossHosts(TopK(0.01))

    def rank_function(rank):
        exchange = codec.exchange(layout, Memory())
        assert exchange.across_hosts
        assert not any(part.across_hosts for _, part in exchange.parts(2))
        buffer = random_buffer(layout, rank, 0)
        open_engine(hosts).sum_encoded(buffer, exchange).wait()
        return buffer

    first, second = run_threads(2, rank_function)
    assert torch.equal(first, second)
    exact = random_buffer(layout, 0, 0) + random_buffer(layout, 1, 0)
    assert torch.equal(first, exact) == (hosts[0] == hosts[1])
    assert str(codec) == "across_hosts(topk(ratio=0.01))"


def test_a_cast_is_an_exchange_too():
    layout = Layout(layout_of([(40, 33), (5,)]).blocks, layout_of([(40, 33), (5,)]).length)

    def rank_function(rank):
        engine = open_engine()
        exchange = EncodedSum(BF16Compressor, layout)
        whole, parted = random_buffer(layout, rank, 0), random_buffer(layout, rank, 0)
        engine.sum_encoded(whole, exchange).wait()
        start = 0
        for length, part in exchange.parts(2):
            engine.sum_encoded(parted[start : start + length], part).wait()
            start += length
        return whole, parted

    for whole, parted in run_threads(2, rank_function):
        exact = random_buffer(layout, 0, 0) + random_buffer(layout, 1, 0)
        torch.testing.assert_close(whole, exact, rtol=0.03, atol=0.1)
        assert not torch.equal(whole, exact)
        assert torch.equal(whole, parted)
