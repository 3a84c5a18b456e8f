"""The channels of a group: one engine for each path and kind of device, opened when first used."""

from __future__ import annotations

import copy
import threading

import torch

from farandole.comm.control.channel import Control
from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Seat
from farandole.comm.meeting import LOOPBACK
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import ConnectionLost, DeadlineError, FarandoleError, PeerLost
from farandole.core.store import PrefixStore, Store
from farandole.core.topology import Topology

ELASTIC_LIMIT = 20.0
"""Seconds to open an engine where a rank may be lost and training is to go on: while Gloo connects,
nothing but its own limit can end the wait for a rank that will not come. The ranks have just agreed
on something, so none is far."""

LOOK = 0.5
"""Seconds between two looks, while opening, whether the group broke meanwhile."""


class Channels:
    """The engines of one rank in one group. Any thread may call anything.

    ``key`` is the group's, ``store`` what its ranks share, ``address`` the local address that
    ranks on other hosts can reach, ``engine`` the name of the engine, or ``auto``.
    """

    def __init__(
        self,
        *,
        key: str,
        topology: Topology,
        control: Control,
        settings: Settings,
        store: Store,
        address: str,
        engine: str,
    ) -> None:
        self.store = store
        self.address = address
        self.engine = engine
        self._key = key
        self._topology = topology
        self._control = control
        self._settings = settings
        self._lock = threading.Lock()
        self._opening: dict[tuple[str, str], threading.Lock] = {}
        self._engines: dict[tuple[str, str], Engine] = {}
        self._closed_with: FarandoleError | None = None

    def find(self, path: str, device: torch.device) -> Engine:
        """The engine for ``path`` and the kind of ``device``. The first call opens it.

        Opening is collective over the group, for at most ``start_timeout`` seconds.
        """
        slot = (path, device.type)
        with self._lock:
            self._require_open()
            found = self._engines.get(slot)
            opening = self._opening.setdefault(slot, threading.Lock())
        if found is not None:
            return found
        with opening:
            found = self._engines.get(slot)
            return self._open(path, device) if found is None else found

    def abort(self, error: FarandoleError) -> None:
        """Make the engines' operations raise ``error``."""
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.abort(error)

    def close(self, error: FarandoleError) -> None:
        """Close all engines; what is in flight, and later calls, raise ``error``. Idempotent."""
        with self._lock:
            if self._closed_with is not None:
                return
            self._closed_with = error
        self.abort(error)
        for engine in self._engines.values():
            engine.close()

    def _open(self, path: str, device: torch.device) -> Engine:
        place = self._topology
        one_host = len(set(place.hosts)) == 1
        limit = self._settings.start_timeout
        if self._settings.worker is not None:
            limit = min(limit, ELASTIC_LIMIT)
        seat = Seat(
            rank=place.rank,
            size=place.size,
            channel=f"{self._control.generation}/{self._key}/{path}/{device.type}",
            store=_AlertStore(self.store, self._control),
            device=device,
            hosts=place.hosts,
            address=LOOPBACK if one_host else self.address,
            deadline=Deadline.after(limit),
            reduce_by_stages=self._settings.hierarchical_allreduce,
            move_by_stages=self._settings.hierarchical_allgather,
        )
        try:
            engine = registry.opener(self.engine)(seat)
        except (FarandoleError, RuntimeError) as error:
            self._control.require_usable()  # a rank was lost meanwhile: that is why
            if isinstance(error, ConnectionLost):
                raise PeerLost(f"The ranks cannot find each other. {error.message}") from None
            raise
        with self._lock:
            self._engines[path, device.type] = engine
            closed_with = self._closed_with
        if self._control.failure is not None:
            engine.abort(self._control.failure)
        if closed_with is not None:
            engine.abort(closed_with)
            engine.close()
        return engine

    def _require_open(self) -> None:
        if self._closed_with is not None:
            raise copy.copy(self._closed_with)


class _AlertStore(PrefixStore):
    """A store whose waits end when the group breaks: the rank that is waited for may be dead."""

    def __init__(self, store: Store, control: Control) -> None:
        super().__init__(store, "")
        self._control = control

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See ``core.store.Store``."""
        while True:
            remaining = deadline.remaining()
            try:
                return super().get(
                    key, Deadline.after(LOOK if remaining is None else min(LOOK, remaining))
                )
            except DeadlineError:
                self._control.require_usable()
                if deadline.expired():
                    return super().get(key, deadline)
