"""The engine ``shm`` against the contract of all engines."""

from __future__ import annotations

from farandole.comm.engines import registry
from farandole.testing.engine_contract import EngineContract


class TestShm(EngineContract):
    opener = staticmethod(registry.opener("shm"))
    processes = True
