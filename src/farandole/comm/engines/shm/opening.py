"""How the ranks of a channel come to share memory, and find out whether they can.

Each rank makes its window, tells in the store how to get at it, maps those of the others, and reads
in each the nonce that its owner has put into the store. Whoever can do that shares a host with the
owner, whatever host names, boot ids or containers say, and has the right window. Then all ranks
tell whether they succeeded: either the channel opens on every rank, or none opens it.

A window has no name. It is opened by way of its owner's ``/proc/PID/fd``, which the system allows
to processes of the same user only; where it does not even to those, the owner hands the descriptor
over (see ``handover``).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.comm.engines.base import Engine, Seat
from farandole.comm.engines.shm import libc
from farandole.comm.engines.shm.arena import MOST_RANKS, Arena, Reserve, window_size
from farandole.comm.engines.shm.board import MOST_CHUNK
from farandole.comm.engines.shm.engine import ShmEngine
from farandole.comm.engines.shm.handover import Counter, ask, receive
from farandole.comm.engines.shm.witness import watch, witnesses
from farandole.core.errors import (
    DeadlineError,
    FarandoleError,
    SetupError,
    UsageError,
    describe_ranks,
)

LAYOUT = 2
"""Number of the windows' layout and of the offers'; ranks with another one cannot share them."""

_ALIKE = {"layout": "version of Farandole", "libc": "C library", "namespace": "PID namespace"}
"""What must be alike in all ranks' offers, and what it is called."""


def open_shm(seat: Seat) -> Engine:
    """Open the channel of ``seat`` through shared memory; returns when every rank has.

    Raises ``UsageError`` for tensors that are not on the CPU, ``DeadlineError``, which names the
    ranks that did not come in time, and on every rank the same ``SetupError`` when some ranks
    cannot share memory; its text says which and why.

    Example::

        engine = open_shm(take_seat("gradients"))
        work = engine.allreduce(torch.ones(3), Reduction.SUM)
    """
    if seat.device.type != "cpu":
        raise UsageError(
            f"The engine 'shm' carries CPU tensors only, not {seat.device.type!r} tensors. "
            "Use the engine 'torch' (FARANDOLE_ENGINE=torch)."
        )
    if len(set(seat.hosts)) > 1:
        raise SetupError(
            f"The engine 'shm' joins ranks of one host, and those of the channel {seat.channel!r} "
            f"are on {len(set(seat.hosts))}. Use the engine 'hierarchical' or 'torch'."
        )
    if seat.size > MOST_RANKS:
        raise SetupError(f"The engine 'shm' joins up to {MOST_RANKS} ranks, not {seat.size}.")
    meeting = _Meeting(seat)
    with contextlib.ExitStack() as held:
        own, offer = _make(seat, held)
        offers = [json.loads(text) for text in meeting.exchange("offer", json.dumps(offer))]
        meeting.refuse([_unlike(each, offers[0]) for each in offers])
        assert own is not None
        arenas, pidfds, problem = _reach(meeting, own, offers, held)
        meeting.refuse(meeting.exchange("verdict", problem))
        cores = set().union(*(each["cores"] for each in offers))
        engine = ShmEngine(seat, arenas, own.descriptor, pidfds, crowded=seat.size > len(cores))
        own.counter.close()
        held.pop_all()
    return engine


class _Meeting:
    """The ranks' exchanges through the store."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def exchange(self, topic: str, value: str) -> list[str]:
        """What each rank says on ``topic``, where this rank says ``value``."""
        seat = self.seat
        keys = [f"engine/shm/{seat.channel}/{topic}/{rank}" for rank in range(seat.size)]
        seat.store.set(keys[seat.rank], value.encode())
        try:
            return [seat.store.get(key, seat.deadline).decode() for key in keys]
        except DeadlineError:
            late = [rank for rank, key in enumerate(keys) if seat.store.peek(key) is None]
            limit = "" if seat.deadline.limit is None else f" within {seat.deadline.limit:g} s"
            raise DeadlineError(
                f"The channel {seat.channel!r} of {seat.size} ranks did not open{limit}: "
                f"{describe_ranks(late)} of it did not come.",
                ranks=late,
            ) from None

    def refuse(self, problems: Sequence[str]) -> None:
        """Raise the same on every rank if any of them has met a problem."""
        met = [rank for rank, problem in enumerate(problems) if problem]
        if met:
            raise SetupError(
                f"The ranks of the channel {self.seat.channel!r} cannot share memory: "
                f"{describe_ranks(met)} of it {problems[met[0]]}. "
                "Use the engine 'torch' (FARANDOLE_ENGINE=torch)."
            )


@dataclass(frozen=True)
class _Own:
    """What a rank offers to the others."""

    arena: Arena
    descriptor: int
    counter: Counter


def _make(seat: Seat, held: contextlib.ExitStack) -> tuple[_Own | None, dict[str, Any]]:
    """This rank's window, and what to tell of it. ``held`` closes what must be closed."""
    nonce = secrets.token_bytes(16)
    length = window_size()
    try:
        libc.require()
        descriptor, reserve = new_file()
        held.callback(os.close, descriptor)
        os.ftruncate(descriptor, length)
        arena = Arena(descriptor, length, reserve)
        arena.reserve_slots(MOST_CHUNK)
        counter = Counter(descriptor)
        held.callback(counter.close)
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return None, {"problem": f"cannot make shared memory ({error})"}
    arena.nonce = nonce
    for rank in range(seat.size):
        libc.sem_init(arena.flag(rank), 1, 0)
    return _Own(arena, descriptor, counter), {
        "layout": LAYOUT,
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        "namespace": namespace,
        "pid": os.getpid(),
        "witnesses": witnesses(),
        "descriptor": descriptor,
        "length": length,
        "nonce": nonce.hex(),
        "cores": sorted(os.sched_getaffinity(0)),
        "ticket": counter.ticket,
    }


def new_file() -> tuple[int, Reserve | None]:
    """A descriptor of memory without a name, and how to be sure of room if that is limited."""
    try:
        return os.memfd_create("farandole", os.MFD_CLOEXEC), None
    except OSError:  # the system does not have it, or forbids it
        flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open("/dev/shm", flags, 0o600)
        return descriptor, functools.partial(os.posix_fallocate, descriptor)


def _unlike(offer: dict[str, Any], first: dict[str, Any]) -> str:
    """Why the rank with ``offer`` cannot share memory with the first one."""
    if "problem" in offer:
        return str(offer["problem"])
    for key, what in _ALIKE.items():
        if offer[key] != first.get(key, offer[key]):
            return f"has another {what} than rank 0 of it"
    return ""


def _reach(
    meeting: _Meeting, own: _Own, offers: Sequence[dict[str, Any]], held: contextlib.ExitStack
) -> tuple[list[Arena], dict[int, list[int]], str]:
    """The ranks' windows, the pidfds of the other ranks, and what went wrong, if anything did."""
    seat = meeting.seat
    arenas: list[Arena] = [own.arena] * seat.size
    pidfds: dict[int, list[int]] = {}
    descriptors: dict[int, int] = {}
    for rank, offer in enumerate(offers):
        if rank != seat.rank:
            with contextlib.suppress(OSError):
                descriptors[rank] = open_by_proc(offer["pid"], offer["descriptor"])
    try:
        descriptors |= _ask_for_the_rest(meeting, own.counter, offers, descriptors)
        for rank, descriptor in descriptors.items():
            pidfds[rank] = watch(offers[rank]["pid"], offers[rank]["witnesses"])
            for pidfd in pidfds[rank]:
                held.callback(os.close, pidfd)
            arenas[rank] = _map(descriptor, offers[rank])
    except FarandoleError:  # of the exchanges; some are kinds of OSError
        raise
    except OSError as error:
        return arenas, pidfds, f"cannot reach the memory of another ({error})"
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return arenas, pidfds, ""


def open_by_proc(pid: int, descriptor: int) -> int:
    """What process ``pid`` has open as ``descriptor``, opened here too."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _ask_for_the_rest(
    meeting: _Meeting,
    counter: Counter,
    offers: Sequence[dict[str, Any]],
    have: Collection[int],
) -> dict[int, int]:
    """Descriptors of the ranks that this one does not ``have``, from those ranks themselves.

    All say whom they need, so all know how many will come to them; nobody waits for ranks that
    could not come.
    """
    seat = meeting.seat
    need = [rank for rank in range(seat.size) if rank != seat.rank and rank not in have]
    needs = [json.loads(text) for text in meeting.exchange("needs", json.dumps(need))]
    if not any(needs):
        return {}
    with contextlib.ExitStack() as asking:
        questions: dict[int, socket.socket] = {}
        problem = ""
        try:
            for rank in need:
                questions[rank] = asking.enter_context(ask(offers[rank]["ticket"]))
        except OSError as error:
            problem = f"can neither open the memory of another nor ask for it ({error})"
        meeting.refuse(meeting.exchange("asked", problem))
        counter.serve(sum(seat.rank in each for each in needs), seat.deadline)
        return {rank: receive(question, seat.deadline) for rank, question in questions.items()}


def _map(descriptor: int, offer: dict[str, Any]) -> Arena:
    """The window that another rank offers. Raises ``OSError`` if it is something else."""
    length = offer["length"]
    if os.fstat(descriptor).st_size == length:
        arena = Arena(descriptor, length)
        if arena.nonce.hex() == offer["nonce"]:
            return arena
    raise OSError("what is there is not what was offered")
