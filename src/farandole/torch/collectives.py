"""The collectives, with Horovod's names and signatures.

All ranks call the same collectives in the same order. Calls that do not fit each other raise the
same ``MismatchError`` on every rank, and the job stays usable; a lost rank raises ``PeerLost``, a
missing one ``StallError``; all three are a ``HorovodInternalError``. Arguments that cannot work
raise ``UsageError``, a ``ValueError``, on the calling rank at once, and before ``init()``
``NotInitializedError``, a ``ValueError`` too.

Tensors may have any dense layout, and be on the CPU or a GPU. Results are new tensors. The waiting
forms are differentiable (see :mod:`farandole.torch.differentiable`); the ``_async`` forms are not,
and what they were given must not be changed before ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farandole.comm.ops import Op
from farandole.core.errors import UsageError
from farandole.torch import differentiable
from farandole.torch.differentiable import record
from farandole.torch.handles import register
from farandole.torch.session import current

Splits = Sequence[int] | Tensor


def _op(op: Op | int | None, average: bool | None) -> Op:
    if average is not None:
        if op is not None:
            raise UsageError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return Op.AVERAGE if average else Op.SUM
    try:
        return Op.AVERAGE if op is None else Op(op)
    except ValueError:
        raise UsageError(f"op must be Average, Sum, Min, Max or Product, not {op!r}.") from None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The ranks' tensors combined element by element; the same on every rank.

    ``tensor`` has the same shape and dtype on all ranks: any numeric dtype, and bool with ``Min``,
    ``Max`` and ``Product``. ``op`` is ``Average`` (default), ``Sum``, ``Min``, ``Max`` or
    ``Product``; ``average`` is its old form. Elements are multiplied by ``prescale_factor`` before
    and by ``postscale_factor`` after; integer averages truncate toward zero. ``name`` is for
    messages, and must be the same on all ranks.

    Raises as said at the top of this module.

    Example::

        loss = hvd.allreduce(loss, name="loss")
        correct = hvd.allreduce(torch.tensor(correct), op=hvd.Sum)
    """
    group = current()
    how, scales = _op(op, average), (prescale_factor, postscale_factor)
    if differentiable.needs_gradient(tensor):
        reduced: Tensor = record(differentiable.Allreduce, group, how, scales, name, False, tensor)[
            0
        ]
        return reduced
    return group.allreduce(tensor, op=how, prescale=scales[0], postscale=scales[1], name=name)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`allreduce` that returns a handle at once.

    Example::

        handle = hvd.allreduce_async(loss)
        ...
        loss = hvd.synchronize(handle)
    """
    return register(
        current().allreduce_async(
            tensor,
            op=_op(op, average),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
        )
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """:func:`allreduce` that writes the result into ``tensor``, and returns it.

    Not recorded by autograd. An expanded tensor raises ``UsageError``.

    Example::

        hvd.allreduce_(running_mean)
    """
    return current().allreduce(
        tensor,
        op=_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        inplace=True,
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`allreduce_` that returns a handle at once.

    Example::

        handle = hvd.allreduce_async_(running_mean)
        ...
        hvd.synchronize(handle)
    """
    return register(
        current().allreduce_async(
            tensor,
            op=_op(op, average),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
            inplace=True,
        )
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """:func:`allreduce` of each of ``tensors``, which travel together: one wait for all.

    ``tensors`` are on one device and not empty; dtypes and shapes may differ within the list.

    Example::

        loss, accuracy = hvd.grouped_allreduce([loss, accuracy])
    """
    group = current()
    how, scales = _op(op, average), (prescale_factor, postscale_factor)
    if differentiable.needs_gradient(*tensors):
        return list(record(differentiable.Allreduce, group, how, scales, name, True, *tensors))
    return group.grouped_allreduce(
        tensors, op=how, prescale=scales[0], postscale=scales[1], name=name
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`grouped_allreduce` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_allreduce_async([loss, accuracy])
        ...
        loss, accuracy = hvd.synchronize(handle)
    """
    return register(
        current().grouped_allreduce_async(
            tensors,
            op=_op(op, average),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
        ),
        tuple,
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """:func:`grouped_allreduce` that writes the results into ``tensors``, and returns them.

    Example::

        hvd.grouped_allreduce_([running_mean, running_var])
    """
    return current().grouped_allreduce(
        tensors,
        op=_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        inplace=True,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`grouped_allreduce_` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_allreduce_async_([running_mean, running_var])
        ...
        hvd.synchronize(handle)
    """
    return register(
        current().grouped_allreduce_async(
            tensors,
            op=_op(op, average),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
            inplace=True,
        ),
        tuple,
    )


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The ranks' tensors one after the other along the first dimension.

    The first dimension may differ between ranks, and be 0; the others, and the dtype (any), are
    equal. A tensor without dimensions raises ``UsageError``.

    Example::

        predictions = hvd.allgather(predictions)
    """
    group = current()
    if differentiable.needs_gradient(tensor):
        gathered: Tensor = record(differentiable.Allgather, group, name, False, tensor)[0]
        return gathered
    return group.allgather(tensor, name=name)


def allgather_async(tensor: Tensor, name: str | None = None) -> int:
    """:func:`allgather` that returns a handle at once.

    Example::

        handle = hvd.allgather_async(predictions)
        ...
        predictions = hvd.synchronize(handle)
    """
    return register(current().allgather_async(tensor, name=name))


def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
    """:func:`allgather` of each of ``tensors``, which travel together.

    Example::

        predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    group = current()
    if differentiable.needs_gradient(*tensors):
        return list(record(differentiable.Allgather, group, name, True, *tensors))
    return group.grouped_allgather(tensors, name=name)


def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None) -> int:
    """:func:`grouped_allgather` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_allgather_async([predictions, labels])
        ...
        predictions, labels = hvd.synchronize(handle)
    """
    return register(current().grouped_allgather_async(tensors, name=name), tuple)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The tensor of rank ``root_rank``, on every rank; shapes and dtypes (any) are equal.

    A ``root_rank`` that does not exist raises ``UsageError``.

    Example::

        order = hvd.broadcast(torch.randperm(1000), root_rank=0)
    """
    group = current()
    if differentiable.needs_gradient(tensor):
        received: Tensor = record(differentiable.Broadcast, group, root_rank, name, tensor)
        return received
    return group.broadcast(tensor, root=root_rank, name=name)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """:func:`broadcast` that returns a handle at once.

    Example::

        handle = hvd.broadcast_async(order, root_rank=0)
        ...
        order = hvd.synchronize(handle)
    """
    return register(current().broadcast_async(tensor, root=root_rank, name=name))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """:func:`broadcast` that writes into ``tensor``, and returns it. Not recorded by autograd.

    Example::

        hvd.broadcast_(model.weight.data, root_rank=0)
    """
    return current().broadcast(tensor, root=root_rank, name=name, inplace=True)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """:func:`broadcast_` that returns a handle at once.

    Example::

        handle = hvd.broadcast_async_(model.weight.data, root_rank=0)
        ...
        hvd.synchronize(handle)
    """
    return register(current().broadcast_async(tensor, root=root_rank, name=name, inplace=True))


def alltoall(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None
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
    group = current()
    if differentiable.needs_gradient(tensor):
        received, counts = record(differentiable.Alltoall, group, splits, name, tensor)
    else:
        received, counts = group.alltoall(tensor, splits, name=name)
    return received if splits is None else (received, counts)


def alltoall_async(tensor: Tensor, splits: Splits | None = None, name: str | None = None) -> int:
    """:func:`alltoall` that returns a handle at once; its result is always rows and counts.

    Example::

        handle = hvd.alltoall_async(rows)
        ...
        rows, counts = hvd.synchronize(handle)
    """
    return register(current().alltoall_async(tensor, splits, name=name))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of what :func:`allreduce` would return.

    The first dimension is dealt out as evenly as possible, the remainder to the lowest ranks.
    ``op`` is ``Average`` or ``Sum``. Shapes and dtypes are equal on all ranks. A tensor without
    dimensions raises ``UsageError``.

    Example::

        mine = hvd.reducescatter(table, op=hvd.Sum)
    """
    group = current()
    how, scales = _op(op, None), (prescale_factor, postscale_factor)
    if differentiable.needs_gradient(tensor):
        parts = record(differentiable.Reducescatter, group, how, scales, name, False, tensor)
        part: Tensor = parts[0]
        return part
    return group.reducescatter(tensor, op=how, prescale=scales[0], postscale=scales[1], name=name)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter` that returns a handle at once.

    Example::

        handle = hvd.reducescatter_async(table, op=hvd.Sum)
        ...
        mine = hvd.synchronize(handle)
    """
    return register(
        current().reducescatter_async(
            tensor,
            op=_op(op, None),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
        )
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """:func:`reducescatter` of each of ``tensors``, which travel together.

    Example::

        first, second = hvd.grouped_reducescatter([first, second], op=hvd.Sum)
    """
    group = current()
    how, scales = _op(op, None), (prescale_factor, postscale_factor)
    if differentiable.needs_gradient(*tensors):
        return list(record(differentiable.Reducescatter, group, how, scales, name, True, *tensors))
    return group.grouped_reducescatter(
        tensors, op=how, prescale=scales[0], postscale=scales[1], name=name
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`grouped_reducescatter` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_reducescatter_async([first, second], op=hvd.Sum)
        ...
        first, second = hvd.synchronize(handle)
    """
    return register(
        current().grouped_reducescatter_async(
            tensors,
            op=_op(op, None),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
        ),
        tuple,
    )


def barrier() -> None:
    """Wait until every rank has called it. Asynchronous collectives in flight may go on.

    Example::

        hvd.barrier()
    """
    current().barrier()
