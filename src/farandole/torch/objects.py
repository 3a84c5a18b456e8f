"""Objects of Python between ranks: pickled, in pieces, with 64-bit sizes.

Only ranks that have proved that they know the job's secret are in a group, so what they send may
be unpickled.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor

from farandole.comm.group import Group
from farandole.torch.process_sets import ProcessSet, global_process_set, root_within

T = TypeVar("T")

PIECE = 256 * 1024 * 1024
"""Bytes that travel at once, so that a large object needs little memory beside itself."""


def broadcast_object(
    obj: T | None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """The object of rank ``root_rank``, on every rank; the root gets back its own.

    Anything that pickles; with cloudpickle installed also lambdas and classes of the script. What
    the other ranks pass is ignored. Any size that fits into memory.

    ``root_rank`` is a global rank, also within ``process_set``.

    Raises ``UsageError`` for a ``root_rank`` that does not take part, and as collectives do.

    Example::

        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    return broadcast_in(process_set.group(), obj, root_rank, name or "broadcast_object")


def broadcast_in(group: Group, obj: T | None, root_rank: int, label: str) -> T:
    """:func:`broadcast_object` within ``group``."""
    root = root_within(group, root_rank)
    is_root = group.rank == root
    pickled = dump(obj) if is_root else bytearray()
    size = group.broadcast(
        torch.tensor(len(pickled), device="cpu"), root=root, name=f"{label}.size"
    )
    if not is_root:
        pickled = bytearray(int(size))
    for number, piece in enumerate(torch.split(_as_tensor(pickled), PIECE)):
        group.broadcast(piece, root=root, name=f"{label}.{number}", inplace=True)
    result: T = obj if is_root else pickle.loads(pickled)  # type: ignore[assignment]
    return result


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """The objects of all ranks, in rank order, on every rank; what pickles, of any size.

    Raises as collectives do.

    Example::

        names = hvd.allgather_object(socket.gethostname())
    """
    group = process_set.group()
    label = name or "allgather_object"
    pickled = dump(obj)
    length = torch.tensor([len(pickled)], device="cpu")
    sizes = group.allgather(length, name=f"{label}.size").tolist()
    return [pickle.loads(each) for each in _gather(group, pickled, sizes, label)]


def _gather(group: Group, pickled: bytearray, sizes: list[int], label: str) -> list[bytearray]:
    mine = _as_tensor(pickled)
    whole = [bytearray(size) for size in sizes]
    for start in range(0, max(sizes), PIECE):
        stop = start + PIECE
        pieces = group.allgather(mine[start:stop], name=f"{label}.{start // PIECE}")
        lengths = [len(range(start, min(stop, size))) for size in sizes]
        for each, piece in zip(whole, torch.split(pieces, lengths), strict=True):
            if piece.numel():
                _as_tensor(each)[start : start + piece.numel()] = piece
    return whole


def dump(obj: Any) -> bytearray:
    """``obj`` pickled: by cloudpickle if it is installed."""
    try:
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    return bytearray(pickler.dumps(obj))


def _as_tensor(data: bytearray) -> Tensor:
    """The same memory as bytes of torch; ``data`` is not empty, as no pickle is."""
    return torch.frombuffer(data, dtype=torch.uint8)
