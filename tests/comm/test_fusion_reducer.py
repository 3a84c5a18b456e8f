"""The reducer on the ``threads`` engine: what comes out, and in which order things leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farandole.comm.engines import registry
from farandole.comm.fusion import plan as plans
from farandole.comm.fusion.reducer import Reducer
from farandole.testing.ranks import run_threads, take_seat

SHAPES = [(3, 2), (5,), (), (2, 3, 2, 2), (0,), (7,)]


def spec(name: str, tensor: Tensor) -> plans.ParameterSpec:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    stride = plans.dense_stride(shape, tensor.stride())
    return plans.ParameterSpec(name, shape, stride, dtype, tensor.element_size(), "cpu#0")


def make_reducer(tensors: list[Tensor], *, size: int, op: str = "average", limit: int = 64):
    specs = [spec(f"p{i}", each) for i, each in enumerate(tensors)]
    plan = plans.make_plan(specs, range(len(specs)), bucket_bytes=limit, first_bucket_bytes=limit)
    engine = registry.opener("threads")(take_seat())
    return Reducer(
        plan,
        {"cpu#0": (torch.device("cpu"), engine)},
        {str(each.dtype).removeprefix("torch."): each.dtype for each in tensors},
        scale=1 / size if op == "average" else 1.0,
        reduced_scale=1 / size,
    )


def wait(work, bucket):
    work.wait()


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)  # threads share the default one
    made = [torch.randn(shape, dtype=dtype, generator=random) for shape in SHAPES]
    made[3] = made[3].to(memory_format=torch.channels_last)
    return made


def mean(size: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [
        torch.stack(each).mean(0)
        for each in zip(*(gradients(rank, step, dtype) for rank in range(size)), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64])
@pytest.mark.parametrize("limit", [0, 64, 10**6])
def test_averages(limit, dtype):
    def rank_function(rank):
        reducer = make_reducer(gradients(0, dtype=dtype), size=3, limit=limit)
        results = []
        for step in range(3):
            reducer.begin(step)
            mine = gradients(rank, step, dtype)
            # Each rank's gradients come in another order.
            for index in [*range(rank, len(mine)), *range(rank)]:
                reducer.put(index, mine[index])
            reducer.flush(lambda index: None)
            reducer.finish(wait)
            assert not reducer.steps_differ
            results.append([entry.view.clone() for entry in reducer.entries])
        assert reducer.entries[3].view.is_contiguous(memory_format=torch.channels_last)
        return results

    first, *others = run_threads(3, rank_function)
    for step, results in enumerate(first):
        torch.testing.assert_close(results, mean(3, step, dtype))
    for other in others:
        for ours, theirs in zip(itertools.chain(*first), itertools.chain(*other), strict=True):
            assert torch.equal(ours, theirs)


def test_a_gradient_that_some_ranks_lack_counts_as_zeros():
    def rank_function(rank):
        reducer = make_reducer(gradients(0), size=2)
        reducer.begin(0)
        mine = gradients(rank)
        for index in range(len(mine)):
            if (index, rank) not in [(1, 0), (3, 1), (5, 0), (5, 1)]:
                reducer.put(index, mine[index])
        reducer.flush(lambda index: None)
        reducer.finish(wait)
        return [entry.result() for entry in reducer.entries]

    for results in run_threads(2, rank_function):
        torch.testing.assert_close(results[0], mean(2)[0])
        torch.testing.assert_close(results[1], gradients(1)[1] / 2)
        torch.testing.assert_close(results[3], gradients(0)[3] / 2)
        assert results[5] is None


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_gradient_in_a_pass_is_added(op, when):
    """Whether its bucket has left on all ranks, on one, or on none."""

    def rank_function(rank):
        tensors = [torch.empty(8, dtype=torch.float64) for _ in range(3)]
        reducer = make_reducer(tensors, size=2, op=op, limit=128)
        reducer.begin(0)
        reducer.put(0, torch.full((8,), 1.0 + rank, dtype=torch.float64))
        if when == "before" and rank == 0:
            reducer.put(0, torch.full((8,), 10.0, dtype=torch.float64))
        reducer.put(1, torch.full((8,), 3.0, dtype=torch.float64))
        left = reducer.entries[0].bucket.work is not None
        if when == "after" or rank == 1:
            reducer.put(0, torch.full((8,), 10.0, dtype=torch.float64))
            reducer.put(0, torch.full((8,), 100.0, dtype=torch.float64))
        reducer.put(2, torch.full((8,), 4.0 * rank, dtype=torch.float64))
        reducer.flush(lambda index: None)
        reducer.finish(wait)
        return left, [entry.view[0].item() for entry in reducer.entries]

    total = [23 + 200, 6.0, 4.0] if when == "after" else [23 + 100, 6.0, 4.0]
    expected = total if op == "sum" else [each / 2 for each in total]
    for left, results in run_threads(2, rank_function):
        assert left
        assert results == pytest.approx(expected)


@pytest.mark.parametrize("op", ["average", "sum"])
def test_reducing_again_adds_what_came_since(op):
    def rank_function(rank):
        reducer = make_reducer([torch.empty(2), torch.empty(2), torch.empty(2)], size=2, op=op)
        factor = 1 if op == "sum" else 0.5
        for again in (False, True):
            reducer.begin(0)
            for index in range(3):
                entry = reducer.entries[index]
                if index == 2 and again:
                    continue  # this one gets nothing in the second pass
                gradient = torch.full((2,), float(1 + rank + index))
                if again:
                    reducer.divide(entry)
                    gradient = entry.view.add_(gradient)
                reducer.put(index, gradient)
            reducer.flush(lambda index: reducer.entries[index].view)
            reducer.finish(wait)
        return [entry.view[0].item() / factor for entry in reducer.entries]

    assert run_threads(2, rank_function) == [[6.0, 10.0, 7.0]] * 2


def test_steps_that_differ_are_seen_by_all():
    def rank_function(rank):
        reducer = make_reducer([torch.empty(2)], size=3)
        seen = []
        for step in range(6):
            reducer.begin(step + (1 if rank == 2 and step > 3 else 0))
            reducer.put(0, torch.ones(2))
            reducer.flush(lambda index: None)
            reducer.finish(wait)
            seen.append(reducer.steps_differ)
        return seen

    assert run_threads(3, rank_function) == [[False] * 4 + [True] * 2] * 3


def test_buckets_leave_in_order_and_the_last_one_with_the_flush():
    left: list[int] = []

    def rank_function(rank):
        reducer = make_reducer([torch.empty(16) for _ in range(4)], size=1)
        watch(reducer, left.append)
        reducer.begin(0)
        seen = []
        for index in (1, 0, 3, 2):
            reducer.put(index, torch.ones(16))
            seen.append(list(left))
        reducer.flush(lambda index: None)
        reducer.finish(wait)
        return seen, list(left)

    ((seen, finally_left),) = run_threads(1, rank_function)
    assert seen == [[], [0, 1], [0, 1], [0, 1, 2]]
    assert finally_left == [0, 1, 2, 3]


def watch(reducer: Reducer, note: Callable[[int], None]) -> None:
    """Note the number of each bucket that leaves."""
    engine = reducer.entries[0].bucket.lane.engine
    allreduce = engine.allreduce
    numbers = {
        entry.bucket.buffer.data_ptr(): entry.bucket.plan.number for entry in reducer.entries
    }

    def noting(buffer, reduction):
        note(numbers[buffer.data_ptr()])
        return allreduce(buffer, reduction)

    engine.allreduce = noting
