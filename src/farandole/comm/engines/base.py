"""The contract of an engine: it moves the bytes of one channel of one group.

An engine knows nothing of names, headers, shapes or averages: it gets flat tensors that all ranks
have already agreed on. What every implementation owes is written here and checked by
``farandole.testing.engine_contract``.

Guarantees
    *Order.* Every rank begins the same operations on one engine in the same order; an engine pairs
    them by that order. Two engines are independent of each other, also between the same ranks.

    *Asynchrony.* A verb returns at once with a :class:`Work`; several may be in flight. The
    tensors belong to the engine until that work is done.

    *Equality.* After a reduction every rank holds bitwise the same values.

    *Streams.* For CUDA tensors a verb begins after what the caller's current stream has queued so
    far, and :meth:`Work.wait` makes the then current stream wait; neither blocks the host for
    longer than the launch takes.

    *Failure.* Nothing hangs: when :meth:`Engine.abort` was called, every pending and every later
    operation raises. When a peer vanished, the ranks that find it gone do the same, and so do the
    others as soon as those have; a rank that finds nothing out, since it begins nothing, delays
    that, so who learns of a loss by other means aborts. The engine is of no more use then.

Verbs are called by one thread at a time (the channel's); ``abort`` may come from any thread.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from farandole.core.clock import Deadline
from farandole.core.errors import FarandoleError
from farandole.core.store import Store

if TYPE_CHECKING:
    from farandole.comm.codec import Exchange

REDUCIBLE: frozenset[torch.dtype] = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""The dtypes an engine reduces. ``comm.dtypes`` carries every other dtype in one of these."""


class Reduction(enum.Enum):
    """How an engine combines elements. Averages and scaling are made of these above it."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank's place in a channel: all that an engine needs in order to open."""

    rank: int
    """This rank's index within the channel's ranks."""
    size: int
    channel: str
    """Unique among all channels of the job and its generations; part of every key."""
    store: Store
    """Shared by the ranks, and open for as long as the engine."""
    device: torch.device
    """The device type (and index) whose tensors the channel carries."""
    hosts: tuple[str, ...]
    """An identity of the machine of each rank of the channel: equal means same machine."""
    address: str
    """The local address that the other ranks can reach; ``127.0.0.1`` when all share a host."""
    deadline: Deadline
    """By when opening must succeed."""
    reduce_by_stages: bool | None = None
    """For who chooses among engines: whether reductions between hosts go in stages inside and
    across them; ``None``: if it pays."""
    move_by_stages: bool | None = None
    """The same for allgathers and broadcasts."""


class Work(ABC):
    """An operation in flight."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (``None``: until it ends) and say whether it is done.

        Raises what the operation failed with: the error given to :meth:`Engine.abort`, or
        ``PeerLost`` when the transport broke. May be called again after ``False``.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`wait` would return or raise without blocking."""


class Engine(ABC):
    """One channel between the ranks of a group. All tensors are flat and contiguous.

    Every verb takes tensors on the seat's device. Counts are numbers of elements and may be 0.
    """

    name: ClassVar[str]

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    @abstractmethod
    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """Replace ``buffer`` (dtype in :data:`REDUCIBLE`, same length everywhere) by the result."""

    @abstractmethod
    def reducescatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> Work:
        """Reduce ``source`` (length ``sum(counts)``) and leave this rank's part in ``output``.

        ``counts[r]`` elements go to rank r; ``output`` has ``counts[rank]``.
        """

    @abstractmethod
    def allgather(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> Work:
        """Concatenate the ranks' ``source`` (``counts[r]`` elements of any one dtype)."""

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """Replace ``buffer`` by that of rank ``root`` of the channel (any one dtype)."""

    @abstractmethod
    def alltoall(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Work:
        """Send ``source_counts[r]`` elements to rank r, receive ``output_counts[r]`` from it."""

    @abstractmethod
    def barrier(self) -> Work:
        """Done when every rank has called it."""

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros that this engine moves without a copy, where it can.

        Verbs take any tensor; this one, or a contiguous part of it, they may move in place. It
        stays valid for as long as it lives, also after :meth:`close`. Each rank asks for as many
        as it likes.
        """
        return torch.zeros(length, dtype=dtype, device=self.seat.device)

    def sum_encoded(self, buffer: torch.Tensor, exchange: Exchange) -> Work:
        """Replace ``buffer`` (floating-point) by the sum, as ``exchange`` sends and knows it.

        Waited for in the same order on all ranks: its later operations begin in that.
        """
        return exchange.sum(buffer, self)

    @abstractmethod
    def abort(self, error: FarandoleError) -> None:
        """Make pending and later operations raise ``error`` soon. Any thread; the first call wins.

        Blocked waits return within 0.1 s.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up sockets, threads and memory. Pending work is aborted. Idempotent."""


Opener = Callable[[Seat], Engine]
"""What ``engines.registry`` finds by name: opens a channel, collectively over its ranks."""
