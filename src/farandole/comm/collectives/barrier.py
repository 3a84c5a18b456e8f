"""Barrier: nobody goes on before all have come."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.comm.collectives.request import EngineFor, Flight, Request
from farandole.comm.header import Header


class BarrierRequest(Request[None]):
    """Done when every rank has asked for it. The exchange of headers is all it takes.

    It does not wait for collectives that were begun before it.
    """

    operation = "barrier"
    device = None

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name

    def header(self) -> Header:
        """See :class:`Request`."""
        return Header(operation=self.operation, name=self.name)

    def load(self) -> None:
        """Nothing to load."""

    def begin(self, engine_for: EngineFor, headers: Sequence[Header]) -> Flight[None]:
        """Nothing to move."""
        return Flight(lambda: None)
