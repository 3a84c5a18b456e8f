"""The collectives as methods: what every group can do.

All ranks of a group call the same methods with the same names, in any order; unnamed calls meet
in the order in which each rank makes them. A call with arguments that cannot work, or with a name
that is in use by a call whose data has not moved yet, raises ``UsageError`` on that rank at once.
Calls that do not fit each other raise the same ``MismatchError`` on every rank, and the group stays
usable.

The ``_async`` forms return a handle at once; what they were given must not be changed until the
handle was waited for. The ``grouped_`` forms take a list and carry all its tensors together: one
exchange of headers, one transfer per dtype.

Tensors may have any dense layout and be on the CPU or on CUDA, the same kind on every rank.
Results are new tensors, detached from autograd, laid out as the input where the shape allows;
``inplace=True`` writes them into the input instead and returns it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from farandole.comm.collectives.allgather import AllgatherRequest
from farandole.comm.collectives.alltoall import AlltoallRequest, Splits
from farandole.comm.collectives.barrier import BarrierRequest
from farandole.comm.collectives.broadcast import BroadcastRequest
from farandole.comm.collectives.combine import allreduce_request
from farandole.comm.collectives.reducescatter import ReducescatterRequest
from farandole.comm.collectives.request import Request, Sole, TensorRequest
from farandole.comm.handle import Handle
from farandole.comm.ops import Op
from farandole.core.errors import UsageError

ResultT = TypeVar("ResultT")


class Verbs:
    """The collectives of a group."""

    members: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.members)

    @abstractmethod
    def submit(self, request: Request[ResultT]) -> Handle[ResultT]:
        """Begin a request when all ranks have submitted it."""

    def allreduce(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
        inplace: bool = False,
    ) -> Tensor:
        """The ranks' tensors, scaled by ``prescale``, combined by ``op``, scaled by ``postscale``.

        Shapes and dtypes are equal on all ranks. Any dtype with arithmetic: bool with Min, Max
        and Product, complex with Sum, Average and Product.

        Example::

            mean = group.allreduce(loss, name="loss")
        """
        return self.allreduce_async(
            tensor, op=op, prescale=prescale, postscale=postscale, name=name, inplace=inplace
        ).wait()

    def allreduce_async(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
        inplace: bool = False,
    ) -> Handle[Tensor]:
        """:meth:`allreduce`, without waiting for it."""
        request = self._allreduce([tensor], op, prescale, postscale, name, False, inplace)
        return self.submit(Sole(request))

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
        inplace: bool = False,
    ) -> list[Tensor]:
        """:meth:`allreduce` of each of ``tensors``, together."""
        return self.grouped_allreduce_async(
            tensors, op=op, prescale=prescale, postscale=postscale, name=name, inplace=inplace
        ).wait()

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Tensor],
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
        inplace: bool = False,
    ) -> Handle[list[Tensor]]:
        """:meth:`grouped_allreduce`, without waiting for it."""
        return self.submit(self._allreduce(tensors, op, prescale, postscale, name, True, inplace))

    def _allreduce(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        prescale: float,
        postscale: float,
        name: str | None,
        grouped: bool,
        inplace: bool,
    ) -> TensorRequest[list[Tensor]]:
        return allreduce_request(
            tensors,
            op=op,
            prescale=prescale,
            postscale=postscale,
            rank=self.rank,
            size=self.size,
            name=name,
            grouped=grouped,
            inplace=inplace,
        )

    def reducescatter(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
    ) -> Tensor:
        """This rank's rows of what :meth:`allreduce` would return.

        The first dimension is dealt out as evenly as possible, the remainder to the lowest ranks.
        """
        return self.reducescatter_async(
            tensor, op=op, prescale=prescale, postscale=postscale, name=name
        ).wait()

    def reducescatter_async(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
    ) -> Handle[Tensor]:
        """:meth:`reducescatter`, without waiting for it."""
        request = self._reducescatter([tensor], op, prescale, postscale, name, False)
        return self.submit(Sole(request))

    def grouped_reducescatter(
        self,
        tensors: Sequence[Tensor],
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
    ) -> list[Tensor]:
        """:meth:`reducescatter` of each of ``tensors``, together."""
        return self.grouped_reducescatter_async(
            tensors, op=op, prescale=prescale, postscale=postscale, name=name
        ).wait()

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Tensor],
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
    ) -> Handle[list[Tensor]]:
        """:meth:`grouped_reducescatter`, without waiting for it."""
        return self.submit(self._reducescatter(tensors, op, prescale, postscale, name, True))

    def _reducescatter(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        prescale: float,
        postscale: float,
        name: str | None,
        grouped: bool,
    ) -> ReducescatterRequest:
        return ReducescatterRequest(
            tensors,
            op=op,
            prescale=prescale,
            postscale=postscale,
            rank=self.rank,
            size=self.size,
            name=name,
            grouped=grouped,
        )

    def allgather(self, tensor: Tensor, *, name: str | None = None) -> Tensor:
        """The ranks' tensors one after the other along the first dimension.

        The first dimension may differ between ranks, and be 0; the others are equal. Any dtype.
        """
        return self.allgather_async(tensor, name=name).wait()

    def allgather_async(self, tensor: Tensor, *, name: str | None = None) -> Handle[Tensor]:
        """:meth:`allgather`, without waiting for it."""
        return self.submit(Sole(AllgatherRequest([tensor], name=name, grouped=False)))

    def grouped_allgather(
        self, tensors: Sequence[Tensor], *, name: str | None = None
    ) -> list[Tensor]:
        """:meth:`allgather` of each of ``tensors``, together."""
        return self.grouped_allgather_async(tensors, name=name).wait()

    def grouped_allgather_async(
        self, tensors: Sequence[Tensor], *, name: str | None = None
    ) -> Handle[list[Tensor]]:
        """:meth:`grouped_allgather`, without waiting for it."""
        return self.submit(AllgatherRequest(tensors, name=name, grouped=True))

    def broadcast(
        self, tensor: Tensor, *, root: int = 0, name: str | None = None, inplace: bool = False
    ) -> Tensor:
        """The tensor of ``root``, a rank of this group. Shapes and dtypes are equal. Any dtype."""
        return self.broadcast_async(tensor, root=root, name=name, inplace=inplace).wait()

    def broadcast_async(
        self, tensor: Tensor, *, root: int = 0, name: str | None = None, inplace: bool = False
    ) -> Handle[Tensor]:
        """:meth:`broadcast`, without waiting for it."""
        return self.submit(Sole(self._broadcast([tensor], root, name, False, inplace)))

    def grouped_broadcast(
        self,
        tensors: Sequence[Tensor],
        *,
        root: int = 0,
        name: str | None = None,
        inplace: bool = False,
    ) -> list[Tensor]:
        """:meth:`broadcast` of each of ``tensors``, together."""
        return self.grouped_broadcast_async(tensors, root=root, name=name, inplace=inplace).wait()

    def grouped_broadcast_async(
        self,
        tensors: Sequence[Tensor],
        *,
        root: int = 0,
        name: str | None = None,
        inplace: bool = False,
    ) -> Handle[list[Tensor]]:
        """:meth:`grouped_broadcast`, without waiting for it."""
        return self.submit(self._broadcast(tensors, root, name, True, inplace))

    def _broadcast(
        self, tensors: Sequence[Tensor], root: int, name: str | None, grouped: bool, inplace: bool
    ) -> BroadcastRequest:
        if not 0 <= root < self.size:
            raise UsageError(
                f"broadcast received invalid root rank {root}: the ranks of this group are 0 to "
                f"{self.size - 1}."
            )
        return BroadcastRequest(
            tensors,
            root=root,
            root_rank=self.members[root],
            rank=self.rank,
            name=name,
            grouped=grouped,
            inplace=inplace,
        )

    def alltoall(
        self, tensor: Tensor, splits: Splits | None = None, *, name: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Send the first ``splits[0]`` rows to rank 0, the next ``splits[1]`` to rank 1, …

        ``splits`` are integers, one a rank; their sum may be less than the first dimension.
        Without them the first dimension is dealt out evenly, and must divide. Any dtype.

        Returns the rows received, in rank order, and how many came from each rank (int32, CPU).
        """
        return self.alltoall_async(tensor, splits, name=name).wait()

    def alltoall_async(
        self, tensor: Tensor, splits: Splits | None = None, *, name: str | None = None
    ) -> Handle[tuple[Tensor, Tensor]]:
        """:meth:`alltoall`, without waiting for it."""
        return self.submit(
            AlltoallRequest(tensor, splits=splits, rank=self.rank, size=self.size, name=name)
        )

    def barrier(self, *, name: str | None = None) -> None:
        """Wait until every rank has called it. Earlier asynchronous collectives may go on."""
        self.submit(BarrierRequest(name=name)).wait()
