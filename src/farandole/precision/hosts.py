"""A codec that is for the way between hosts alone: within a host everything is summed exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from farandole.comm.codec import Exchange, ExchangeCodec, Layout, Memory
from farandole.comm.engines.base import Engine, Reduction, Work


@dataclass(frozen=True)
class AcrossHosts:
    """``codec`` between hosts. An engine that knows no hosts encodes between all ranks."""

    codec: ExchangeCodec

    def __str__(self) -> str:
        return f"across_hosts({self.codec})"

    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """See :class:`~farandole.comm.codec.ExchangeCodec`."""
        return AcrossHostsExchange(self.codec.exchange(layout, memory))


class AcrossHostsExchange:
    """See :class:`AcrossHosts`."""

    across_hosts = True

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner

    def sum(self, buffer: Tensor, engine: Engine) -> Work:
        """See :class:`~farandole.comm.codec.Exchange`. Exact between ranks of one host."""
        if len(set(engine.seat.hosts)) == 1:
            return engine.allreduce(buffer, Reduction.SUM)
        return self._inner.sum(buffer, engine)

    def parts(self, count: int) -> Sequence[tuple[int, Exchange]]:
        """See :class:`~farandole.comm.codec.Exchange`."""
        return self._inner.parts(count)
