"""Small reductions that were agreed on together travel together, in one buffer.

Which do is decided from what all ranks know alike: the requests of one list of verdicts, their
dtypes, sizes and operations. So all ranks make the same of it, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farandole.comm.collectives.request import Flight, Share
from farandole.comm.handle import Handle, Line
from farandole.comm.header import Header
from farandole.comm.modes import modes
from farandole.comm.order import berths
from farandole.core.events import Stage

TOGETHER_BYTES = 4 * 1024 * 1024
"""A buffer for several requests is not made larger than this."""


@dataclass(slots=True)
class Ready:
    """A request that all members of its group have agreed on."""

    line: Line
    handle: Handle[Any]
    headers: Sequence[Header]


@dataclass(slots=True)
class Company:
    """Requests that travel together."""

    ready: list[Ready]
    bytes: int = 0

    @property
    def may_block(self) -> bool:
        """Whether to begin it may take long: the first one opens the engine, and only of small
        reductions it is known what beginning them takes."""
        first = self.ready[0]
        device = first.handle.device
        if device is None:
            return False  # Nothing moves.
        return first.handle.shared is None or device.type not in first.line.opened


def arrange(ready: Sequence[Ready]) -> list[Company]:
    """The requests, in the order in which they begin."""
    arranged: list[Company] = []
    open_ones: dict[tuple[Any, ...], Company] = {}
    for each in ready:
        share = each.handle.shared
        if share is None:
            arranged.append(Company([each]))
            continue
        key = (each.line.key, *share.key)
        size = share.buffer.nbytes
        company = open_ones.get(key)
        if company is None or company.bytes + size > TOGETHER_BYTES:
            company = open_ones[key] = Company([])
            arranged.append(company)
        company.ready.append(each)
        company.bytes += size
    return arranged


def begin(company: Company, stream: torch.cuda.Stream | None) -> None:
    """Hand the requests to the engine."""
    those = company.ready
    first = those[0]
    if len(those) == 1:
        first.handle.begin(first.headers, stream)
    else:
        _begin_all(those, [each.handle.shared for each in those if each.handle.shared], stream)
    if first.handle.device is not None:
        first.line.opened.add(first.handle.device.type)


def _begin_all(
    those: Sequence[Ready], shares: Sequence[Share[Any]], stream: torch.cuda.Stream | None
) -> None:
    # In whatever modes this thread is: it may be one of the user's.
    with modes(inference=False, stream=stream):
        for each in those:
            each.handle.get_ready(stream)
            each.handle.stage(Stage.PACKING)
        whole, pieces = _pack(those, shares)
        device, _, reduction = shares[0].key
        engine = those[0].line.engine(device)
        works = [engine.allreduce(whole, reduction)]
    for each, share, piece in zip(those, shares, pieces, strict=True):
        flight = Flight(_finish(share, piece), works, [share.buffer], [whole], engine.name)
        each.handle.take_off(flight, stream)


def _pack(those: Sequence[Ready], shares: Sequence[Share[Any]]) -> tuple[Tensor, Sequence[Tensor]]:
    """One buffer for all, and the part of each."""
    buffers = [share.buffer for share in shares]
    keys = [each.handle.key for each in those]
    whole = berths.leave(keys, [each.handle.berth for each in those])
    if whole is not None:
        return whole, buffers
    lengths = [buffer.numel() for buffer in buffers]
    whole = torch.cat(buffers)
    # A request without a name never comes back, so its place would be kept for nobody.
    if whole.device.type == "cpu" and None not in [each.handle.header.name for each in those]:
        those[0].line.berths.remember(keys, lengths, whole)
    return whole, torch.split(whole, lengths)


def _finish(share: Share[Any], piece: torch.Tensor) -> Any:
    return lambda: share.finish(piece)
