"""Adasum against its definition, computed plainly in float64."""

from __future__ import annotations

import pytest
import torch
from group_ranks import in_group
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.ops import Op
from farandole.core.errors import MismatchError, UnsupportedError, UsageError
from farandole.testing.ranks import run_processes, run_threads


def pair(a, b):
    dot, aa, bb = a @ b, a @ a, b @ b
    left = 1 - dot / (2 * aa) if aa else 1.0
    right = 1 - dot / (2 * bb) if bb else 1.0
    return left * a + right * b


def reference(tensors):
    """The binary tree of the definition."""
    level = [tensor.double().flatten() for tensor in tensors]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0].view(tensors[0].shape)


def of_rank(rank, shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equals_the_reference(size, dtype):
    def on_rank(group):
        mine = of_rank(group.rank, (5, 7), dtype=dtype)
        result = group.allreduce(mine, op=Op.ADASUM)
        assert result.dtype == dtype
        assert torch.equal(mine, of_rank(group.rank, (5, 7), dtype=dtype))
        return result

    results = run_threads(size, in_group(on_rank))
    expected = reference([of_rank(rank, (5, 7), dtype=dtype) for rank in range(size)])
    for result in results:
        assert torch.equal(result, results[0])
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@given(
    size=st.sampled_from([2, 4, 8]),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_each_tensor_of_a_list_by_itself(size, shapes, seed):
    def on_rank(group):
        mine = [of_rank(group.rank, shape, seed + i) for i, shape in enumerate(shapes)]
        return group.grouped_allreduce(mine, op=Op.ADASUM, name="list")

    for results in run_threads(size, in_group(on_rank)):
        for i, (shape, result) in enumerate(zip(shapes, results, strict=True)):
            expected = reference([of_rank(rank, shape, seed + i) for rank in range(size)])
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_dtypes_together_scales_and_place():
    def on_rank(group):
        mine = [of_rank(group.rank, 6), of_rank(group.rank, (2, 3), 1).float().t()]
        given = [each.clone() for each in mine]
        result = group.grouped_allreduce(
            mine, op=Op.ADASUM, prescale=3.0, postscale=0.5, inplace=True
        )
        assert result[0] is mine[0]
        expected = reference([3.0 * of_rank(rank, 6) for rank in range(2)]) / 2
        torch.testing.assert_close(mine[0], expected)
        assert mine[1].stride() == given[1].stride()
        return mine[1]

    first, second = run_threads(2, in_group(on_rank))
    expected = reference([3.0 * of_rank(r, (2, 3), 1).float().t() for r in range(2)]) / 2
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)


def test_orthogonal_tensors_add_and_parallel_ones_average():
    def on_rank(group):
        orthogonal = torch.zeros(8, dtype=torch.float64)
        orthogonal[2 * group.rank] = 1.0 + group.rank
        added = group.allreduce(orthogonal, op=Op.ADASUM)
        parallel = torch.arange(5.0) * (group.rank + 1)
        return added.tolist(), group.allreduce(parallel, op=Op.ADASUM)

    for added, averaged in run_threads(4, in_group(on_rank)):
        assert added == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0]
        torch.testing.assert_close(averaged, torch.arange(5.0) * 2.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_smallest_and_the_largest_values(dtype):
    limits = torch.finfo(dtype)

    def on_rank(group):
        tiny = torch.full((9,), limits.tiny, dtype=dtype) * (group.rank + 1)
        huge = torch.full((9,), limits.max / 4, dtype=dtype) * (group.rank + 1)
        mixed = torch.full((9,), [limits.tiny, limits.max / 2][group.rank], dtype=dtype)
        zero = torch.zeros(9, dtype=dtype) if group.rank else torch.ones(9, dtype=dtype)
        return [group.allreduce(each, op=Op.ADASUM) for each in (tiny, huge, mixed, zero)]

    for tiny, huge, mixed, zero in run_threads(2, in_group(on_rank)):
        torch.testing.assert_close(tiny.double(), torch.full((9,), 1.5 * limits.tiny).double())
        expected = torch.full((9,), limits.max * 0.375, dtype=torch.float64)
        torch.testing.assert_close(huge.double(), expected, rtol=1e-3, atol=0)
        assert mixed.isfinite().all()
        assert zero.tolist() == [1.0] * 9


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_between_processes(size):
    shapes = [(1000, 33), (7,), (), (2**12 + 1,)]

    def on_rank(group):
        mine = [of_rank(group.rank, shape, i, torch.float32) for i, shape in enumerate(shapes)]
        handle = group.grouped_allreduce_async(mine, op=Op.ADASUM, name="gradients")
        other = group.allreduce(torch.ones(3), op=Op.SUM, name="other")
        return handle.wait(), other.tolist()

    results = run_processes(size, in_group(on_rank))
    for tensors, other in results:
        assert other == [float(size)] * 3
        for i, (shape, result) in enumerate(zip(shapes, tensors, strict=True)):
            expected = reference([of_rank(r, shape, i, torch.float32) for r in range(size)])
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(result, results[0][0][i])


def test_what_it_cannot_do():
    def on_rank(group):
        with pytest.raises(UnsupportedError, match=r"power of two, and is 3"):
            group.allreduce(torch.ones(2), op=Op.ADASUM)
        with pytest.raises(UnsupportedError, match="only supports AVERAGE and SUM"):
            group.reducescatter(torch.ones(3), op=Op.ADASUM)
        half = group.split([0, 1])
        if half is not None:
            with pytest.raises(UsageError, match=r"torch\.int64"):
                half.allreduce(torch.ones(2, dtype=torch.int64), op=Op.ADASUM)
            with pytest.raises(MismatchError, match="Mismatched reduction operation"):
                half.allreduce(torch.ones(2), op=[Op.ADASUM, Op.SUM][half.rank], name="x")
            half.close()

    run_threads(3, in_group(on_rank))
    for kind in (ValueError, NotImplementedError, RuntimeError):
        assert issubclass(UnsupportedError, kind)
