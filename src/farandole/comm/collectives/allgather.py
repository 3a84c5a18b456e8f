"""Allgather: every rank gets the rows of all ranks, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, TensorRequest
from farandole.comm.engines.base import Engine, Work
from farandole.comm.header import Header
from farandole.core.errors import UsageError


class AllgatherRequest(TensorRequest[list[Tensor]]):
    """Concatenates each tensor's rows over the ranks; numbers of rows may differ between ranks."""

    operation = "allgather"

    def __init__(self, tensors: Sequence[Tensor], *, name: str | None, grouped: bool) -> None:
        super().__init__(tensors, name=name, grouped=grouped)
        for tensor in self.tensors:
            if tensor.dim() == 0:
                raise UsageError(
                    "allgather concatenates rows, and a tensor without dimensions (rank zero) "
                    "has none. Pass tensor.reshape(1)."
                )
        self._batches: list[tuple[list[int], Tensor]] = []

    def header(self) -> Header:
        """See :class:`Request`."""
        return self.describe()

    def load(self) -> None:
        """See :class:`Request`."""
        for indices in request.by_dtype(self.tensors):
            pieces = [dtypes.as_bytes(request.flat(self.tensors[index])) for index in indices]
            self._batches.append((indices, request.joined(pieces)))

    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[list[Tensor]]:
        """See :class:`TensorRequest`."""
        shapes = [[torch.Size(shape) for shape in header.shapes] for header in headers]
        works: list[Work] = []
        gathered: list[Tensor] = []
        for indices, source in self._batches:
            itemsize = self.tensors[indices[0]].dtype.itemsize
            counts = [
                itemsize * sum(of_rank[index].numel() for index in indices) for of_rank in shapes
            ]
            output = source.new_empty(sum(counts))
            works.append(engine.allgather(output, source, counts))
            gathered.append(output)

        def finish() -> list[Tensor]:
            return self._split(gathered, shapes)

        return Flight(finish, works, [source for _, source in self._batches], gathered)

    def _split(self, gathered: Sequence[Tensor], shapes: list[list[torch.Size]]) -> list[Tensor]:
        results = [self.tensors[0]] * len(self.tensors)
        for (indices, _), output in zip(self._batches, gathered, strict=True):
            dtype = self.tensors[indices[0]].dtype
            values = dtypes.from_bytes(output, dtype)
            sizes = [of_rank[index].numel() for of_rank in shapes for index in indices]
            pieces = torch.split(values, sizes)
            for place, index in enumerate(indices):
                rows = sum(of_rank[index][0] for of_rank in shapes)
                whole = values if len(indices) == 1 else torch.cat(pieces[place :: len(indices)])
                results[index] = whole.view(rows, *self.tensors[index].shape[1:]).detach()
        return results
