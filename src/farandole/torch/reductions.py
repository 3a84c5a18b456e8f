"""Allreduce and reducescatter in all their forms; see :mod:`farandole.torch.collectives`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from farandole.comm.ops import Op
from farandole.core.errors import UsageError
from farandole.precision.int8 import Int8
from farandole.torch import differentiable, quantized
from farandole.torch.compression import Compressing, Compression, Compressor, is_simple, name_of
from farandole.torch.differentiable import record
from farandole.torch.handles import register
from farandole.torch.process_sets import ProcessSet, global_process_set


def chosen_op(op: Op | int | None, average: bool | None = None) -> Op:
    """The operation that ``op`` and its old form ``average`` ask for."""
    if average is not None:
        if op is not None:
            raise UsageError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return Op.AVERAGE if average else Op.SUM
    try:
        return Op.AVERAGE if op is None else Op(op)
    except ValueError:
        raise UsageError(
            f"op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}."
        ) from None


def _compressed(
    tensors: Sequence[Tensor],
    compression: Compressing,
    reduce: Callable[[list[Tensor]], Sequence[Tensor]],
) -> list[Tensor]:
    if not is_simple(compression):
        raise UsageError(
            f"Compression.{name_of(compression)} is not for single tensors: it sends the rest of a "
            "gradient in later steps. Use it with DistributedOptimizer, and here none, fp16, bf16 "
            "or, for an allreduce, int8."
        )
    compressor = cast(type[Compressor], compression)
    pairs = [compressor.compress(tensor) for tensor in tensors]
    reduced = reduce([travels for travels, _ in pairs])
    return [
        compressor.decompress(each, context)
        for each, (_, context) in zip(reduced, pairs, strict=True)
    ]


def _is_quantized(compression: Compressing, tensors: Sequence[Tensor]) -> bool:
    if not isinstance(compression, Int8):
        return False
    if not tensors or not all(
        isinstance(each, Tensor) and each.is_floating_point() for each in tensors
    ):
        raise UsageError("Compression.int8 is for floating-point tensors; send others without it.")
    return True


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The ranks' tensors combined element by element; the same on every rank.

    ``tensor`` has the same shape and dtype on all ranks: any numeric dtype, and bool with ``Min``,
    ``Max`` and ``Product``; floating point for ``Adasum``, which needs a power of two of ranks.
    ``op`` is ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``;
    ``average`` is its old form. Elements are multiplied by ``prescale_factor`` before and by
    ``postscale_factor`` after; integer averages truncate toward zero. ``name`` pairs the ranks'
    calls up; calls without one pair up in their order. With ``compression`` the tensor travels
    smaller and less precise: ``Compression.fp16``, ``bf16``, or for floating-point sums and
    averages ``int8``, whose sum is off by at most 1/254 of the largest of 256 numbers, for each
    rank's and for the sum's.

    Raises as said at the top of :mod:`farandole.torch.collectives`.

    Example::

        loss = hvd.allreduce(loss, name="loss")
        correct = hvd.allreduce(torch.tensor(correct), op=hvd.Sum)
    """
    how, scales = chosen_op(op, average), (prescale_factor, postscale_factor)
    group = process_set.group()
    if _is_quantized(compression, [tensor]):
        return quantized.allreduce(group, how, scales, name, [tensor])[0]

    def reduce(tensors: list[Tensor]) -> Sequence[Tensor]:
        if differentiable.needs_gradient(*tensors):
            recorded: Sequence[Tensor] = record(
                differentiable.Allreduce, group, how, scales, name, False, *tensors
            )
            return recorded
        (sole,) = tensors
        return [group.allreduce(sole, op=how, prescale=scales[0], postscale=scales[1], name=name)]

    return _compressed([tensor], compression, reduce)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce` that returns a handle at once.

    Example::

        handle = hvd.allreduce_async(loss)
        ...
        loss = hvd.synchronize(handle)
    """
    return register(
        process_set.group().allreduce_async(
            tensor,
            op=chosen_op(op, average),
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
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """:func:`allreduce` that writes the result into ``tensor``, and returns it.

    Not recorded by autograd. An expanded tensor raises ``UsageError``.

    Example::

        hvd.allreduce_(running_mean)
    """
    return process_set.group().allreduce(
        tensor,
        op=chosen_op(op, average),
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
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce_` that returns a handle at once.

    Example::

        handle = hvd.allreduce_async_(running_mean)
        ...
        hvd.synchronize(handle)
    """
    return register(
        process_set.group().allreduce_async(
            tensor,
            op=chosen_op(op, average),
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
    compression: Compressing = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """:func:`allreduce` of each of ``tensors``, which travel together: one wait for all.

    ``tensors`` are on one device and not empty; dtypes and shapes may differ within the list.

    Example::

        loss, accuracy = hvd.grouped_allreduce([loss, accuracy])
    """
    how, scales = chosen_op(op, average), (prescale_factor, postscale_factor)
    group = process_set.group()
    if _is_quantized(compression, tensors):
        return quantized.allreduce(group, how, scales, name, tensors)

    def reduce(tensors: list[Tensor]) -> Sequence[Tensor]:
        if differentiable.needs_gradient(*tensors):
            recorded: Sequence[Tensor] = record(
                differentiable.Allreduce, group, how, scales, name, True, *tensors
            )
            return recorded
        return group.grouped_allreduce(
            tensors, op=how, prescale=scales[0], postscale=scales[1], name=name
        )

    return _compressed(tensors, compression, reduce)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_allreduce_async([loss, accuracy])
        ...
        loss, accuracy = hvd.synchronize(handle)
    """
    return register(
        process_set.group().grouped_allreduce_async(
            tensors,
            op=chosen_op(op, average),
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
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """:func:`grouped_allreduce` that writes the results into ``tensors``, and returns them.

    Example::

        hvd.grouped_allreduce_([running_mean, running_var])
    """
    return process_set.group().grouped_allreduce(
        tensors,
        op=chosen_op(op, average),
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
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce_` that returns a handle at once; its result is a tuple.

    Example::

        handle = hvd.grouped_allreduce_async_([running_mean, running_var])
        ...
        hvd.synchronize(handle)
    """
    return register(
        process_set.group().grouped_allreduce_async(
            tensors,
            op=chosen_op(op, average),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
            inplace=True,
        ),
        tuple,
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of what :func:`allreduce` would return.

    The first dimension is dealt out as evenly as possible, the remainder to the lowest ranks.
    ``op`` is anything but ``Adasum``. Shapes and dtypes are equal on all ranks. A tensor without
    dimensions raises ``UsageError``.

    Example::

        mine = hvd.reducescatter(table, op=hvd.Sum)
    """
    how, scales = chosen_op(op), (prescale_factor, postscale_factor)
    group = process_set.group()

    def reduce(tensors: list[Tensor]) -> Sequence[Tensor]:
        if differentiable.needs_gradient(*tensors):
            recorded: Sequence[Tensor] = record(
                differentiable.Reducescatter, group, how, scales, name, False, *tensors
            )
            return recorded
        (sole,) = tensors
        return [
            group.reducescatter(sole, op=how, prescale=scales[0], postscale=scales[1], name=name)
        ]

    return _compressed([tensor], compression, reduce)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
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
        process_set.group().reducescatter_async(
            tensor,
            op=chosen_op(op),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
        )
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """:func:`reducescatter` of each of ``tensors``, which travel together.

    Example::

        first, second = hvd.grouped_reducescatter([first, second], op=hvd.Sum)
    """
    how, scales = chosen_op(op), (prescale_factor, postscale_factor)
    group = process_set.group()

    def reduce(tensors: list[Tensor]) -> Sequence[Tensor]:
        if differentiable.needs_gradient(*tensors):
            recorded: Sequence[Tensor] = record(
                differentiable.Reducescatter, group, how, scales, name, True, *tensors
            )
            return recorded
        return group.grouped_reducescatter(
            tensors, op=how, prescale=scales[0], postscale=scales[1], name=name
        )

    return _compressed(tensors, compression, reduce)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
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
        process_set.group().grouped_reducescatter_async(
            tensors,
            op=chosen_op(op),
            prescale=prescale_factor,
            postscale=postscale_factor,
            name=name,
        ),
        tuple,
    )
