"""How the ranks of the engine ``shm`` come to share memory, or all learn that they cannot."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket

import pytest
import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Reduction, Seat
from farandole.comm.engines.shm import handover, opening
from farandole.core.clock import Deadline
from farandole.core.errors import DeadlineError, SetupError, UsageError
from farandole.testing.ranks import run_processes, run_threads, take_seat


def refuse(*arguments: object, **options: object) -> int:
    raise PermissionError(errno.EPERM, "refused by the test")


def sums(engine: Engine) -> bool:
    buffer = torch.ones(100_000)
    engine.allreduce(buffer, Reduction.SUM).wait()
    right = bool((buffer == float(engine.seat.size)).all())
    engine.barrier().wait()
    engine.close()
    return right


def named_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("forbidden", [(), (1,), (0, 2), (0, 1, 2)])
def test_memory_is_handed_over_where_proc_is_closed(forbidden: tuple[int, ...]) -> None:
    def be(rank: int) -> bool:
        if rank in forbidden:
            opening.open_by_proc = refuse  # type: ignore[assignment]
        return sums(opening.open_shm(take_seat()))

    assert run_processes(3, be) == [True] * 3


def test_where_neither_way_is_open_all_ranks_say_so() -> None:
    def be(rank: int) -> str:
        before = len(os.listdir("/proc/self/fd"))
        if rank == 1:
            opening.open_by_proc = refuse  # type: ignore[assignment]
            opening.ask = refuse  # type: ignore[assignment]
        seat = take_seat()
        with pytest.raises(SetupError) as caught:
            opening.open_shm(seat)
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the store's
        return caught.value.message

    first, *others = run_processes(3, be)
    assert all(other == first for other in others)
    assert "rank 1 of it can neither open the memory of another nor ask for it" in first
    assert "refused by the test" in first
    assert "FARANDOLE_ENGINE=torch" in first


@pytest.mark.parametrize("all_ways", [False, True])
def test_without_memfd_there_is_shared_memory_without_a_name(all_ways: bool) -> None:
    def be(rank: int) -> str:
        os.memfd_create = refuse
        if all_ways and rank == 1:
            opening.new_file = refuse  # type: ignore[assignment]
            with pytest.raises(SetupError) as caught:
                opening.open_shm(take_seat())
            return caught.value.message
        before = named_memory()
        try:
            engine = opening.open_shm(take_seat())
        except SetupError as error:
            return error.message
        assert named_memory() == before
        return str(sums(engine))

    first, second = run_processes(2, be)
    assert first == second
    assert ("rank 1 of it cannot make shared memory" in first) if all_ways else first == "True"


def test_another_c_library_is_refused_on_all_ranks() -> None:
    def be(rank: int) -> str:
        if rank == 2:
            os.confstr = lambda name: "another"
        with pytest.raises(SetupError) as caught:
            opening.open_shm(take_seat())
        return caught.value.message

    messages = run_processes(3, be)
    assert len(set(messages)) == 1
    assert "rank 2 of it has another C library than rank 0" in messages[0]


def test_a_c_library_without_what_is_needed() -> None:
    def be(rank: int) -> str:
        if rank == 1:
            opening.libc._missing.append("sem_clockwait")
        with pytest.raises(SetupError) as caught:
            opening.open_shm(take_seat())
        return caught.value.message

    messages = run_processes(2, be)
    assert len(set(messages)) == 1
    assert "rank 1 of it cannot make shared memory" in messages[0]
    assert "the C library has no sem_clockwait" in messages[0]


def test_memory_that_is_not_what_was_offered_is_refused() -> None:
    """A number that leads elsewhere: an old process id, another host behind the same name."""

    def be(rank: int) -> str:
        if rank == 0:
            stranger = os.memfd_create("stranger")
            opening.open_by_proc = lambda *arguments: os.dup(stranger)
        with pytest.raises(SetupError) as caught:
            opening.open_shm(take_seat())
        return caught.value.message

    messages = run_processes(2, be)
    assert len(set(messages)) == 1
    assert "rank 0 of it cannot reach the memory of another" in messages[0]


def test_ranks_of_several_hosts_are_refused() -> None:
    def be(rank: int) -> None:
        seat = dataclasses.replace(take_seat(), hosts=("here", "there"))
        with pytest.raises(SetupError, match="are on 2"):
            opening.open_shm(seat)

    run_processes(2, be)


def test_other_devices_are_refused() -> None:
    def be(rank: int) -> None:
        with pytest.raises(UsageError, match="meta"):
            registry.opener("shm")(take_seat(device="meta"))

    run_threads(1, be)


def test_a_rank_that_does_not_come_is_named() -> None:
    def be(rank: int) -> str:
        if rank == 2:
            return ""
        with pytest.raises(DeadlineError) as caught:
            opening.open_shm(take_seat("gradients", timeout=1.0))
        return caught.value.message

    first, second, _ = run_processes(3, be)
    expected = (
        "The channel 'gradients' of 3 ranks did not open within 1 s: rank 2 of it did not come."
    )
    assert first == second == expected


def test_subgroups_side_by_side() -> None:
    """Channels between different sets of ranks, which share ranks."""

    def be(rank: int) -> bool:
        def seat(members: tuple[int, ...]) -> Seat:
            whole = take_seat("/".join(map(str, members)))
            return dataclasses.replace(
                whole,
                rank=members.index(rank),
                size=len(members),
                hosts=whole.hosts[: len(members)],
            )

        groups = [(0, 1, 2, 3), (2, 0), (1, 2, 3), (3, 1)]
        engines = [opening.open_shm(seat(group)) for group in groups if rank in group]
        buffers = [torch.ones(300_000) for _ in engines]
        works = [
            engine.allreduce(buffer, Reduction.SUM)
            for engine, buffer in zip(engines, buffers, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        right = all(
            bool((buffer == float(engine.seat.size)).all())
            for engine, buffer in zip(engines, buffers, strict=True)
        )
        for engine in engines:
            engine.barrier().wait()
        for engine in engines:
            engine.close()
        return right

    assert run_processes(4, be) == [True] * 4


def test_a_descriptor_goes_to_who_names_the_token_only() -> None:
    descriptor = os.memfd_create("test")
    counter = handover.Counter(descriptor)
    ticket = counter.ticket
    wrong = handover.ask({**ticket, "token": "00" * handover.TOKEN})
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(f"\0{ticket['name']}")
    silent.shutdown(socket.SHUT_WR)
    right = handover.ask(ticket)
    counter.serve(1, Deadline.after(5.0))
    received = handover.receive(right, Deadline.after(5.0))
    assert os.path.samestat(os.fstat(received), os.fstat(descriptor))
    assert not os.get_inheritable(received)
    for stranger in (wrong, silent):
        with pytest.raises(OSError, match=r"does not hand it over|reset"):
            handover.receive(stranger, Deadline.after(5.0))
    counter.close()
    for each in (wrong, silent, right):
        each.close()
    os.close(received)
    os.close(descriptor)
