"""The place of a rank that is a thread: given from within the process, not by the environment."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from farandole.core.placement import Placement
from farandole.core.secret import Secret
from farandole.core.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """A place that was given to a thread from within its process, instead of by the environment."""

    placement: Placement
    store: Store
    """Shared by all ranks of the job."""
    secret: Secret
    engine: str
    """The engine that can join these ranks, e.g. ``threads``."""


assigned: ContextVar[Assigned | None] = ContextVar("farandole_assigned", default=None)
"""Where ranks are threads, the place of the one that runs; ``None``: ask the environment."""
