"""torch.distributed's operations on the backend ``farandole``: as on Gloo, where Gloo has them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import backend_ranks
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that every order of summing gives the same bits."""
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randint(1, 4, (length,), generator=random).to(dtype)


def all_values(size: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    return [values(rank, length, dtype) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_give_what_gloo_gives(tmp_path: Path, size: int) -> None:
    def compare(rank: int) -> int:
        gloo = dist.new_group(backend="gloo")
        compared = 0
        for dtype, op in itertools.product(FLOATS + INTEGERS, ARITHMETIC):
            for length in (1, 1000):
                ours, theirs = values(rank, length, dtype), values(rank, length, dtype)
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                assert torch.equal(ours, theirs), (dtype, op, length)
                ours, theirs = values(rank, length, dtype), values(rank, length, dtype)
                dist.reduce(ours, 1, op)
                dist.reduce(theirs, 1, op, group=gloo)
                assert rank != 1 or torch.equal(ours, theirs), (dtype, op, length)
                assert rank == 1 or torch.equal(ours, values(rank, length, dtype))
                compared += 1
        return compared

    assert backend_ranks.run(tmp_path, size, compare) == [64] * size


def test_what_gloo_does_not_reduce(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for dtype in INTEGERS:
            for op, pair in zip(
                BITWISE, (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor), strict=True
            ):
                tensor = values(rank, 9, dtype)
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor, pair(*all_values(2, 9, dtype))), (dtype, op)
                part = torch.empty(3, dtype=dtype)
                dist.reduce_scatter_tensor(part, values(rank, 6, dtype), op)
                expected = pair(*all_values(2, 6, dtype)).chunk(2)[rank]
                assert torch.equal(part, expected), (dtype, op)
        for dtype in (torch.int16, torch.bool, torch.float8_e5m2):
            tensor = values(rank, 9, dtype)
            dist.all_reduce(tensor, ReduceOp.MAX)
            top = torch.stack([each.float() for each in all_values(2, 9, dtype)]).amax(0)
            assert torch.equal(tensor.float(), top), dtype
        average = values(rank, 9, torch.float32)
        dist.all_reduce(average, ReduceOp.AVG)
        assert torch.equal(average, torch.stack(all_values(2, 9, torch.float32)).mean(0))
        product = torch.full((4,), complex(1, rank + 1))
        dist.distributed_c10d._get_default_group().allreduce(
            [product], _options(ReduceOp.PRODUCT)
        ).wait()
        assert product.tolist() == [complex(1, 1) * complex(1, 2)] * 4

    backend_ranks.run(tmp_path, 2, check)


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def test_a_factor_before_the_sum(tmp_path: Path) -> None:
    factor = dist._make_nccl_premul_sum(0.5)
    if not hasattr(factor, "factor"):
        pytest.skip("this torch does not show the factor")

    def check(rank: int) -> list[float]:
        tensor = torch.tensor([2.0, 4.0]) * (rank + 1)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        return tensor.tolist()

    assert backend_ranks.run(tmp_path, 2, check) == [[3.0, 6.0]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_data_arrives_where_it_should(tmp_path: Path, size: int) -> None:
    def check(rank: int) -> None:
        every = all_values(size, 6, torch.int64)
        mine = every[rank]

        tensor = mine.clone()
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, every[1])

        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        assert all(map(torch.equal, gathered, every))

        joined = torch.empty(size * 6, dtype=mine.dtype)
        dist.all_gather_into_tensor(joined, mine)
        assert torch.equal(joined, torch.cat(every))

        targets = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
        dist.gather(mine, targets, 1)
        assert targets is None or all(map(torch.equal, targets, every))

        part = torch.empty(6, dtype=mine.dtype)
        dist.scatter(part, every if rank == 1 else None, 1)
        assert torch.equal(part, mine)

        received = [torch.empty(rank + 1, dtype=mine.dtype) for _ in range(size)]
        dist.all_to_all(received, [mine[: other + 1] for other in range(size)])
        assert all(
            torch.equal(each, other[: rank + 1])
            for each, other in zip(received, every, strict=True)
        )

        rows = torch.full((size, 2), float(rank))
        exchanged = torch.empty(size, 2)
        dist.all_to_all_single(exchanged, rows)
        assert exchanged[:, 0].tolist() == list(map(float, range(size)))

        counts = list(range(size))  # rank r gets r rows of everybody
        uneven = torch.empty(size * rank, 2)
        source = torch.full((sum(counts), 2), float(rank))
        dist.all_to_all_single(uneven, source, [rank] * size, counts)
        assert uneven[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank)]

        scattered = torch.empty(3)
        dist.reduce_scatter(scattered, [torch.full((3,), float(r + rank)) for r in range(size)])
        assert scattered.tolist() == [float(sum(rank + r for r in range(size)))] * 3

        piece = torch.empty(3)
        dist.reduce_scatter_tensor(piece, torch.arange(3.0 * size), ReduceOp.AVG)
        assert piece.tolist() == torch.arange(3.0 * size).chunk(size)[rank].tolist()

        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(size)]
        dist.barrier()

    backend_ranks.run(tmp_path, size, check)


def test_coalesced_operations(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        tensors = [torch.full((length,), rank + 1.0) for length in (1, 5, 3)]
        tensors.append(torch.tensor([rank], dtype=torch.int32))
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert [tensor.tolist() for tensor in tensors] == [[3.0], [3.0] * 5, [3.0] * 3, [1]]

        outputs = [torch.empty(2), torch.empty(4)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output in outputs:
                dist.all_gather_into_tensor(output, torch.full((output.numel() // 2,), float(rank)))
        manager.wait()
        assert [output.tolist() for output in outputs] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]

        parts = [torch.empty(1), torch.empty(2)]
        with dist._coalescing_manager():
            for part in parts:
                dist.reduce_scatter_tensor(part, torch.arange(2.0 * part.numel()))
        assert parts[0].tolist() == [2.0 * rank]
        assert parts[1].tolist() == [4.0 * rank, 4.0 * rank + 2]

    backend_ranks.run(tmp_path, 2, check)


def test_any_layout_and_inference_tensors(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        image = torch.arange(48.0).view(1, 3, 4, 4) * (rank + 1)
        shaped = image.to(memory_format=torch.channels_last) if rank else image.clone()
        dist.all_reduce(shaped)
        assert torch.equal(shaped, torch.arange(48.0).view(1, 3, 4, 4) * 3)
        column = torch.full((4, 2), float(rank))
        dist.broadcast(column[:, 1], 1)
        assert column.tolist() == [[float(rank), 1.0]] * 4
        with torch.inference_mode():
            tensor = torch.ones(3)
        dist.all_reduce(tensor, ReduceOp.AVG)
        with torch.inference_mode():
            assert tensor.tolist() == [1.0] * 3
        leaf = torch.ones(3, requires_grad=True)
        dist.all_reduce(leaf)
        assert leaf.tolist() == [2.0] * 3

    backend_ranks.run(tmp_path, 2, check)


def test_works_may_be_waited_for_in_any_order(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        tensors = [torch.full((100,), rank + float(n)) for n in range(8)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works[4:]]
        for work in reversed(works) if rank else works:
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
        for n, tensor in enumerate(tensors):
            assert tensor.tolist() == [2.0 * n + 1] * 100
        for future, tensor in zip(futures, tensors[4:], strict=True):
            assert future.wait()[0] is tensor
        assert works[0].get_future().then(lambda future: future.value()[0].sum()).wait() == 100.0

    backend_ranks.run(tmp_path, 2, check)


def test_completion_can_be_polled(tmp_path: Path) -> None:
    def check(rank: int) -> list[float]:
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
        return tensor[:2].tolist()

    assert backend_ranks.run(tmp_path, 2, check) == [[2.0, 2.0]] * 2


def test_sending_and_receiving(tmp_path: Path) -> None:
    def check(rank: int) -> Any:
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0]), 1, tag=5)
            source = dist.recv(tensor := torch.empty(2))
            return source, tensor.tolist()
        dist.recv(tensor := torch.empty(2), 0, tag=5)
        dist.isend(tensor * 10, 0).wait()
        return tensor.tolist()

    assert backend_ranks.run(tmp_path, 2, check) == [(1, [10.0, 20.0]), [1.0, 2.0]]


def test_batches_of_sends_and_receives(tmp_path: Path) -> None:
    def check(rank: int) -> list[float]:
        received = torch.empty(2)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2,), float(rank)), 1 - rank),
                dist.P2POp(dist.irecv, received, 1 - rank),
            ]
        )
        for work in works:
            work.wait()
        return received.tolist()

    assert backend_ranks.run(tmp_path, 2, check) == [[1.0, 1.0], [0.0, 0.0]]


def test_sparse_tensors(tmp_path: Path) -> None:
    def check(rank: int) -> list[float]:
        tensor = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
        dist.all_reduce(tensor)
        return tensor.to_dense().tolist()

    assert backend_ranks.run(tmp_path, 2, check) == [[1.0, 1.0, 4.0, 0.0]] * 2


def test_groups_of_some_ranks(tmp_path: Path) -> None:
    def check(rank: int) -> list[Any]:
        low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
        same = dist.new_group([2, 0])
        results = []
        for group in (low, high, same):
            if dist.get_rank(group) < 0:
                continue
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            gathered: list[Any] = [None] * 2
            dist.all_gather_object(gathered, rank, group=group)
            results.append((tensor.item(), gathered))
        if rank != 2:
            dist.destroy_process_group(low)
        dist.all_reduce(total := torch.tensor([1.0]))
        results.append(total.item())
        return results

    assert backend_ranks.run(tmp_path, 3, check) == [
        [(1.0, [0, 1]), (2.0, [0, 2]), 3.0],
        [(1.0, [0, 1]), (3.0, [1, 2]), 3.0],
        [(3.0, [1, 2]), (2.0, [0, 2]), 3.0],
    ]


def test_a_group_of_ours_beside_a_default_one_of_gloo(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}"

    def check(rank: int) -> Any:
        import farandole.torch  # noqa: F401

        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3)
        group = dist.new_group([1, 2], backend="farandole")
        tensor = torch.tensor([float(rank)])
        if rank:
            dist.all_reduce(tensor, group=group)
            assert dist.get_backend(group) == "farandole"
        dist.destroy_process_group()
        return tensor.item()

    assert backend_ranks.run_processes(3, check) == [0.0, 3.0, 3.0]
