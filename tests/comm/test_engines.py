from __future__ import annotations

from typing import Any

import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Seat
from farandole.comm.engines.staged import StagedEngine
from farandole.testing.engine_contract import EngineContract


class HostLane:
    """A lane of a device that is the CPU: what staging does besides CUDA is tested with it."""

    def mark_caller(self) -> str:
        return "caller"

    def follow(self, mark: Any) -> None:
        assert mark == "caller"

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def host(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def put(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        tensor.copy_(host)

    def mark(self) -> str:
        return "lane"

    def hold_caller(self, mark: Any) -> None:
        assert mark == "lane"


def open_staged(seat: Seat) -> Engine:
    return StagedEngine(seat, registry.opener("torch")(seat), HostLane())


class TestThreads(EngineContract):
    opener = staticmethod(registry.opener("threads"))
    processes = False


class TestTorch(EngineContract):
    opener = staticmethod(registry.opener("torch"))
    processes = True


class TestStaged(EngineContract):
    opener = staticmethod(open_staged)
    processes = True
