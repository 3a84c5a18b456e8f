"""Alltoall: every rank sends each rank some of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, TensorRequest
from farandole.comm.engines.base import Engine
from farandole.comm.header import Header
from farandole.core.errors import UsageError

Splits = Tensor | Sequence[int]


class AlltoallRequest(TensorRequest[tuple[Tensor, Tensor]]):
    """Sends ``splits[r]`` rows to rank r; returns the rows received and their number by sender."""

    operation = "alltoall"

    def __init__(
        self, tensor: Tensor, *, splits: Splits | None, rank: int, size: int, name: str | None
    ) -> None:
        super().__init__([tensor], name=name, grouped=False)
        if self.tensors[0].dim() == 0:
            raise UsageError(
                "alltoall sends rows, and a tensor without dimensions has none. "
                "Pass tensor.reshape(1)."
            )
        self._splits = checked_splits(splits, rows=self.tensors[0].shape[0], size=size)
        self._rank = rank
        self._source = self.tensors[0]

    def header(self) -> Header:
        """See :class:`Request`."""
        return self.describe(splits=self._splits)

    def load(self) -> None:
        """See :class:`Request`."""
        rows = self.tensors[0][: sum(self._splits)]
        self._source = dtypes.as_bytes(request.flat(rows))

    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[tuple[Tensor, Tensor]]:
        """See :class:`TensorRequest`."""
        received = [header.splits[self._rank] for header in headers]
        tensor = self.tensors[0]
        row = torch.Size(tensor.shape[1:]).numel() * tensor.dtype.itemsize
        output = self._source.new_empty(sum(received) * row)
        work = engine.alltoall(
            output,
            self._source,
            [rows * row for rows in received],
            [rows * row for rows in self._splits],
        )

        def finish() -> tuple[Tensor, Tensor]:
            values = dtypes.from_bytes(output, tensor.dtype)
            result = values.view(sum(received), *tensor.shape[1:]).detach()
            return result, torch.tensor(received, dtype=torch.int32, device="cpu")

        return Flight(finish, [work], [self._source], [output])


def checked_splits(splits: Splits | None, *, rows: int, size: int) -> tuple[int, ...]:
    """``splits`` as integers, or the even ones when they are not given.

    Raises ``UsageError`` when they do not fit ``rows`` and ``size``.
    """
    if splits is None:
        if rows % size:
            raise UsageError(
                f"alltoall without splits needs a first dimension that divides by the {size} "
                f"ranks; it is {rows}. Pass splits."
            )
        return (rows // size,) * size
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.dtype.is_floating_point or splits.dtype.is_complex:
            raise UsageError(
                "alltoall needs splits as a one-dimensional tensor of integers; got "
                f"{splits.dtype} of shape {list(splits.shape)}."
            )
        splits = splits.tolist()
    counts = tuple(int(count) for count in splits)
    if len(counts) != size:
        raise UsageError(
            f"alltoall needs one split for each of the {size} ranks; got {len(counts)}."
        )
    if min(counts) < 0 or sum(counts) > rows:
        raise UsageError(
            f"alltoall got splits {list(counts)} for a first dimension of {rows}: they must not "
            "be negative, and their sum must not exceed it."
        )
    return counts
