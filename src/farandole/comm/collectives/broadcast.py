"""Broadcast: every rank gets what the root has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.collectives import request
from farandole.comm.collectives.request import Flight, TensorRequest
from farandole.comm.engines.base import Engine
from farandole.comm.header import Header


class BroadcastRequest(TensorRequest[list[Tensor]]):
    """Replaces each tensor by the root's (or returns a copy of the root's, when not in place).

    ``root`` is the root's index in the group, ``root_rank`` its global rank.
    """

    operation = "broadcast"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        root: int,
        root_rank: int,
        rank: int,
        name: str | None,
        grouped: bool,
        inplace: bool,
    ) -> None:
        super().__init__(tensors, name=name, grouped=grouped)
        if inplace:
            request.require_writable(self.tensors, self.operation)
        self._given = tuple(tensors)
        self._root = root
        self._root_rank = root_rank
        self._sends = rank == root
        self._inplace = inplace
        self._targets: list[Tensor] = []
        self._batches: list[tuple[list[int], Tensor]] = []

    def header(self) -> Header:
        """See :class:`Request`."""
        return self.describe(root=self._root_rank)

    def load(self) -> None:
        """See :class:`Request`."""
        if self._inplace:
            self._targets = list(self.tensors)
        elif self._sends:
            self._targets = [tensor.clone() for tensor in self.tensors]
        else:
            self._targets = [torch.empty_like(tensor) for tensor in self.tensors]
        for indices in request.by_dtype(self.tensors):
            self._batches.append((indices, self._buffer([self._targets[i] for i in indices])))

    def _buffer(self, targets: list[Tensor]) -> Tensor:
        if self._sends or (len(targets) == 1 and request.is_plain(targets[0])):
            pieces = [dtypes.as_bytes(request.flat(target)) for target in targets]
            return request.joined(pieces)
        count = sum(target.nbytes for target in targets)
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[list[Tensor]]:
        """See :class:`TensorRequest`."""
        buffers = [buffer for _, buffer in self._batches]
        works = [engine.broadcast(buffer, self._root) for buffer in buffers]
        return Flight(self._finish, works, buffers)

    def _finish(self) -> list[Tensor]:
        if not self._sends:
            for indices, buffer in self._batches:
                self._unload([self._targets[index] for index in indices], buffer)
        return list(self._given) if self._inplace else self._targets

    def _unload(self, targets: list[Tensor], buffer: Tensor) -> None:
        if len(targets) == 1 and request.is_plain(targets[0]):
            return
        values = dtypes.from_bytes(buffer, targets[0].dtype)
        pieces = torch.split(values, [target.numel() for target in targets])
        for target, piece in zip(targets, pieces, strict=True):
            target.copy_(piece.view(target.shape))
