"""CPU tensors between processes, by torch's Gloo over TCP.

What Gloo leaves to be done here:

*Interrupting.* A pending Gloo operation ends only with its timeout or with its sockets;
``ProcessGroup.abort()`` does nothing to it. So the engine holds a duplicate of each of the group's
sockets, and aborting is ``shutdown(2)`` on them: every pending operation fails within
milliseconds, here and on the other ranks. The sockets are found by the addresses that the ranks
gave each other through the store: nothing else in the process can be connected to those, however
many groups open at once. Held duplicates also mean that a descriptor's number cannot have been
reused for something else.

*Waiting with a limit.* ``Work.wait(timeout)`` of a Gloo collective that times out harms nothing:
it may be waited for again. (Not so for ``send`` and ``recv``, which are not used.) 0 means
forever there, and anything is cut to whole milliseconds.

*Closing.* The destructor of a group joins its threads, so it would block on a pending operation;
after the shutdown it takes some 10 ms. An engine that is still open when the interpreter ends is
closed first.

*Forking.* A forked child (a data-loader worker) inherits the sockets, and while it lives a peer
would not see this process die. The child therefore closes its copies at once.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import stat
import struct
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm.c10d_store import C10dStore
from farandole.comm.engines.base import Engine, Seat
from farandole.comm.engines.c10d import C10dEngine, Native, transport_text
from farandole.core import forks
from farandole.core.errors import (
    DeadlineError,
    FarandoleError,
    PeerLost,
    SetupError,
    ShutDownError,
    describe_ranks,
)

FOREVER = datetime.timedelta(days=365)
"""Gloo's own limit for an operation, so that it never acts: stalls are judged by the watch."""

SLICE = 0.25
"""Seconds between two looks at Python's signals while waiting without a limit."""

CONNECT_FACTOR = 5
"""Gloo allows this many times its timeout for a connection to come about."""


class GlooEngine(C10dEngine):
    """One rank's end of a Gloo group."""

    name = "torch"

    def __init__(self, seat: Seat, backend: Native, sockets: Mapping[int, socket.socket]) -> None:
        super().__init__(seat, backend)
        self._sockets = dict(sockets)
        _open_engines.add(self)
        forks.abandon_in_children(self)

    def _await(self, native: Native, timeout: float | None) -> bool:
        if timeout is not None and timeout < 0.001:
            if not native.is_completed():
                return False
            timeout = SLICE
        while True:
            limit = SLICE if timeout is None else timeout
            try:
                native.wait(datetime.timedelta(seconds=limit))
                return True
            except RuntimeError:
                if native.is_completed():
                    native.wait()  # raises what it failed with: above, the limit may have passed
                    return True
            if timeout is not None:
                return False

    def _is_loss(self, text: str) -> bool:
        return "/transport/" in text  # the source file that Gloo names

    def _hand_over(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Nothing to do: host memory is free when the operation has ended."""

    def _interrupt(self) -> None:
        for each in self._sockets.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _give_up(self) -> None:
        _open_engines.discard(self)
        for each in self._sockets.values():
            each.close()
        self._sockets.clear()

    def abandon(self) -> None:
        """In a forked child, let go of the parent's connections. See ``core.forks``."""
        self._failure = ShutDownError(
            f"This process was forked from rank {self.seat.rank}, and collectives belong to the "
            "rank alone. Call them in the training process, not in a data-loader worker."
        )
        for number, duplicate in self._sockets.items():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(number), os.fstat(duplicate.fileno())):
                    os.close(number)
            duplicate.close()
        # Its destructor would join threads that do not exist in this process.
        _never_destroyed.append(self._backend)


def open_gloo(seat: Seat) -> Engine:
    """Open the channel of ``seat`` over Gloo; returns when every rank has opened its end.

    Raises ``DeadlineError``, which names the ranks that did not come in time, ``PeerLost`` when
    one vanished meanwhile, and ``SetupError`` when the address cannot be listened on.
    """
    prefix = f"engine/gloo/{seat.channel}/"
    seat.store.set(f"{prefix}here/{seat.rank}", b"")
    store = C10dStore(seat.store, prefix, seat.deadline)
    try:
        backend = _connect(seat, store)
        engine = GlooEngine(seat, backend, _find_sockets(seat, store))
        try:
            if not engine.barrier().wait(seat.deadline.remaining()):
                raise DeadlineError("")
        except BaseException:
            engine.close()
            raise
    except DeadlineError:
        ranks = range(seat.size)
        late = [rank for rank in ranks if seat.store.peek(f"{prefix}here/{rank}") is None]
        limit = "" if seat.deadline.limit is None else f" within {seat.deadline.limit:g} s"
        raise DeadlineError(
            f"The channel {seat.channel!r} of {seat.size} ranks did not open{limit}: "
            + (
                f"{describe_ranks(late)} of it did not come."
                if late
                else f"all came, but could not connect. Does a firewall shut off {seat.address}?"
            ),
            ranks=late,
        ) from None
    return engine


def _connect(seat: Seat, store: C10dStore) -> Native:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    remaining = seat.deadline.remaining()
    options._timeout = (
        FOREVER if remaining is None else datetime.timedelta(seconds=remaining / CONNECT_FACTOR)
    )
    try:
        options._devices = [gloo.create_device(hostname=seat.address, lazy_init=False)]
    except RuntimeError as error:
        raise SetupError(
            f"Rank {seat.rank} cannot listen on its address {seat.address!r}: {error}. "
            "Choose a network interface of this machine with FARANDOLE_INTERFACE.",
            ranks=[seat.rank],
        ) from error
    try:
        backend = gloo(store, seat.rank, seat.size, options)
    except FarandoleError:
        raise
    except RuntimeError as error:
        if seat.deadline.expired() or "Connect timeout" in str(error):
            raise DeadlineError("") from error
        raise PeerLost(
            f"Rank {seat.rank} lost a rank of the channel {seat.channel!r} while it opened. "
            f"Look for the first rank that ended. The transport says: {transport_text(error)}"
        ) from error
    backend._set_default_timeout(FOREVER)
    return backend


def _find_sockets(seat: Seat, store: C10dStore) -> dict[int, socket.socket]:
    """Duplicates of the group's connected sockets, by the number of the original.

    Each pair of ranks has one connection, made by one of them to where the other one listens; and
    what a rank published contains the raw ``sockaddr`` on which it listens.
    """
    others = [data for data in store.received if data not in store.sent]
    numbers = []
    for number in map(int, os.listdir("/proc/self/fd")):
        ends = _ends(number)
        if ends is None:
            continue
        here, there = ends
        if any(here in data for data in store.sent) or any(there in data for data in others):
            numbers.append(number)
    # Not in the loop: a duplicate may get a number that is yet to be looked at.
    found = {number: socket.socket(fileno=os.dup(number)) for number in numbers}
    if len(found) != seat.size - 1:
        for each in found.values():
            each.close()
        raise SetupError(
            f"The Gloo of torch {torch.__version__} keeps its connections in a way that this "
            f"version of Farandole does not know (found {len(found)} of {seat.size - 1}), so it "
            "could not stop a blocked collective. Use another version of torch or Farandole."
        )
    return found


def _ends(number: int) -> tuple[bytes, bytes] | None:
    """The raw addresses of both ends of descriptor ``number``, if it is a connected TCP socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        view = socket.socket(fileno=number)
    except OSError:  # closed by another thread meanwhile
        return None
    try:
        if view.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        return _raw(view.family, view.getsockname()), _raw(view.family, view.getpeername())
    except OSError:  # listens, or is not connected
        return None
    finally:
        view.detach()


def _raw(family: int, address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """The beginning of the C ``sockaddr`` of ``address``."""
    host = socket.inet_pton(family, address[0].partition("%")[0])
    flow = b"" if family == socket.AF_INET else bytes(4)
    return struct.pack("=H", family) + struct.pack("!H", address[1]) + flow + host


_open_engines: weakref.WeakSet[GlooEngine] = weakref.WeakSet()
_never_destroyed: list[Native] = []


def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()


atexit.register(_close_all)
