"""What tests of exchanges share: ranks that sum buffers through them, and random gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farandole.comm.codec import Block, ExchangeCodec, Layout, Memory
from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine
from farandole.testing.ranks import run_threads, take_seat

TAIL = 7


def layout_of(shapes: Sequence[tuple[int, ...]], gap: int = 3) -> Layout:
    """Blocks with gaps, and a tail."""
    blocks, offset = [], 0
    for number, shape in enumerate(shapes):
        blocks.append(Block(f"p{number}", offset, shape))
        offset += blocks[-1].numel + gap
    return Layout(tuple(blocks), offset + TAIL)


def open_engine(hosts: tuple[str, ...] | None = None) -> Engine:
    seat = take_seat()
    if hosts is not None:
        seat = dataclasses.replace(seat, hosts=hosts)
    return registry.opener("threads")(seat)


def random_buffer(layout: Layout, rank: int, step: int, dtype=torch.float32) -> Tensor:
    """Gradients of one rank in one step; zeros in the gaps, small whole numbers in the tail."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    buffer = torch.zeros(layout.length, dtype=dtype)
    for block in layout.blocks:
        part = buffer[block.offset : block.offset + block.numel]
        part.copy_(torch.randn(block.numel, generator=random) * 10.0 ** (block.offset % 3 - 1))
    buffer[-TAIL:] = torch.arange(TAIL, dtype=dtype) * (rank + 1) * (step + 1)
    return buffer


def run(
    size: int,
    codec: ExchangeCodec,
    layout: Layout,
    steps: int,
    make: Callable[[Layout, int, int], Tensor] = random_buffer,
) -> list[tuple[list[Tensor], Memory]]:
    """For each rank, what came out in each step, and its memory afterwards."""

    def rank_function(rank: int) -> tuple[list[Tensor], Memory]:
        engine, memory = open_engine(), Memory()
        exchange = codec.exchange(layout, memory)
        results = []
        for step in range(steps):
            buffer = make(layout, rank, step)
            engine.sum_encoded(buffer, exchange).wait()
            results.append(buffer)
        return results, memory

    return run_threads(size, rank_function)


def errors_of(memory: Memory, layout: Layout) -> Tensor:
    """The errors as a buffer of the layout; zeros where there are none."""
    whole = torch.zeros(layout.length, dtype=torch.float64)
    for block in layout.blocks:
        error = memory.errors.get(block.name)
        if error is not None:
            whole[block.offset : block.offset + block.numel] = error
    return whole
