"""Small reductions that become ready together share a buffer, and nothing else does."""

from __future__ import annotations

from typing import Any

import torch
from group_ranks import in_group

from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.testing.ranks import run_threads


def count_operations(group: Group) -> list[int]:
    """The sizes of the buffers that the named path's engine reduces from here on."""
    engine: Any = group.engine("named", torch.device("cpu"))
    sizes: list[int] = []
    begin = engine.allreduce

    def note(buffer: torch.Tensor, reduction: Any) -> Any:
        sizes.append(buffer.numel())
        return begin(buffer, reduction)

    engine.allreduce = note
    return sizes


def test_what_is_agreed_on_together_travels_together_by_dtype_and_operation():
    def check(group: Group) -> None:
        sizes = count_operations(group)
        own, scaled = torch.ones(3), torch.full((2, 2), 1.0)
        order = range(8) if group.rank else reversed(range(8))
        handles: dict[int, Any] = {}
        with group._negotiator._sending:  # so that each rank's eight requests leave in one message
            for i in order:
                if i < 5:
                    handles[i] = group.allreduce_async(
                        torch.full((i + 1,), float(group.rank)), op=Op.SUM, name=f"t{i}"
                    )
                elif i == 5:
                    handles[i] = group.allreduce_async(own, op=Op.SUM, name="own", inplace=True)
                elif i == 6:
                    handles[i] = group.allreduce_async(scaled, name="mean", prescale=2.0)
                else:
                    handles[i] = group.allreduce_async(torch.ones(2), op=Op.MAX, name="max")
        for i in range(5):
            assert handles[i].wait().tolist() == [1.0] * (i + 1)
        assert handles[5].wait() is own
        assert own.tolist() == [2.0] * 3
        assert handles[6].wait().tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert handles[7].wait().tolist() == [1.0, 1.0]
        assert sorted(sizes) == [2, 15 + 3 + 4]

    run_threads(2, in_group(check))


def test_large_ones_travel_alone():
    def check(group: Group) -> None:
        sizes = count_operations(group)
        with group._negotiator._sending:
            handles = [
                group.allreduce_async(torch.ones(1 << 17), op=Op.SUM, name=f"large{i}")
                for i in range(2)
            ]
        for handle in handles:
            assert handle.wait()[-1].item() == 2.0
        assert sizes == [1 << 17, 1 << 17]

    run_threads(2, in_group(check))
