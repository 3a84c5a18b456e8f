"""Codecs with error feedback between the hosts of the ``hierarchical`` engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from exchange_ranks import errors_of, layout_of, random_buffer
from torch import Tensor

from farandole.comm.codec import Memory
from farandole.comm.engines import registry
from farandole.precision.hosts import AcrossHosts
from farandole.precision.int8 import Int8
from farandole.precision.powersgd import PowerSGD
from farandole.precision.topk import TopK
from farandole.testing.ranks import run_processes, take_seat

HOSTS = ("a", "a", "b", "b")
SHAPES = [(40, 33), (5,), (16, 8, 3, 3), (), (300, 1), (64, 64)]
STEPS = 12


@pytest.mark.parametrize("codec", [Int8(), PowerSGD(2), TopK(0.05)], ids=str)
def test_nothing_is_lost_between_hosts_and_all_ranks_get_the_same_bits(codec) -> None:
    layout = layout_of(SHAPES)

    def rank_function(rank: int) -> tuple[list[Tensor], Tensor]:
        seat = dataclasses.replace(take_seat(), hosts=HOSTS)
        engine, memory = registry.opener("hierarchical")(seat), Memory()
        exchange = AcrossHosts(codec).exchange(layout, memory)
        results = []
        for step in range(STEPS):
            buffer = engine.buffer(layout.length, torch.float32)
            buffer.copy_(random_buffer(layout, rank, step))
            engine.sum_encoded(buffer, exchange).wait()
            results.append(buffer.clone())
        engine.barrier().wait()
        engine.close()
        return results, errors_of(memory, layout)

    ranks = run_processes(len(HOSTS), rank_function)
    for results, _ in ranks[1:]:
        assert all(map(torch.equal, results, ranks[0][0]))
    came_out = sum(result.double() for result in ranks[0][0])
    missing = sum(errors for _, errors in ranks)
    went_in = sum(
        random_buffer(layout, rank, step).double()
        for rank in range(len(HOSTS))
        for step in range(STEPS)
    )
    assert not torch.allclose(came_out, went_in, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(came_out + missing, went_in, rtol=1e-4, atol=1e-2)
