"""Allreduce of a sparse tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farandole.comm.ops import Op
from farandole.core.errors import UsageError, UsageTypeError
from farandole.torch.process_sets import ProcessSet, global_process_set
from farandole.torch.reductions import chosen_op


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """:func:`allreduce` of a sparse (COO) tensor, of which only the rows there are travel.

    ``tensor`` has the same shape, dtype (any numeric one) and sparse dimensions on all ranks, and
    any number of entries, also none. ``op`` is ``Average`` (default) or ``Sum``. Returns a function
    that waits and returns the result: a sparse tensor with the entries of all ranks, uncoalesced.
    (``poll`` and ``synchronize`` do not take it; that is as in Horovod.)

    Raises ``UsageError`` for another ``op``, ``UsageTypeError`` for what is not a sparse tensor,
    and as collectives do.

    Example::

        wait = hvd.sparse_allreduce_async(embedding.weight.grad, name="embedding", op=hvd.Sum)
        ...
        gradient = wait()
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UsageTypeError(
            f"sparse_allreduce_async takes a sparse COO tensor, not {kind}. Use allreduce_async "
            "for a dense one."
        )
    how = chosen_op(op)
    if how not in (Op.AVERAGE, Op.SUM):
        raise UsageError(f"sparse_allreduce_async adds: op is Average or Sum, not {how.label}.")
    group = process_set.group()
    mine = tensor.detach().coalesce()
    indices = group.allgather_async(
        mine.indices().t().contiguous(), name=None if name is None else f"{name}.indices"
    )
    values = group.allgather_async(mine.values(), name=None if name is None else f"{name}.values")

    def wait() -> Tensor:
        rows = values.wait()
        if how is Op.AVERAGE:
            rows = rows / group.size
        # The invariants are checked, since another rank's tensor may be larger than this one.
        where = indices.wait().t()
        return torch.sparse_coo_tensor(where, rows, tensor.shape, check_invariants=True)

    return wait
