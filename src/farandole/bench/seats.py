"""A rank's place in a benchmark: its store, its engines, and exchanges with the other ranks."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm.c10d_store import C10dStore
from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Seat
from farandole.comm.meeting import LOOPBACK
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings, environment
from farandole.core.errors import UsageError
from farandole.core.store import StoreClient
from farandole.core.topology import find_placement, host_identity

_LIMIT = 120.0
"""Seconds that ranks wait for each other to come."""


class Seats:
    """Opens engines, and gathers what the ranks say. All ranks make the same calls in order."""

    def __init__(self) -> None:
        self.settings = Settings.from_environment()
        if self.settings.store_address is None or self.settings.secret is None:
            raise UsageError("Benchmarks are started by `farandole bench`.")
        placement = find_placement(environment())
        self.rank, self.size = placement.rank, placement.size
        address = Address.parse(self.settings.store_address)
        self._store = StoreClient(address, self.settings.secret, Deadline.after(_LIMIT))
        # Kept here, for torch's C++ keeps no Python object alive.
        self._torch_store = C10dStore(self._store, "torch/", Deadline.after(_LIMIT))
        self._engines: list[Engine] = []
        self._exchanges = 0

    def __enter__(self) -> Seats:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.gather(None)  # nobody leaves while another still measures
        for engine in self._engines:
            engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def open(self, name: str) -> Engine:
        """A new channel of CPU tensors with the engine ``name``."""
        seat = Seat(
            rank=self.rank,
            size=self.size,
            channel=f"bench/{len(self._engines)}",
            store=self._store,
            device=torch.device("cpu"),
            hosts=(host_identity(),) * self.size,
            address=LOOPBACK,
            deadline=Deadline.after(_LIMIT),
        )
        engine = registry.opener(name)(seat)
        self._engines.append(engine)
        return engine

    def torch_store(self) -> C10dStore:
        """A store in which torch's own process groups meet."""
        return self._torch_store

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, plain JSON, by rank."""
        prefix = f"bench/exchange/{self._exchanges}/"
        self._exchanges += 1
        self._store.set(f"{prefix}{self.rank}", json.dumps(value).encode())
        deadline = Deadline.after(_LIMIT)
        return [
            json.loads(self._store.get(f"{prefix}{rank}", deadline)) for rank in range(self.size)
        ]
