"""The collectives against plain torch, over dtypes, shapes and layouts, on ranks that are threads.

Every rank can compute every rank's input, so it checks its own result.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from group_ranks import in_group, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.collectives.reducescatter import share_rows
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.core.errors import UsageError, UsageTypeError
from farandole.testing.ranks import run_processes, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

few = settings(max_examples=25, deadline=None)

ELEMENTWISE = [op for op in Op if op != Op.ADASUM]  # test_adasum.py has the one that is not


ARITHMETIC = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
ANY = [*ARITHMETIC, torch.bool, torch.float8_e8m0fnu]


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory: ``order`` of its dimensions, and a stride between elements."""

    order: tuple[int, ...]
    step: int

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor equal to ``tensor``, laid out so, within a larger memory."""
        wide = [size * self.step + 1 for size in (tensor.shape[d] for d in self.order)]
        memory = torch.zeros(wide, dtype=tensor.dtype)
        inverse = [self.order.index(d) for d in range(len(self.order))]
        room = memory.permute(inverse)
        for dim, size in enumerate(tensor.shape):
            room = room.narrow(dim, 1, size * self.step)
        held = room[tuple(slice(None, None, self.step) for _ in tensor.shape)]
        held.copy_(tensor)
        return held


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def laid_out(draw, shape_strategy=shapes):
    shape = draw(shape_strategy)
    order = tuple(draw(st.permutations(range(len(shape)))))
    return shape, Layout(order, draw(st.integers(1, 2)))


def legal(dtype: torch.dtype, op: Op) -> bool:
    if dtype == torch.bool:
        return op not in (Op.SUM, Op.AVERAGE)
    return not (dtype.is_complex and op in (Op.MIN, Op.MAX)) and dtype in (*ARITHMETIC, torch.bool)


def reference(parts: list[torch.Tensor], op: Op) -> torch.Tensor:
    """What a reduction should give, computed in a dtype with room."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        wide = torch.stack([part.to(torch.complex128) for part in parts])
    elif dtype.is_floating_point:
        wide = torch.stack([part.to(torch.float64) for part in parts])
    else:
        wide = torch.stack([part.to(torch.int64) for part in parts])
    if op == Op.AVERAGE:
        total = wide.sum(0)
        if wide.dtype == torch.int64:
            return torch.div(total, len(parts), rounding_mode="trunc").to(dtype)
        return (total / len(parts)).to(dtype)
    reduced = {
        Op.SUM: lambda: wide.sum(0),
        Op.PRODUCT: lambda: wide.prod(0),
        Op.MIN: lambda: wide.amin(0),
        Op.MAX: lambda: wide.amax(0),
    }[op]()
    return reduced.to(dtype)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert not got.requires_grad
    if expected.dtype.itemsize == 1 and expected.dtype.is_floating_point:
        got, expected = got.float(), expected.float()
    if expected.dtype == torch.complex32:
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    elif expected.dtype.is_floating_point or expected.dtype.is_complex:
        torch.testing.assert_close(got, expected)
    else:
        assert torch.equal(got, expected)


@few
@given(
    ranks=st.integers(1, 4),
    dtype=st.sampled_from([*ARITHMETIC, torch.bool]),
    op=st.sampled_from(ELEMENTWISE),
    held=laid_out(),
    inplace=st.booleans(),
    layouts_differ=st.booleans(),
)
def test_allreduce(ranks, dtype, op, held, inplace, layouts_differ):
    if not legal(dtype, op):
        return
    shape, layout = held

    def check(group: Group) -> None:
        parts = [sample(dtype, shape, seed=rank) for rank in range(ranks)]
        here = Layout(tuple(range(len(shape))), 1) if layouts_differ and group.rank else layout
        given = here.hold(parts[group.rank])
        got = group.allreduce(given, op=op, inplace=inplace)
        assert_same(got, reference(parts, op))
        if inplace:
            assert got is given
        else:
            assert_same(given, parts[group.rank])
            if given.is_contiguous():
                assert got.is_contiguous()
            else:
                assert got.stride() == torch.empty_like(given).stride()

    run_threads(ranks, in_group(check))


@few
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int32, torch.int16]),
    op=st.sampled_from(ELEMENTWISE),
    prescale=st.sampled_from([1.0, 0.5, 3.0]),
    postscale=st.sampled_from([1.0, 0.25, -2.0]),
    inplace=st.booleans(),
)
def test_scaling(dtype, op, prescale, postscale, inplace):
    def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return tensor * factor
        return (tensor.double() * factor).trunc().to(tensor.dtype)

    def check(group: Group) -> None:
        parts = [sample(dtype, (5,), seed=rank) for rank in range(2)]
        inputs = [scaled(part, prescale) for part in parts]
        summed = Op.SUM if op == Op.AVERAGE else op
        divisor = 2 if op == Op.AVERAGE else 1
        expected = scaled(reference(inputs, summed), postscale / divisor)
        got = group.allreduce(
            parts[group.rank], op=op, prescale=prescale, postscale=postscale, inplace=inplace
        )
        assert_same(got, expected)
        rows = group.reducescatter(
            sample(dtype, (5,), seed=group.rank), op=op, prescale=prescale, postscale=postscale
        )
        assert_same(rows, expected.split(share_rows(5, 2))[group.rank])

    run_threads(2, in_group(check))


@few
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    dtypes=st.lists(st.sampled_from(ARITHMETIC), min_size=1, max_size=5),
    op=st.sampled_from([Op.SUM, Op.AVERAGE, Op.PRODUCT]),
    inplace=st.booleans(),
)
def test_grouped_allreduce_fuses_and_keeps_the_order(data, ranks, dtypes, op, inplace):
    holds = [data.draw(laid_out()) for _ in dtypes]

    def check(group: Group) -> None:
        parts = [
            [sample(dtype, shape, seed=10 * rank + i) for rank in range(ranks)]
            for i, (dtype, (shape, _)) in enumerate(zip(dtypes, holds, strict=True))
        ]
        given = [
            layout.hold(part[group.rank]) for part, (_, layout) in zip(parts, holds, strict=True)
        ]
        got = group.grouped_allreduce(given, op=op, inplace=inplace)
        for result, tensor, part in zip(got, given, parts, strict=True):
            assert_same(result, reference(part, op))
            assert (result is tensor) == inplace

    run_threads(ranks, in_group(check))


@few
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    dtypes=st.lists(st.sampled_from(ANY), min_size=1, max_size=3),
    grouped=st.booleans(),
)
def test_allgather_with_any_number_of_rows(data, ranks, dtypes, grouped):
    rests = [data.draw(st.lists(st.integers(0, 3), max_size=2).map(tuple)) for _ in dtypes]
    rows = [data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)) for _ in dtypes]
    step = data.draw(st.integers(1, 2))

    def check(group: Group) -> None:
        parts = [
            [sample(dtype, (count, *rest), seed=i + rank) for rank, count in enumerate(counts)]
            for i, (dtype, rest, counts) in enumerate(zip(dtypes, rests, rows, strict=True))
        ]
        given = [
            Layout(tuple(reversed(range(part[0].dim()))), step).hold(part[group.rank])
            for part in parts
        ]
        if grouped:
            results = group.grouped_allgather(given)
        else:
            results = [group.allgather(tensor) for tensor in given]
        for result, part in zip(results, parts, strict=True):
            assert_same(result, torch.cat(part))

    run_threads(ranks, in_group(check))


@few
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    dtypes=st.lists(st.sampled_from(ANY), min_size=1, max_size=3),
    grouped=st.booleans(),
    inplace=st.booleans(),
)
def test_broadcast(data, ranks, dtypes, grouped, inplace):
    holds = [data.draw(laid_out()) for _ in dtypes]
    root = data.draw(st.integers(0, ranks - 1))

    def check(group: Group) -> None:
        given = [
            layout.hold(sample(dtype, shape, seed=group.rank))
            for dtype, (shape, layout) in zip(dtypes, holds, strict=True)
        ]
        if grouped:
            results = group.grouped_broadcast(given, root=root, inplace=inplace)
        else:
            results = [group.broadcast(tensor, root=root, inplace=inplace) for tensor in given]
        for tensor, result, dtype, (shape, _) in zip(given, results, dtypes, holds, strict=True):
            assert_same(result, sample(dtype, shape, seed=root))
            assert (result is tensor) == inplace
            if not inplace:
                assert_same(tensor, sample(dtype, shape, seed=group.rank))

    run_threads(ranks, in_group(check))


@few
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    dtype=st.sampled_from(ANY),
    rest=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    spare=st.integers(0, 2),
)
def test_alltoall_with_splits(data, ranks, dtype, rest, spare):
    row = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    splits = data.draw(st.lists(row, min_size=ranks, max_size=ranks))

    def check(group: Group) -> None:
        me = group.rank
        inputs = [
            sample(dtype, (sum(splits[rank]) + spare, *rest), seed=rank) for rank in range(ranks)
        ]
        received, counts = group.alltoall(inputs[me], splits[me])
        expected = [inputs[rank].split([*splits[rank], spare])[me] for rank in range(ranks)]
        assert_same(received, torch.cat(expected))
        assert counts.tolist() == [splits[rank][me] for rank in range(ranks)]
        assert counts.dtype == torch.int32

    run_threads(ranks, in_group(check))


@few
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    dtypes=st.lists(
        st.sampled_from([d for d in ARITHMETIC if not d.is_complex]), min_size=1, max_size=3
    ),
    op=st.sampled_from(ELEMENTWISE),
)
def test_reducescatter(data, ranks, dtypes, op):
    holds = [
        data.draw(laid_out(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)))
        for _ in dtypes
    ]

    def check(group: Group) -> None:
        parts = [
            [sample(dtype, shape, seed=rank + i) for rank in range(ranks)]
            for i, (dtype, (shape, _)) in enumerate(zip(dtypes, holds, strict=True))
        ]
        given = [
            layout.hold(part[group.rank]) for part, (_, layout) in zip(parts, holds, strict=True)
        ]
        alone = [group.reducescatter(tensor, op=op) for tensor in given]
        together = group.grouped_reducescatter(given, op=op)
        for results in (alone, together):
            for result, part in zip(results, parts, strict=True):
                shares = share_rows(part[0].shape[0], ranks)
                assert_same(result, reference(part, op).split(shares)[group.rank])

    run_threads(ranks, in_group(check))


@given(rows=st.integers(0, 1000), size=st.integers(1, 64))
def test_rows_are_dealt_evenly_the_remainder_to_the_lowest(rows, size):
    shares = share_rows(rows, size)
    assert sum(shares) == rows
    assert shares == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= 1


def test_special_memory_is_understood():
    def check(group: Group) -> None:
        base = torch.arange(12.0).reshape(3, 4) * (1 + 2j)
        assert torch.equal(group.allreduce(base.conj(), op=Op.SUM), 2 * base.conj())
        assert torch.equal(group.allgather(base.conj().imag), torch.cat([-base.imag] * 2))
        into = base.clone()
        group.allreduce(into.conj(), op=Op.SUM, inplace=True)
        assert torch.equal(into, 2 * base)
        image = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
        image = image.to(memory_format=torch.channels_last)
        mean = group.allreduce(image)
        assert mean.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(mean, image)
        row = torch.ones(1, 3).expand(4, 3)
        assert torch.equal(group.allreduce(row, op=Op.SUM), torch.full((4, 3), 2.0))
        with pytest.raises(UsageError, match="expanded"):
            group.allreduce(row, inplace=True)

    run_threads(2, in_group(check))


def test_tensors_that_require_grad_are_taken_as_their_values():
    def check(group: Group) -> None:
        weight = torch.nn.Parameter(torch.full((3,), float(group.rank)))
        assert group.allreduce(weight).tolist() == [0.5] * 3
        group.broadcast(weight, root=1, inplace=True)
        assert weight.tolist() == [1.0] * 3
        assert weight.requires_grad
        result = group.allgather(weight)
        result += weight.repeat(2)  # an ordinary tensor: autograd may write into it
        result.sum().backward()
        assert weight.grad is not None
        with torch.inference_mode():
            assert group.allreduce(torch.ones(2), op=Op.SUM).tolist() == [2.0, 2.0]

    run_threads(2, in_group(check))


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_begun_in_inference_mode_and_waited_for_outside(run):
    def check(group: Group) -> None:
        begun = []
        with torch.inference_mode(group.rank == 0):  # each rank as it likes
            mine = torch.arange(4.0)
            begun.append(group.allreduce_async(mine, op=Op.SUM))
            begun.append(group.allreduce_async(torch.ones(2), inplace=True))
            begun.append(group.allgather_async(mine))
            begun.append(group.broadcast_async(mine, root=0))
            begun.append(group.reducescatter_async(mine, op=Op.SUM))
        total, one, gathered, same, rows = [handle.wait() for handle in begun]
        alltoall, _ = group.alltoall_async(mine).wait()
        assert total.tolist() == [0, 2, 4, 6]
        assert one.tolist() == [1, 1]
        assert gathered.tolist() == [0, 1, 2, 3] * 2
        assert same.tolist() == [0, 1, 2, 3]
        assert rows.tolist() == [[0, 2], [4, 6]][group.rank]
        assert alltoall.tolist() == [[0, 1], [2, 3]][group.rank] * 2

    run(2, in_group(check))


def test_wrong_arguments_are_refused_on_the_spot_and_the_group_goes_on():
    def check(group: Group) -> None:
        ones = torch.ones(4)
        refused = [
            lambda: group.allreduce([1.0]),
            lambda: group.grouped_allreduce([]),
            lambda: group.allreduce(torch.ones(2, dtype=torch.bool), op=Op.SUM),
            lambda: group.allreduce(torch.ones(2, dtype=torch.bool), op=Op.MAX, prescale=2.0),
            lambda: group.allreduce(ones.to_sparse()),
            lambda: group.allreduce(torch.ones(2, device="meta")),
            lambda: group.allgather(torch.tensor(1.0)),
            lambda: group.reducescatter(torch.tensor(1.0)),
            lambda: group.alltoall(torch.tensor(1.0)),
            lambda: group.alltoall(torch.ones(3)),
            lambda: group.alltoall(ones, [1]),
            lambda: group.alltoall(ones, [3, 2]),
            lambda: group.alltoall(ones, [-1, 2]),
            lambda: group.alltoall(ones, torch.tensor([0.5, 0.5])),
            lambda: group.broadcast(ones, root=2),
            lambda: group.broadcast(ones, root=-1),
        ]
        for call in refused:
            with pytest.raises(UsageError):
                call()
        with pytest.raises(UsageTypeError):
            group.broadcast(3)  # type: ignore[arg-type]
        assert group.allreduce(ones, op=Op.SUM).tolist() == [2.0] * 4

    run_threads(2, in_group(check))


def test_special_floats_come_through():
    def check(group: Group) -> None:
        mine = torch.tensor([math.inf, math.nan, -0.0]) if group.rank else torch.zeros(3)
        total = group.allreduce(mine, op=Op.SUM)
        assert total[0] == math.inf
        assert math.isnan(total[1])
        assert group.broadcast(mine, root=1)[0] == math.inf

    run_threads(2, in_group(check))


def test_every_dtype_and_operation_over_gloo():
    shape, layout = (5, 3), Layout((1, 0), 1)

    def check(group: Group) -> None:
        warnings.filterwarnings("ignore", message="ComplexHalf")
        for dtype in ANY:
            parts = [sample(dtype, shape, seed=rank) for rank in range(3)]
            mine = layout.hold(parts[group.rank])
            for op in ELEMENTWISE:
                if legal(dtype, op):
                    assert_same(group.allreduce(mine, op=op), reference(parts, op))
                    if not (dtype.is_complex and op == Op.PRODUCT):
                        rows = reference(parts, op).split([2, 2, 1])[group.rank]
                        assert_same(group.reducescatter(mine, op=op), rows)
            assert_same(group.allgather(mine), torch.cat(parts))
            assert_same(group.broadcast(mine, root=2), parts[2])
            sent = [part.split([1, 2, 0, 2])[group.rank] for part in parts]
            assert_same(group.alltoall(mine, [1, 2, 0])[0], torch.cat(sent))
        nothing = torch.ones(0, 3)
        assert group.allreduce(nothing).shape == (0, 3)
        assert group.allgather(torch.ones(group.rank, 0)).shape == (3, 0)
        assert group.broadcast(nothing, root=1).shape == (0, 3)
        assert group.alltoall(nothing)[0].shape == (0, 3)
        assert group.reducescatter(nothing).shape == (0, 3)

    run_processes(3, in_group(check))
