"""The collectives, with Horovod's names and signatures.

Here are those that move data; :mod:`farandole.torch.reductions` has those that compute.

The ranks' calls of one kind and ``name`` pair up, in whatever order each rank makes them; calls
without a name pair up with each other, in their order. The same name may be used again once the
data of the collective before has moved, else ``UsageError``. Calls that do not fit each other raise
the same ``MismatchError`` on every rank, and the job stays usable; a lost rank raises ``PeerLost``,
a missing one ``StallError``; all three are a ``HorovodInternalError``. Arguments that cannot work
raise ``UsageError``, a ``ValueError``, on the calling rank at once, and before ``init()``
``NotInitializedError``, a ``ValueError`` too.

Tensors may have any dense layout, and be on the CPU or a GPU. Results are new tensors. The waiting
forms are differentiable (see :mod:`farandole.torch.differentiable`); the ``_async`` forms are not,
and what they were given must not be changed before ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farandole.torch import differentiable
from farandole.torch.differentiable import record
from farandole.torch.handles import register
from farandole.torch.process_sets import ProcessSet, global_process_set, root_within

Splits = Sequence[int] | Tensor


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The ranks' tensors one after the other along the first dimension.

    The first dimension may differ between ranks, and be 0; the others, and the dtype (any), are
    equal. A tensor without dimensions raises ``UsageError``.

    Example::

        predictions = hvd.allgather(predictions)
    """
    group = process_set.group()
    if differentiable.needs_gradient(tensor):
        gathered: Tensor = record(differentiable.Allgather, group, name, False, tensor)[0]
        return gathered
    return group.allgather(tensor, name=name)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`allgather` that returns a handle at once.

    Example::

        handle = hvd.allgather_async(predictions)
        ...
        predictions = hvd.synchronize(handle)
    """
    return register(process_set.group().allgather_async(tensor, name=name))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """:func:`allgather` of each of ``tensors``, which travel together.

    Example::

        predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    group = process_set.group()
    if differentiable.needs_gradient(*tensors):
        return list(record(differentiable.Allgather, group, name, True, *tensors))
    return group.grouped_allgather(tensors, name=name)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`grouped_allgather` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_allgather_async([predictions, labels])
        ...
        predictions, labels = hvd.synchronize(handle)
    """
    return register(process_set.group().grouped_allgather_async(tensors, name=name), tuple)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The tensor of rank ``root_rank``, on every rank; shapes and dtypes (any) are equal.

    ``root_rank`` is a global rank, also within a process set; one that does not take part raises
    ``UsageError``.

    Example::

        order = hvd.broadcast(torch.randperm(1000), root_rank=0)
    """
    group = process_set.group()
    root = root_within(group, root_rank)
    if differentiable.needs_gradient(tensor):
        received: Tensor = record(differentiable.Broadcast, group, root, name, tensor)
        return received
    return group.broadcast(tensor, root=root, name=name)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast` that returns a handle at once.

    Example::

        handle = hvd.broadcast_async(order, root_rank=0)
        ...
        order = hvd.synchronize(handle)
    """
    group = process_set.group()
    root = root_within(group, root_rank)
    return register(group.broadcast_async(tensor, root=root, name=name))


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """:func:`broadcast` that writes into ``tensor``, and returns it. Not recorded by autograd.

    Example::

        hvd.broadcast_(model.weight.data, root_rank=0)
    """
    group = process_set.group()
    return group.broadcast(tensor, root=root_within(group, root_rank), name=name, inplace=True)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast_` that returns a handle at once.

    Example::

        handle = hvd.broadcast_async_(model.weight.data, root_rank=0)
        ...
        hvd.synchronize(handle)
    """
    group = process_set.group()
    root = root_within(group, root_rank)
    return register(group.broadcast_async(tensor, root=root, name=name, inplace=True))


def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Deal the rows of ``tensor`` out to the ranks, and return the rows received, in rank order.

    Rank r gets the first ``splits[0] … splits[r-1]`` rows left out, the next ``splits[r]``.
    ``splits`` are integers (list, tuple or tensor), one a rank; their sum may be less than the
    first dimension. Without them the first dimension must divide by the number of ranks. The other
    dimensions, and the dtype (any), are equal on all ranks.

    Returns the rows; with ``splits`` given, also how many came from each rank (int32).

    Example::

        rows, counts = hvd.alltoall(rows, splits=[3, 1])
    """
    group = process_set.group()
    if differentiable.needs_gradient(tensor):
        received, counts = record(differentiable.Alltoall, group, splits, name, tensor)
    else:
        received, counts = group.alltoall(tensor, splits, name=name)
    return received if splits is None else (received, counts)


def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`alltoall` that returns a handle at once; its result is always rows and counts.

    Example::

        handle = hvd.alltoall_async(rows)
        ...
        rows, counts = hvd.synchronize(handle)
    """
    return register(process_set.group().alltoall_async(tensor, splits, name=name))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called it. Asynchronous collectives in flight may go on.

    Example::

        hvd.barrier()
    """
    process_set.group().barrier(name="barrier")
