"""Each codec against a plain account of what it does, and what it says of itself."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from exchange_ranks import errors_of, layout_of, random_buffer, run
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.codec import Layout
from farandole.precision import int8
from farandole.precision.int8 import BLOCK, RECORD, Int8
from farandole.precision.powersgd import PowerSGD, orthonormal
from farandole.precision.topk import TopK

SHAPES = [(40, 33), (5,), (64, 64)]
SIZE, STEPS = 3, 3


def blocks_of(layout: Layout, buffer):
    return {
        block.name: buffer[block.offset : block.offset + block.numel].clone()
        for block in layout.blocks
    }


def check(codec, reference, *, atol):
    """Results and errors of ``codec`` are those of ``reference``, a function that is given, step
    after step, what each rank wants to send of a block, and returns the sum and the new errors."""
    layout = layout_of(SHAPES)
    ranks = run(SIZE, codec, layout, STEPS)
    for block in layout.blocks:
        if not codec.encodes(block.shape):
            continue
        part = slice(block.offset, block.offset + block.numel)
        errors = [torch.zeros(block.shape) for _ in range(SIZE)]
        state = {}
        for step in range(STEPS):
            wanted = [
                error + random_buffer(layout, rank, step)[part].view(block.shape)
                for rank, error in enumerate(errors)
            ]
            expected, errors = reference(block, wanted, state)
            torch.testing.assert_close(
                ranks[0][0][step][part].view(block.shape), expected, rtol=1e-3, atol=atol
            )
        for (_, memory), error in zip(ranks, errors, strict=True):
            left = errors_of(memory, layout)[part].view(block.shape).float()
            torch.testing.assert_close(left, error, rtol=1e-3, atol=atol)


def quantized(values):
    """What 8 bits keep of each 256 numbers of a flat tensor."""
    result = []
    for start in range(0, len(values), BLOCK):
        piece = values[start : start + BLOCK]
        scale = max(abs(float(each)) for each in piece) / 127
        result += [round(float(each) / scale) * scale if scale else 0.0 for each in piece]
    return torch.tensor(result)


def test_int8_by_hand():
    layout = layout_of(SHAPES)
    rows = [-(-block.numel // BLOCK) for block in layout.blocks if len(block.shape) > 1]
    owners = [rank for rank, count in enumerate(int8.shares(sum(rows), SIZE)) for _ in range(count)]
    first_row = {"p0": 0, "p2": rows[0]}

    def reference(block, wanted, state):
        wanted = [each.reshape(-1) for each in wanted]
        sent = [quantized(each) for each in wanted]
        errors = [each - what for each, what in zip(wanted, sent, strict=True)]
        summed = sum(sent)
        result = quantized(summed)
        for place in range(block.numel):
            owner = owners[first_row[block.name] + place // BLOCK]
            errors[owner][place] += summed[place] - result[place]
        return result.view(block.shape), [each.view(block.shape) for each in errors]

    # A number half way between two steps may be rounded to either.
    check(Int8(), reference, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=3 * BLOCK))
def test_int8_is_off_by_half_a_step(values):
    rows = torch.zeros(math.ceil(len(values) / BLOCK) * BLOCK)
    rows[: len(values)] = torch.tensor(values)
    rows = rows.view(-1, BLOCK)
    records = int8.quantize(rows)
    assert records.shape == (len(rows), RECORD)
    back = int8.dequantize(records)
    step = rows.abs().amax(1, keepdim=True) / 127
    assert ((back - rows).abs() <= 0.5001 * step + 1e-44).all()
    assert torch.equal(
        int8.quantize(-rows)[:, 4:], (-records[:, 4:].view(torch.int8)).view(torch.uint8)
    )


def test_int8_of_nothing():
    assert int8.dequantize(int8.quantize(torch.empty(0, BLOCK))).shape == (0, BLOCK)


def test_powersgd_by_hand():
    rank = 2

    def reference(block, wanted, state):
        wanted = [each.double() for each in wanted]
        start = state.get("q")
        if start is None:
            start = ranks_start[block.name]
        basis = torch.linalg.qr(sum(each @ start.T for each in wanted)).Q
        weights = [basis.T @ each for each in wanted]
        state["q"] = sum(weights)
        errors = [
            (each - basis @ weight).float() for each, weight in zip(wanted, weights, strict=True)
        ]
        return (basis @ sum(weights)).float(), errors

    # Where it begins is anywhere; what it makes of that is what is checked.
    codec = PowerSGD(rank)
    exchange = codec.exchange(layout_of(SHAPES), run(1, codec, layout_of(SHAPES), 1)[0][1])
    ranks_start = {
        block.name: exchange._any_start(block).double() for block in layout_of(SHAPES).blocks
    }
    check(codec, reference, atol=1e-3)


def test_powersgd_is_exact_for_gradients_of_low_rank():
    """Also of less than its own, and of none."""
    layout = layout_of([(40, 30), (50, 20), (30, 40)])

    def make(layout, rank, step):
        random = torch.Generator().manual_seed(rank)
        buffer = torch.zeros(layout.length)
        for block, inner in zip(layout.blocks, (3, 1, 0), strict=True):
            left = torch.randn(block.shape[0], inner, generator=random)
            shared = torch.randn(inner, block.shape[1], generator=torch.Generator().manual_seed(9))
            part = buffer[block.offset : block.offset + block.numel]
            part.copy_((left @ shared).reshape(-1))
        return buffer

    results, _ = run(2, PowerSGD(3), layout, 3, make)[0]
    for step, result in enumerate(results):
        exact = make(layout, 0, step) + make(layout, 1, step)
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-4)


def test_powersgd_gets_better_from_step_to_step():
    """Where one step ends the next one begins: a constant gradient is met ever better."""
    layout = layout_of([(60, 50)])
    random = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(60, 50, generator=random))
    right, _ = torch.linalg.qr(torch.randn(50, 50, generator=random))
    gradient = left @ torch.diag(0.9 ** torch.arange(50.0)) @ right
    best = torch.linalg.svdvals(gradient)[4:].norm()
    exchange_errors = []
    memory = None

    def make(layout, rank, step):
        buffer = torch.zeros(layout.length)
        buffer[:3000] = gradient.reshape(-1)
        return buffer

    results, memory = run(1, PowerSGD(4), layout, 1, make)[0]
    assert memory.shared["p0"].shape == (4, 50)
    exchange_errors = [(results[0][:3000].view(60, 50) - gradient).norm()]
    starts = memory.shared
    for _ in range(10):
        basis = orthonormal([gradient @ starts["p0"].T])[0]
        exchange_errors.append((gradient - basis @ (basis.T @ gradient)).norm())
        starts = {"p0": basis.T @ gradient}
    assert exchange_errors[-1] < 1.05 * best < exchange_errors[0]


def test_topk_by_hand():
    def reference(block, wanted, state):
        count = math.ceil(0.05 * block.numel)
        result, errors = torch.zeros(block.numel), []
        for each in wanted:
            flat = each.reshape(-1).clone()
            order = sorted(range(block.numel), key=lambda place: -abs(float(flat[place])))
            for place in order[:count]:
                result[place] += flat[place]
                flat[place] = 0
            errors.append(flat.view(block.shape))
        return result.view(block.shape), errors

    check(TopK(0.05), reference, atol=1e-5)


def test_topk_of_everything_is_exact():
    layout = layout_of(SHAPES)
    results, memory = run(2, TopK(1.0), layout, 2)[0]
    exact = random_buffer(layout, 0, 1) + random_buffer(layout, 1, 1)
    torch.testing.assert_close(results[1], exact)
    assert not errors_of(memory, layout).any()


@pytest.mark.parametrize(
    ("codec", "encodes", "leaves"),
    [
        (Int8(), [(2, 2), (3, 1, 5), (40, 33)], [(), (1,), (10**6,), (10**6, 1), (1, 1, 7)]),
        (
            PowerSGD(4),
            [(32, 32), (16, 16), (10, 1000), (1, 64, 64)],
            [(100,), (15, 15), (10**6, 1)],
        ),
        (PowerSGD(1), [(4, 4)], [(3, 3)]),
        (TopK(0.1), [(32, 32), (2, 512)], [(4096,), (31, 33), (4096, 1)]),
    ],
)
def test_what_is_worth_it(codec, encodes, leaves):
    assert [shape for shape in encodes if not codec.encodes(shape)] == []
    assert [shape for shape in leaves if codec.encodes(shape)] == []


@pytest.mark.parametrize("codec", [Int8(), PowerSGD(3), TopK(0.5)], ids=str)
def test_codecs_are_values(codec):
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert str(pickle.loads(pickle.dumps(codec))) == str(codec)


def test_bases_of_anything():
    broken = torch.full((6, 2), math.nan)
    zeros, twice = torch.zeros(8, 2), torch.ones(8, 2)
    bases = orthonormal([zeros, broken, twice])
    assert not bases[1].isfinite().any()
    for basis in (bases[0], bases[2]):
        torch.testing.assert_close(basis.T @ basis, torch.eye(2))
    torch.testing.assert_close(bases[2] @ (bases[2].T @ twice), twice)
