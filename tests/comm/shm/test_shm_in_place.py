"""``Engine.buffer`` of the engine ``shm``: tensors that all ranks can reach are not copied."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Reduction
from farandole.comm.engines.shm.engine import ShmEngine
from farandole.core.errors import ShutDownError
from farandole.testing.ranks import run_processes, take_seat


def open_engine(channel: str = "test") -> ShmEngine:
    engine = registry.opener("shm")(take_seat(channel))
    assert isinstance(engine, ShmEngine)
    return engine


def held_bytes(engine: ShmEngine) -> int:
    """The memory that the window of this rank takes."""
    return os.fstat(engine._descriptor).st_blocks * 512


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_may_have_its_tensor_anywhere(size: int) -> None:
    """In place on all ranks, on some, or on none; whole buffers and slices; short and long."""

    def be(rank: int) -> None:
        engine = open_engine()
        for length in (5, 70_001, 1_300_003):
            for who in range(2**size):
                shared = engine.buffer(length + 40, torch.float32)
                shared.fill_(-1.0)
                if who >> rank & 1:
                    buffer = shared[8 * rank : 8 * rank + length]
                else:
                    buffer = torch.empty(length)
                buffer.copy_(torch.arange(length) % 11 + rank)
                engine.allreduce(buffer, Reduction.SUM).wait()
                expected = (torch.arange(length) % 11) * float(size) + sum(range(size))
                assert torch.equal(buffer, expected)
                untouched = shared.clone()
                if who >> rank & 1:
                    untouched[8 * rank : 8 * rank + length] = -1.0
                assert bool((untouched == -1.0).all())
        engine.close()

    run_processes(size, be)


def test_the_other_verbs_read_in_place() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        big = 1_200_001
        for shared in (True, rank == 0, rank == 1):

            def new(length: int, shared: bool = shared) -> torch.Tensor:
                return engine.buffer(length, torch.float32) if shared else torch.zeros(length)

            source = new(3 * big).fill_(rank + 1.0)
            output = new(big)
            engine.reducescatter(output, source, [big] * 3, Reduction.SUM).wait()
            source.fill_(100.0)  # it is this rank's again
            assert bool((output == 6.0).all())
            whole = new(3 * big).fill_(-1.0)
            mine = whole[rank * big : (rank + 1) * big].fill_(float(rank))
            engine.allgather(whole, mine, [big] * 3).wait()
            assert torch.equal(whole, torch.arange(3.0).repeat_interleave(big))
            buffer = new(big).fill_(float(rank))
            engine.broadcast(buffer, 1).wait()
            buffer.add_(1.0)
            assert bool((buffer == 2.0).all())
            received = new(3 * big)
            engine.alltoall(received, source.fill_(rank), [big] * 3, [big] * 3).wait()
            assert torch.equal(received, torch.arange(3.0).repeat_interleave(big))
        engine.close()

    run_processes(3, be)


def test_in_place_is_in_place() -> None:
    """The other rank's memory is written to: no slot is touched."""

    def be(rank: int) -> None:
        engine = open_engine()
        buffer = engine.buffer(4_000_000, torch.float32)
        engine.barrier().wait()
        before = held_bytes(engine)
        engine.allreduce(buffer.fill_(1.0), Reduction.SUM).wait()
        assert bool((buffer == 2.0).all())
        engine.barrier().wait()
        assert held_bytes(engine) == before
        engine.close()

    run_processes(2, be)


def test_buffers_are_zeros_of_any_dtype_and_length() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            for length in (0, 1, 1000):
                tensor = engine.buffer(length, dtype)
                assert tensor.dtype == dtype
                assert tensor.shape == (length,)
                assert not tensor.any()
                assert not tensor.is_inference()
        with torch.inference_mode():
            kept = engine.buffer(3, torch.float32)
        kept.requires_grad_()  # which inference tensors refuse
        engine.close()

    run_processes(1, be)


def test_memory_comes_back_when_the_last_view_goes() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        before = held_bytes(engine)
        for _ in range(50):
            buffer = engine.buffer(1_000_000, torch.float32)
            part = buffer[10:20]
            del buffer
            gc.collect()
            assert held_bytes(engine) > before
            assert not part.any()
            part.fill_(7.0)
            del part
            assert held_bytes(engine) == before
        engine.close()

    run_processes(1, be)


def test_a_full_window_gives_ordinary_tensors() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        while (place := engine._arena._heap.allocate(2**30)) is not None:
            assert place
        buffer = engine.buffer(2**28, torch.float32)
        assert engine._arena.offset_of(buffer) is None
        small = torch.ones(3)
        engine.allreduce(small, Reduction.SUM).wait()
        assert small.tolist() == [2.0] * 3
        engine.close()

    run_processes(2, be)


def test_tensors_outlive_the_engine() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        buffer = engine.buffer(100_000, torch.float32)
        engine.allreduce(buffer.fill_(1.0), Reduction.SUM).wait()
        engine.barrier().wait()
        engine.close()
        assert isinstance(engine.buffer(2, torch.float32), torch.Tensor)
        with pytest.raises(ShutDownError):
            engine.allreduce(buffer, Reduction.SUM)
        del engine
        gc.collect()
        assert bool((buffer == 2.0).all())
        buffer.add_(1.0)
        assert bool((buffer == 3.0).all())

    run_processes(2, be)


def test_what_a_forked_child_writes_stays_in_the_child() -> None:
    def be(rank: int) -> None:
        engine = open_engine()
        buffer = engine.buffer(1000, torch.float32).fill_(1.0)
        child = os.fork()
        if child == 0:
            read = bool((buffer == 1.0).all())
            buffer.fill_(9.0)
            os._exit(0 if read else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.allreduce(buffer, Reduction.SUM).wait()
        assert bool((buffer == 2.0).all())
        engine.close()

    run_processes(2, be)
