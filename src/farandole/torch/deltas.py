"""``DistributedOptimizer`` with Adasum: the ranks step by themselves, and their steps combine.

Adasum of gradients would ignore what the optimizer makes of them (momentum, Adam's scaling), so it
combines what each rank's step changed: the parameters after it less the parameters before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.comm.codec import Codec
from farandole.comm.group import Group
from farandole.comm.handle import Handle
from farandole.comm.ops import Op
from farandole.torch.channel import Channel

PIECE = 64 * 1024 * 1024
"""Bytes that travel together, at least one parameter."""


class Deltas:
    """Combines the steps of one optimizer; ``label`` is what messages call it."""

    def __init__(self, channel: Channel, label: str, compression: Codec) -> None:
        self._channel = channel
        self._label = label
        self._compression = compression

    @contextlib.contextmanager
    def combined(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """What the body changes in ``parameters`` becomes the Adasum over the ranks of that."""
        group = self._channel.group
        if group is None or group.size == 1:
            yield
            return
        self._channel.open()
        members = [each for each in parameters if each.requires_grad]
        before = [each.detach().clone() for each in members]
        yield
        with torch.no_grad():
            self._combine(group, members, before)

    def _combine(self, group: Group, members: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        flights: list[tuple[list[int], list[Any], Handle[list[Tensor]]]] = []
        for number, places in enumerate(_pieces(members)):
            pairs = [self._compression.compress(members[i] - before[i]) for i in places]
            handle = group.grouped_allreduce_async(
                [travels for travels, _ in pairs],
                op=Op.ADASUM,
                name=f"{self._label}.{self._channel.name}.delta.{number}",
            )
            flights.append((places, [context for _, context in pairs], handle))
        for places, contexts, handle in flights:
            for place, context, delta in zip(places, contexts, handle.wait(), strict=True):
                whole = self._compression.decompress(delta, context)
                torch.add(before[place], whole, out=members[place].detach())


def _pieces(members: Sequence[Tensor]) -> list[list[int]]:
    """The places of ``members`` in pieces of one device and at most :data:`PIECE` bytes."""
    pieces: list[list[int]] = []
    filling: dict[torch.device, tuple[list[int], int]] = {}
    for place, each in enumerate(members):
        piece, size = filling.get(each.device, ([], 0))
        if not piece or size + each.nbytes > PIECE:
            piece, size = [], 0
            pieces.append(piece)
        piece.append(place)
        filling[each.device] = piece, size + each.nbytes
    return pieces
