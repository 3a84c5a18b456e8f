"""Small reductions that were agreed on together travel together, in one buffer.

Which do is decided from what all ranks know alike: the requests of one list of verdicts, their
dtypes, sizes and operations. So all ranks make the same of it, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.comm.collectives.request import Flight, Share
from farandole.comm.handle import Handle, Line
from farandole.comm.header import Header
from farandole.core.events import Stage

TOGETHER_BYTES = 4 * 1024 * 1024
"""A buffer for several requests is not made larger than this."""


@dataclass(frozen=True)
class Ready:
    """A request that all members of its group have agreed on."""

    line: Line
    handle: Handle[Any]
    headers: Sequence[Header]


@dataclass
class Company:
    """Requests that travel together."""

    ready: list[Ready]
    shares: list[Share[Any]]
    """One each; none for a request that travels alone whatever comes."""
    bytes: int = 0


def arrange(ready: Sequence[Ready]) -> list[Company]:
    """The requests, in the order in which they begin."""
    if len(ready) == 1:
        return [Company(list(ready), [])]
    arranged: list[Company] = []
    open_ones: dict[tuple[Any, ...], Company] = {}
    for each in ready:
        share = each.handle.share()
        if share is None:
            arranged.append(Company([each], []))
            continue
        key = (each.line.key, *share.key)
        company = open_ones.get(key)
        if company is None or company.bytes + share.buffer.nbytes > TOGETHER_BYTES:
            company = open_ones[key] = Company([], [])
            arranged.append(company)
        company.ready.append(each)
        company.shares.append(share)
        company.bytes += share.buffer.nbytes
    return arranged


def begin(company: Company, stream: torch.cuda.Stream | None) -> None:
    """Hand the requests to the engine."""
    those, shares = company.ready, company.shares
    if len(those) == 1:
        those[0].handle.begin(those[0].headers, stream)
        return
    with torch.no_grad(), torch.cuda.stream(stream):
        for each in those:
            each.handle.get_ready(stream)
            each.handle.stage(Stage.PACKING)
        device, _, reduction = shares[0].key
        engine = those[0].line.engine(device)
        whole = torch.cat([share.buffer for share in shares])
        work = engine.allreduce(whole, reduction)
        pieces = torch.split(whole, [share.buffer.numel() for share in shares])
    for each, share, piece in zip(those, shares, pieces, strict=True):
        flight = Flight(_finish(share, piece), [work], [share.buffer], [whole], engine.name)
        each.handle.take_off(flight, stream)


def _finish(share: Share[Any], piece: torch.Tensor) -> Any:
    return lambda: share.finish(piece)
