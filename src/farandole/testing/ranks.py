"""Ranks to try things with: threads of this process, or real processes.

Both run ``fn(rank)`` once per rank, with the rank's place where ``init()`` looks for it, and stop
everything at a deadline. Threads are quick and easy to debug; processes can also die.

Example::

    def average(rank):
        hvd.init()
        return hvd.allreduce(torch.tensor([float(rank)])).item()

    assert run_threads(2, average) == [0.5, 0.5]
    assert run_processes(2, average) == [0.5, 0.5]

The ``*_outcomes`` forms return how each rank ended and never raise for a rank's failure::

    first, second = process_outcomes(2, lambda rank: os.kill(os.getpid(), 9) if rank else "alive")
    assert first.value == "alive"
    assert second.signal == 9
"""

from __future__ import annotations

import contextvars
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from farandole.comm.engines.base import Seat
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings, environment
from farandole.core.errors import UsageError
from farandole.core.secret import Secret
from farandole.core.store import LocalStore, Store, StoreClient, StoreServer
from farandole.core.topology import Assigned, Placement, assigned, find_placement, host_identity
from farandole.testing import forker
from farandole.testing.outcome import Outcome, RanksFailed

T = TypeVar("T")


def run_threads(size: int, fn: Callable[[int], T], timeout: float = 60.0) -> list[T]:
    """Run ``fn(rank)`` on ``size`` threads of this process; what each returned, by rank.

    Raises ``RanksFailed`` when a rank raised or still ran after ``timeout`` seconds (such a
    thread cannot be stopped and is left behind).
    """
    return _values(thread_outcomes(size, fn, timeout))


def run_processes(size: int, fn: Callable[[int], T], timeout: float = 60.0) -> list[T]:
    """Run ``fn(rank)`` in ``size`` new processes; what each returned, by rank.

    ``fn`` and what it returns travel by cloudpickle. The processes have this one's environment,
    working directory and import path, torch already imported, one thread each, and are leaders
    of sessions of their own. None of them survives the call.

    Raises ``RanksFailed`` when a rank raised, died, or still ran after ``timeout`` seconds.
    """
    return _values(process_outcomes(size, fn, timeout))


def thread_outcomes(size: int, fn: Callable[[int], T], timeout: float = 60.0) -> list[Outcome[T]]:
    """As :func:`run_threads`, but says how each rank ended."""
    store = LocalStore()
    secret = Secret.new()
    ended: dict[int, Outcome[T]] = {}

    def be(rank: int) -> None:
        placement = Placement(
            rank=rank, size=size, local_rank=rank, local_size=size,
            source="farandole", job="threads", coordinator=None,
        )  # fmt: skip
        assigned.set(Assigned(placement=placement, store=store, secret=secret, engine="threads"))
        try:
            ended[rank] = Outcome(rank=rank, finished=True, value=fn(rank))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
            text = traceback.format_exc()
            ended[rank] = Outcome(rank=rank, finished=False, error=error, traceback=text)

    threads = [
        threading.Thread(
            target=contextvars.Context().run, args=(be, rank), name=f"rank-{rank}", daemon=True
        )
        for rank in range(size)
    ]
    deadline = Deadline.after(timeout)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.remaining())
    stacks = {rank: _stack(threads[rank]) for rank in range(size) if threads[rank].is_alive()}
    return [
        ended.get(rank)
        or Outcome(rank=rank, finished=False, timed_out=True, stacks=stacks.get(rank, ""))
        for rank in range(size)
    ]


def process_outcomes(size: int, fn: Callable[[int], T], timeout: float = 60.0) -> list[Outcome[T]]:
    """As :func:`run_processes`, but says how each rank ended."""
    secret = Secret.new()
    server = StoreServer(secret)
    try:
        environments = [
            {
                **environment(),
                "FARANDOLE_RANK": str(rank),
                "FARANDOLE_SIZE": str(size),
                "FARANDOLE_LOCAL_RANK": str(rank),
                "FARANDOLE_LOCAL_SIZE": str(size),
                "FARANDOLE_STORE": str(server.address),
                "FARANDOLE_SECRET": secret.hex(),
            }
            for rank in range(size)
        ]
        return forker.run(environments, fn, timeout)
    finally:
        server.close()


def take_seat(channel: str = "test", *, device: str = "cpu", timeout: float = 30.0) -> Seat:
    """A seat in ``channel`` for the rank that calls, to open an engine with.

    Works inside ``fn`` in threads and processes. Each call in a process connects to the job's
    store anew; the connection ends with the process.

    Example::

        engine = registry.opener("torch")(take_seat("gradients"))
    """
    store: Store
    place = assigned.get()
    if place is None:
        settings = Settings.from_environment()
        placement = find_placement(environment())
        if settings.store_address is None or settings.secret is None:
            raise UsageError(
                "take_seat() is for functions that run_processes() or run_threads() runs."
            )
        address = Address.parse(settings.store_address)
        store = StoreClient(address, settings.secret, Deadline.after(timeout))
    else:
        placement, store = place.placement, place.store
    return Seat(
        rank=placement.rank,
        size=placement.size,
        channel=channel,
        store=store,
        device=torch.device(device),
        hosts=(host_identity(),) * placement.size,
        address="127.0.0.1",
        deadline=Deadline.after(timeout),
    )


def _values(outcomes: list[Outcome[T]]) -> list[T]:
    if not all(outcome.finished and not outcome.timed_out for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))
