"""The engine contract, and what is this engine's own, on ranks told to be on several hosts."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.comm.engines.hierarchical.engine import PIECE_BYTES, HierarchicalEngine, Limits
from farandole.comm.engines.relay import Relay
from farandole.core.errors import PeerLost, ShutDownError
from farandole.testing.engine_contract import EngineContract, Program, programs, run_program
from farandole.testing.ranks import process_outcomes, run_processes, take_seat


def open_on(hosts: Sequence[str], seat: Seat) -> Engine:
    """The engine of ranks that are told to sit on ``hosts``, again and again if there are more."""
    told = tuple(hosts[rank % len(hosts)] for rank in range(seat.size))
    return registry.opener("hierarchical")(dataclasses.replace(seat, hosts=told))


def open_stages(hosts: Sequence[str], channel: str = "test") -> HierarchicalEngine:
    engine = open_on(hosts, take_seat(channel))
    assert isinstance(engine, HierarchicalEngine)
    return engine


class TestHierarchical(EngineContract):
    """Even ranks sit on one host, odd ones on another: 3 ranks are 2 + 1, 4 are 2 + 2."""

    opener = staticmethod(functools.partial(open_on, "ab"))
    processes = True


@st.composite
def programs_on_hosts(draw: st.DrawFn) -> tuple[str, Program]:
    """A program, and the host of each of its ranks."""
    program = draw(programs())
    return draw(st.text("abc", min_size=program.size, max_size=program.size)), program


@given(case=programs_on_hosts())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
def test_any_program_on_any_hosts_gives_the_right_results(case: tuple[str, Program]) -> None:
    hosts, program = case
    run_processes(
        program.size, functools.partial(run_program, functools.partial(open_on, hosts), program)
    )


@pytest.mark.parametrize("hosts", ["aaab", "abba", "aabbc"])
def test_large_tensors_in_several_pieces_are_right_and_alike(hosts: str) -> None:
    length = 5 * PIECE_BYTES // 8 + 3

    def be(rank: int) -> tuple[bytes, list[float]]:
        engine = open_stages(hosts)
        size = engine.seat.size
        noise = torch.randn(length, generator=torch.Generator().manual_seed(rank))
        whole = torch.arange(length, dtype=torch.float64) + rank
        copied = torch.full((length,), float(rank))
        works = [
            engine.allreduce(noise, Reduction.SUM),
            engine.allreduce(whole, Reduction.MAX),
            engine.broadcast(copied, size - 1),
        ]
        for work in works:
            work.wait()
        assert torch.equal(whole, torch.arange(length, dtype=torch.float64) + size - 1)
        expected = torch.zeros(length, dtype=torch.float64)
        for each in range(size):
            expected += torch.randn(length, generator=torch.Generator().manual_seed(each))
        torch.testing.assert_close(noise.double(), expected, rtol=0, atol=1e-5)
        engine.close()
        return noise.numpy().tobytes(), [copied.min().item(), copied.max().item()]

    sums, copies = zip(*run_processes(len(hosts), be), strict=True)
    assert len(set(sums)) == 1
    assert list(copies) == [[len(hosts) - 1.0] * 2] * len(hosts)


@pytest.mark.parametrize(("hosts", "name"), [("aa", "shm"), ("ab", "torch"), ("aab", "")])
def test_where_nothing_is_hierarchical_it_is_the_engine_below(hosts: str, name: str) -> None:
    def be(rank: int) -> str:
        engine = open_on(hosts, take_seat())
        engine.barrier().wait()
        engine.close()
        return engine.name

    assert set(run_processes(len(hosts), be)) == {name or "hierarchical"}


class Watched(Engine):
    """Counts the bytes that are given to an engine, and passes everything on."""

    name = "watched"

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner.seat)
        self.inner = inner
        self.bytes = 0

    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        self.bytes += buffer.nbytes
        return self.inner.allreduce(buffer, reduction)

    def reducescatter(self, output: torch.Tensor, source: torch.Tensor, *rest: Any) -> Work:
        self.bytes += source.nbytes
        return self.inner.reducescatter(output, source, *rest)

    def allgather(self, output: torch.Tensor, source: torch.Tensor, *rest: Any) -> Work:
        self.bytes += source.nbytes
        return self.inner.allgather(output, source, *rest)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        self.bytes += buffer.nbytes
        return self.inner.broadcast(buffer, root)

    def alltoall(self, *arguments: Any) -> Work:
        return self.inner.alltoall(*arguments)

    def barrier(self) -> Work:
        return self.inner.barrier()

    def abort(self, error: Any) -> None:
        self.inner.abort(error)

    def close(self) -> None:
        self.inner.close()


def watch_lane(engine: HierarchicalEngine) -> Watched | None:
    """Put a counter into this rank's lane."""
    ways = engine._ways
    if ways.across is None:
        return None
    watched = Watched(ways.across)
    object.__setattr__(ways, "across", watched)
    return watched


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_each_byte_goes_into_the_lanes_of_a_host_once(hosts: str) -> None:
    length = 6000

    def be(rank: int) -> list[int]:
        engine = open_stages(hosts)
        watched = watch_lane(engine)
        seen = []

        def note(work: Work) -> None:
            assert work.wait(20.0)
            seen.append(watched.bytes if watched else 0)
            if watched:
                watched.bytes = 0

        note(engine.allreduce(torch.ones(length), Reduction.SUM))
        note(engine.broadcast(torch.ones(length), 0))
        even = [length // 4] * 4
        note(engine.allgather(torch.empty(length), torch.ones(length // 4), even))
        note(
            engine.reducescatter(torch.empty(length // 4), torch.ones(length), even, Reduction.SUM)
        )
        engine.close()
        return seen

    by_rank = run_processes(4, be)
    for host in "ab":
        there = [seen for rank, seen in enumerate(by_rank) if hosts[rank] == host]
        reduced, copied, gathered, scattered = (sum(column) for column in zip(*there, strict=True))
        assert reduced == copied == scattered == 4 * length
        assert gathered == length * hosts.count(host)


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_memory_of_the_engine_is_summed_whole_and_in_parts(hosts: str) -> None:
    def be(rank: int) -> None:
        engine = open_stages(hosts)
        for _ in range(3):
            buffer = engine.buffer(PIECE_BYTES // 2, torch.float32)
            assert not buffer.any()
            buffer += rank + 1
            parts = buffer.split(PIECE_BYTES // 5)
            works = [engine.allreduce(part, Reduction.SUM) for part in parts]
            for work in works:
                work.wait()
            assert buffer.min() == buffer.max() == 10
            engine.allreduce(buffer, Reduction.SUM).wait()
            assert buffer.min() == buffer.max() == 40
        engine.close()
        assert buffer.max() == 40

    run_processes(4, be)


def test_what_is_below_the_limit_goes_flat() -> None:
    def be(rank: int) -> int:
        engine = open_stages("aabb")
        watched = watch_lane(engine)
        engine.limits = Limits(reduce=400, move=None)
        for length in (99, 100):
            buffer = torch.full((length,), 1.0)
            engine.allreduce(buffer, Reduction.SUM).wait()
            assert buffer.tolist() == [4.0] * length
            engine.broadcast(buffer, 0).wait()
        engine.close()
        return watched.bytes if watched else 0

    assert run_processes(4, be) == [200] * 4


class TwoStages:
    """An exchange that sends halves, in two operations; counts how often it was asked to."""

    def __init__(self, length: int, across_hosts: bool) -> None:
        self.across_hosts = across_hosts
        self.length = length
        self.asked: list[int] = []
        self._parts: list[tuple[int, TwoStages]] = []

    def sum(self, buffer: torch.Tensor, engine: Engine) -> Work:
        self.asked.append(engine.seat.size)
        first, second = buffer.clone().mul_(0.5), buffer.clone().mul_(0.5)

        def steps() -> Iterator[Work]:
            yield engine.allreduce(first, Reduction.SUM)
            yield engine.allreduce(second, Reduction.SUM)
            buffer.copy_(first + second)

        return Relay(steps())

    def parts(self, count: int) -> Sequence[tuple[int, TwoStages]]:
        if not self._parts:
            lengths = [self.length // count + (self.length % count if each == 0 else 0)
                       for each in range(count)]  # fmt: skip
            self._parts = [(length, TwoStages(length, False)) for length in lengths]
        return self._parts


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
@pytest.mark.parametrize("across_hosts", [True, False])
def test_sums_are_encoded_across_hosts_if_told_so(hosts: str, across_hosts: bool) -> None:
    lengths = (1000, 1001, 7)

    def be(rank: int) -> list[int]:
        engine = open_stages(hosts)
        size = len(hosts)
        asked = []
        for turn in range(3):
            exchanges = [TwoStages(length, across_hosts) for length in lengths]
            buffers = [torch.full((length,), float(rank + turn)) for length in lengths]
            plain = [torch.full((length,), float(rank)) for length in lengths]
            works = []
            for exchange, buffer, other in zip(exchanges, buffers, plain, strict=True):
                works.append(engine.sum_encoded(buffer, exchange))  # type: ignore[arg-type]
                works.append(engine.allreduce(other, Reduction.SUM))
            for work in works:
                assert work.wait(20.0)
            total = size * (size - 1) / 2
            for buffer, other in zip(buffers, plain, strict=True):
                assert buffer.tolist() == [total + size * turn] * buffer.numel()
                assert other.tolist() == [total] * other.numel()
            for exchange in exchanges:
                asked += exchange.asked
                asked += [each for _, part in exchange._parts for each in part.asked]
        engine.close()
        return asked

    for rank, asked in enumerate(run_processes(len(hosts), be)):
        if across_hosts:
            is_carrier = hosts == "aabb" or rank != 1
            assert asked == ([2] * 9 if is_carrier else [])
        else:
            assert asked == [len(hosts)] * 9


@pytest.mark.parametrize("victim", [0, 2, 3])
@pytest.mark.parametrize("verb", ["stages", "flat"])
def test_the_loss_of_any_rank_reaches_all(victim: int, verb: str) -> None:
    """Of three ranks on one host, one of which carries, and one on another."""

    def be(rank: int) -> float:
        engine = open_stages("aaab")
        engine.allreduce(torch.ones(1000), Reduction.SUM).wait()
        store, deadline = engine.seat.store, engine.seat.deadline
        if rank == victim:
            for each in set(range(4)) - {victim}:
                store.get(f"ready/{each}", deadline)
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "stages":
            works = [engine.allreduce(torch.ones(PIECE_BYTES), Reduction.SUM) for _ in range(3)]
        else:
            works = [engine.barrier()]
        store.set(f"ready/{rank}", b"")
        begin = time.monotonic()
        for work in works:
            with pytest.raises(PeerLost, match="lost another rank"):
                work.wait(20.0)
        seconds = time.monotonic() - begin
        with pytest.raises(PeerLost):
            engine.allreduce(torch.ones(3), Reduction.SUM).wait()
        engine.close()
        return seconds

    outcomes = process_outcomes(4, be, timeout=40.0)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.finished, outcome.describe()
            assert outcome.value is not None
            assert outcome.value < 1.0


def test_a_forked_child_is_told_that_collectives_are_the_ranks() -> None:
    def be(rank: int) -> int:
        engine = open_stages("aab")
        child = os.fork()
        if child == 0:
            try:
                engine.allreduce(torch.ones(3), Reduction.SUM)
            except ShutDownError as error:
                os._exit(7 if f"forked from rank {rank}" in error.message else 8)
            os._exit(9)
        _, status = os.waitpid(child, 0)
        buffer = torch.ones(3)
        engine.allreduce(buffer, Reduction.SUM).wait()
        assert buffer.tolist() == [3.0] * 3
        engine.close()
        return os.waitstatus_to_exitcode(status)

    assert run_processes(3, be) == [7] * 3


def test_a_stage_that_cannot_be_carried_out_ends_the_channel_as_our_bug() -> None:
    def be(rank: int) -> str:
        engine = open_stages("aab")
        with pytest.raises(Exception, match=r"report|hierarchical operation failed") as caught:
            engine.allgather(torch.empty(3), torch.ones(1), [1, 1]).wait(20.0)
        engine.close()
        return type(caught.value).__name__

    assert set(run_processes(3, be)) <= {"FarandoleBug", "PeerLost"}


def test_tensors_of_inference_mode_are_carried() -> None:
    def be(rank: int) -> list[float]:
        engine = open_stages("aab")
        with torch.inference_mode():
            buffer = torch.full((4,), float(rank))
        engine.allreduce(buffer, Reduction.SUM).wait()
        with torch.inference_mode():
            gathered = torch.empty(3)
        engine.allgather(gathered, buffer[:1], [1, 1, 1]).wait()
        engine.close()
        return [*buffer.tolist(), *gathered.tolist()]

    assert run_processes(3, be) == [[3.0] * 7] * 3
