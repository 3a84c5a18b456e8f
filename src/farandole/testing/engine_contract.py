"""The contract of ``comm.engines.base`` as a suite: every engine runs it.

Subclass :class:`EngineContract` in a test module and say how the engine is opened and where its
ranks live; deviations are overrides with a comment that says why. Needs pytest and hypothesis.

Example::

    class TestMyEngine(EngineContract):
        opener = staticmethod(open_my_engine)
        processes = True

Inputs are small whole numbers, so that every order of reducing gives exactly the same in every
dtype, and results are compared without tolerance. One test takes arbitrary numbers: it compares
the ranks with each other, bit by bit.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.comm.engines.base import REDUCIBLE, Engine, Opener, Reduction, Work
from farandole.core.clock import Deadline
from farandole.core.errors import FarandoleError, PeerLost, ShutDownError, StallError
from farandole.testing.ranks import process_outcomes, run_processes, run_threads, take_seat

SOON = 5.0
"""Seconds in which a failure must have reached every rank, generously."""

MOVABLE = (*sorted(REDUCIBLE, key=str), torch.bool, torch.int16, torch.complex64)

Begun = tuple[Work, Callable[[], None]]
"""An operation in flight, and the check of its result."""


@dataclass(frozen=True)
class Step:
    """One operation of a program that all ranks run."""

    verb: str
    dtype: torch.dtype
    counts: tuple[tuple[int, ...], ...]
    """``counts[s][r]``: what s sends to r in an alltoall. Other verbs use the first row."""
    reduction: Reduction
    root: int
    engine: int
    """Which of the engines between the same ranks carries it."""
    seed: int


@dataclass(frozen=True)
class Program:
    """Steps, begun by all ranks in this order, waited for in the order that ``waits`` sorts to."""

    size: int
    steps: tuple[Step, ...]
    waits: tuple[int, ...]


def numbers(step: Step, rank: int, length: int) -> torch.Tensor:
    """What ``rank`` brings to ``step``: from -2 to 2 (unsigned: 0 to 2), as ``step.dtype``."""
    generator = torch.Generator().manual_seed(step.seed * 64 + rank)
    signed = step.dtype.is_signed and step.dtype != torch.bool
    drawn = torch.randint(-2 if signed else 0, 3, (length,), generator=generator)
    return drawn.to(step.dtype)


def reduced(parts: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The right result, computed in float64, where these numbers are exact."""
    table = torch.stack([part.double() for part in parts])
    if reduction is Reduction.SUM:
        result = table.sum(0)
    elif reduction is Reduction.PRODUCT:
        result = table.prod(0)
    else:
        result = table.amin(0) if reduction is Reduction.MIN else table.amax(0)
    return result.to(parts[0].dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that both are equal in dtype, shape and every value."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected), f"got {actual}, expected {expected}"


def begin(engine: Engine, step: Step) -> Begun:
    """Begin ``step`` as this rank."""
    return _VERBS[step.verb](engine, step)


def _allreduce(engine: Engine, step: Step) -> Begun:
    length = step.counts[0][0]
    parts = [numbers(step, rank, length) for rank in range(engine.seat.size)]
    buffer = parts[engine.seat.rank].clone()
    work = engine.allreduce(buffer, step.reduction)
    return work, lambda: same(buffer, reduced(parts, step.reduction))


def _reducescatter(engine: Engine, step: Step) -> Begun:
    counts, rank = step.counts[0], engine.seat.rank
    parts = [numbers(step, each, sum(counts)) for each in range(engine.seat.size)]
    output = torch.empty(counts[rank], dtype=step.dtype)
    work = engine.reducescatter(output, parts[rank].clone(), counts, step.reduction)
    total = reduced(parts, step.reduction).split_with_sizes(list(counts))[rank]
    return work, lambda: same(output, total)


def _allgather(engine: Engine, step: Step) -> Begun:
    counts = step.counts[0]
    parts = [numbers(step, rank, counts[rank]) for rank in range(engine.seat.size)]
    output = torch.empty(sum(counts), dtype=step.dtype)
    work = engine.allgather(output, parts[engine.seat.rank].clone(), counts)
    return work, lambda: same(output, torch.cat(parts))


def _broadcast(engine: Engine, step: Step) -> Begun:
    parts = [numbers(step, rank, step.counts[0][0]) for rank in range(engine.seat.size)]
    buffer = parts[engine.seat.rank].clone()
    work = engine.broadcast(buffer, step.root)
    return work, lambda: same(buffer, parts[step.root])


def _alltoall(engine: Engine, step: Step) -> Begun:
    rank, size = engine.seat.rank, engine.seat.size
    sources = [numbers(step, each, sum(step.counts[each])) for each in range(size)]
    incoming = [step.counts[each][rank] for each in range(size)]
    output = torch.empty(sum(incoming), dtype=step.dtype)
    work = engine.alltoall(output, sources[rank].clone(), incoming, step.counts[rank])
    pieces = [
        source.split_with_sizes(list(counts))[rank]
        for source, counts in zip(sources, step.counts, strict=True)
    ]
    return work, lambda: same(output, torch.cat(pieces))


def _barrier(engine: Engine, step: Step) -> Begun:
    return engine.barrier(), lambda: None


_VERBS: dict[str, Callable[[Engine, Step], Begun]] = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "barrier": _barrier,
}
_REDUCING = ("allreduce", "reducescatter")

_LENGTHS = st.one_of(st.sampled_from((0, 1)), st.integers(0, 40), st.just(70_001))


@st.composite
def _steps(draw: st.DrawFn, size: int) -> Step:
    verb = draw(st.sampled_from(tuple(_VERBS)))
    dtypes = sorted(REDUCIBLE, key=str) if verb in _REDUCING else MOVABLE
    row = st.tuples(*[_LENGTHS] * size)
    return Step(
        verb=verb,
        dtype=draw(st.sampled_from(dtypes)),
        counts=draw(st.tuples(*[row] * (size if verb == "alltoall" else 1))),
        reduction=draw(st.sampled_from(Reduction)),
        root=draw(st.integers(0, size - 1)),
        engine=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to 12 steps for 1 to 4 ranks."""
    size = draw(st.integers(1, 4))
    steps = draw(st.lists(_steps(size), min_size=1, max_size=12))
    waits = draw(st.permutations(range(len(steps))))
    return Program(size, tuple(steps), tuple(waits))


def run_program(opener: Opener, program: Program, rank: int) -> None:
    """Run ``program`` on two engines, interleaved differently on odd ranks."""
    engines = [opener(take_seat(f"program/{index}")) for index in range(2)]
    order = list(enumerate(program.steps))
    if rank % 2:
        order.sort(key=lambda item: item[1].engine)
    begun = {index: begin(engines[step.engine], step) for index, step in order}
    for index in sorted(begun, key=program.waits.__getitem__, reverse=bool(rank % 2)):
        work, check = begun[index]
        assert work.wait(SOON * 4)
        assert work.done()
        assert work.wait(0.0)
        check()
    for engine in engines:
        engine.barrier().wait()
    for engine in engines:
        engine.close()


class EngineContract:
    """What every engine owes. Set :attr:`opener`; :attr:`processes` says where ranks live."""

    opener: ClassVar[Opener]
    processes: ClassVar[bool]
    """Whether ranks are processes; else threads."""

    def run(self, size: int, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``fn(opener, *arguments, rank)`` returns on each of ``size`` ranks."""
        bound = functools.partial(fn, type(self).opener, *arguments)
        return (run_processes if self.processes else run_threads)(size, bound)

    @given(program=programs())
    @settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    def test_any_program_gives_the_right_results(self, program: Program) -> None:
        """Any verbs, dtypes and counts, in flight together on two engines."""
        self.run(program.size, run_program, program)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_every_dtype_and_reduction(self, size: int) -> None:
        """Every REDUCIBLE dtype × reduction × verb that reduces, of length 0, 1, odd, large."""
        steps = tuple(
            Step(verb, dtype, ((length,) * size,), reduction, 0, 0, length)
            for verb in _REDUCING
            for dtype in sorted(REDUCIBLE, key=str)
            for reduction in Reduction
            for length in (0, 1, 7, 20_001)
        )
        self.run(size, run_program, Program(size, steps, tuple(range(len(steps)))))

    def test_moves_any_dtype(self) -> None:
        """Operations that only move bytes carry dtypes that nothing reduces."""
        counts = ((3, 0, 2), (0, 0, 1), (4, 1, 0))
        steps = tuple(
            Step(verb, dtype, counts, Reduction.SUM, 1, 0, 5)
            for verb in ("allgather", "broadcast", "alltoall")
            for dtype in MOVABLE
        )
        self.run(3, run_program, Program(3, steps, tuple(range(len(steps)))))

    def test_uneven_counts_of_any_magnitude(self) -> None:
        """Zeros beside counts far beyond any buffer that an engine might cut things into."""
        big = 1_500_007
        steps = tuple(
            Step(verb, torch.float32, counts, Reduction.SUM, 2, 0, 9)
            for verb in _VERBS
            for counts in (
                ((0, big, 3), (1, 0, 0), (big, 2, big)),
                ((big, 0, 0), (0, 0, 0), (0, 5, 0)),
            )
        )
        self.run(3, run_program, Program(3, steps, tuple(range(len(steps)))))

    def test_every_rank_gets_bitwise_the_same(self) -> None:
        """Arbitrary floats, whose sum depends on the order of adding."""
        first, *others = self.run(4, reduce_arbitrary)
        assert all(other == first for other in others)

    def test_waiting_with_a_limit(self) -> None:
        """A wait that runs out says so, harms nothing, and may be repeated."""
        assert all(self.run(2, wait_in_slices))

    def test_abort_unblocks_another_thread(self) -> None:
        """Its error reaches who waits and whatever comes later; the other ranks lose a peer."""
        for seconds in self.run(3, abort_while_waiting):
            assert seconds < SOON

    def test_the_first_abort_wins_and_completed_work_stays_so(self) -> None:
        """A second error changes nothing; what was done before is not taken back."""
        self.run(2, abort_twice)

    def test_close_ends_pending_work(self) -> None:
        """Closing does not wait for it, is idempotent, and costs the other ranks their peer."""
        for seconds in self.run(2, close_while_pending):
            assert seconds < SOON

    def test_channels_are_independent(self) -> None:
        """Opened by several threads at once; one that is aborted leaves the others whole."""
        self.run(3, open_at_once)

    def test_close_leaves_nothing(self) -> None:
        """No thread and no descriptor, however often a channel is opened."""
        if not self.processes:
            pytest.skip("ranks that are threads of one process cannot count their own")
        for before, after in self.run(2, count_what_is_left):
            assert fits(after, before), f"threads and descriptors: {before} before, {after} after"

    @pytest.mark.parametrize("pending", [True, False])
    def test_a_dead_peer_is_noticed_everywhere(self, pending: bool) -> None:
        """By ranks that wait already and by those that come later, neighbours or not."""
        if not self.processes:
            pytest.skip("threads do not die alone")
        lose = functools.partial(lose_a_peer, type(self).opener, pending)
        *survivors, dead = process_outcomes(4, lose)
        assert dead.signal == signal.SIGKILL
        for outcome in survivors:
            assert outcome.finished, outcome.describe()
            assert outcome.value is not None
            assert outcome.value < SOON

    def test_a_process_ends_with_work_in_flight(self) -> None:
        """Neither an open engine nor a pending operation holds the end of a process up."""
        if not self.processes:
            pytest.skip("needs processes")
        for outcome in process_outcomes(2, functools.partial(leave_open, type(self).opener), 30.0):
            assert outcome.exit_code == 0, outcome.describe()


def reduce_arbitrary(opener: Opener, rank: int) -> list[bytes]:
    """The bytes of sums and products of arbitrary floats."""
    engine = opener(take_seat())
    generator = torch.Generator().manual_seed(rank)
    results = []
    for length in (1, 1000, 100_003):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for reduction in Reduction:
                buffer = torch.randn(length, generator=generator).to(dtype)
                engine.allreduce(buffer, reduction).wait()
                results.append(buffer.view(torch.uint8).numpy().tobytes())
    engine.close()
    return results


def wait_in_slices(opener: Opener, rank: int) -> bool:
    """Rank 1 begins only after rank 0 has waited in vain."""
    seat = take_seat()
    engine = opener(seat)
    buffer = torch.full((5,), float(rank + 1))
    if rank == 0:
        work = engine.allreduce(buffer, Reduction.SUM)
        for timeout in (0.0, 0.0004, 0.02, 0.02):
            assert work.wait(timeout) is False
        assert not work.done()
        seat.store.set("waited", b"")
    else:
        seat.store.get("waited", Deadline.after(SOON))
        work = engine.allreduce(buffer, Reduction.SUM)
    assert work.wait(SOON)
    assert buffer.tolist() == [3.0] * 5
    for _ in range(3):
        engine.allreduce(buffer, Reduction.MAX).wait()
    engine.close()
    return True


def expect(error: type[FarandoleError], text: str, act: Callable[[], object]) -> None:
    """Assert that ``act`` raises exactly ``error`` with ``text`` in its message."""
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    assert text in caught.value.message


def abort_while_waiting(opener: Opener, rank: int) -> float:
    """Rank 0 aborts from a second thread; rank 2 begins nothing. Seconds until it was known."""
    seat = take_seat()
    engine = opener(seat)
    if rank == 2:
        seat.store.get("over", Deadline.after(4 * SOON))
        engine.close()
        return 0.0
    works = [engine.allreduce(torch.ones(300_000), Reduction.SUM) for _ in range(5)]
    assert not works[-1].wait(0.05)
    if rank == 0:
        seat.store.get("waiting", Deadline.after(SOON))
        error = StallError("rank 2 did not come", ranks=[2])
        threading.Thread(target=engine.abort, args=(error,)).start()
        expected: tuple[type[FarandoleError], str] = (StallError, "rank 2 did not come")
    else:
        seat.store.set("waiting", b"")
        seat.store.get("over", Deadline.after(4 * SOON))
        expected = (PeerLost, "")
    started = time.monotonic()
    for work in reversed(works):
        expect(*expected, functools.partial(work.wait, 4 * SOON))
    seconds = time.monotonic() - started
    seat.store.set("over", b"")
    assert works[0].done()
    expect(*expected, works[0].wait)
    for _ in range(2):
        expect(*expected, lambda: engine.barrier().wait())
        expect(*expected, lambda: engine.broadcast(torch.ones(3), 0).wait())
    engine.close()
    return seconds


def abort_twice(opener: Opener, rank: int) -> None:
    """All ranks complete an operation, then abort."""
    engine = opener(take_seat())
    buffer = torch.ones(3)
    work = engine.allreduce(buffer, Reduction.SUM)
    assert work.wait(SOON)
    engine.barrier().wait(SOON)
    engine.abort(StallError("first"))
    engine.abort(StallError("second"))
    assert work.wait()
    assert buffer.tolist() == [2.0] * 3
    # A rank whose peer was quicker has lost that peer before it could abort.
    with pytest.raises((StallError, PeerLost), match=r"first|left|lost"):
        engine.allreduce(buffer, Reduction.SUM).wait()
    engine.close()
    engine.close()


def close_while_pending(opener: Opener, rank: int) -> float:
    """Rank 0 closes while both have begun something different from nothing. Seconds it took."""
    seat = take_seat()
    engine = opener(seat)
    started = time.monotonic()
    if rank == 0:
        work = engine.allreduce(torch.ones(10), Reduction.SUM)
        engine.close()
        engine.close()
        expect(ShutDownError, "closed", work.wait)
        expect(ShutDownError, "closed", lambda: engine.barrier().wait())
        seat.store.set("closed", b"")
    else:
        seat.store.get("closed", Deadline.after(SOON))
        expect(PeerLost, "", lambda: engine.allgather(torch.ones(2), torch.ones(1), [1, 1]).wait())
        engine.close()
    return time.monotonic() - started


def open_at_once(opener: Opener, rank: int) -> None:
    """Four channels, opened by four threads on each rank; the first one is then aborted."""
    seats = [take_seat(f"channel/{index}") for index in range(4)]
    engines: dict[int, Engine] = {}

    def open_one(index: int) -> None:
        engines[index] = opener(seats[index])

    order = range(4) if rank % 2 else reversed(range(4))
    threads = [threading.Thread(target=open_one, args=(index,)) for index in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    if rank == 1:
        engines[0].abort(StallError("enough"))
    with pytest.raises((StallError, PeerLost)):
        engines[0].allreduce(torch.ones(4), Reduction.SUM).wait(SOON)
    for index in (1, 2, 3):
        buffer = torch.full((3,), float(index))
        assert engines[index].allreduce(buffer, Reduction.SUM).wait(SOON)
        assert buffer.tolist() == [3.0 * index] * 3
        engines[index].barrier().wait(SOON)
    for engine in engines.values():
        engine.close()


def count_what_is_left(opener: Opener, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Threads and descriptors before and after channels were used and closed."""

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    seats = [take_seat(f"channel/{index}") for index in range(5)]
    kept = []
    for index, seat in enumerate(seats):
        if index == 1:  # whatever the first use leaves for good is no leak
            before = count()
        engine = opener(seat)
        engine.allreduce(torch.ones(1000), Reduction.SUM).wait()
        engine.barrier().wait()
        if index == 3:
            kept.append(engine.broadcast(torch.ones(5), 0) if rank == 0 else None)
            engine.abort(StallError("enough"))
        engine.close()
    deadline = Deadline.after(SOON)
    while not fits(after := count(), before) and not deadline.expired():
        time.sleep(0.01)  # the system may list a thread that has been joined a little longer
    return before, after


def fits(after: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether nothing was added; a thread that was ending while ``before`` was counted may go."""
    return all(now <= then for now, then in zip(after, before, strict=True))


def lose_a_peer(opener: Opener, pending: bool, rank: int) -> float:
    """Rank 3 is killed; seconds until this rank knew."""
    seat = take_seat()
    engine = opener(seat)
    engine.barrier().wait()
    if rank == 3:
        for each in range(3):
            seat.store.get(f"ready/{each}", Deadline.after(SOON))
        os.kill(os.getpid(), signal.SIGKILL)
    works = [engine.allreduce(torch.ones(100_000), Reduction.SUM)] if pending else []
    seat.store.set(f"ready/{rank}", b"")
    started = time.monotonic()
    if not works:
        works = [engine.allreduce(torch.ones(100_000), Reduction.SUM)]
    expect(PeerLost, "", works[0].wait)
    expect(PeerLost, "", lambda: engine.barrier().wait())
    seconds = time.monotonic() - started
    engine.close()
    return seconds


def leave_open(opener: Opener, rank: int) -> None:
    """Return with an operation in flight that cannot complete."""
    engine = opener(take_seat())
    engine.barrier().wait()
    if rank == 0:
        globals()["_kept"] = (engine, engine.allreduce(torch.ones(100_000), Reduction.SUM))
