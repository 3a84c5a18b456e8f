"""What the tests of the backend share: ranks in process groups of torch.distributed."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

import farandole.torch  # noqa: F401 - it registers the backend
from farandole.testing.outcome import Outcome
from farandole.testing.ranks import process_outcomes, run_processes

T = TypeVar("T")

TIMEOUT = datetime.timedelta(seconds=30)


def in_group(
    folder: Path, size: int, fn: Callable[[int], T], timeout: datetime.timedelta = TIMEOUT
) -> Callable[[int], T]:
    """``fn`` between ``init_process_group("farandole")`` and ``destroy_process_group()``."""
    method = f"file://{folder / 'store'}"

    def be(rank: int) -> T:
        join(method, rank, size, timeout)
        result = fn(rank)
        dist.destroy_process_group()
        return result

    return be


def join(method: str, rank: int, size: int, timeout: datetime.timedelta = TIMEOUT) -> None:

    dist.init_process_group(
        "farandole", init_method=method, rank=rank, world_size=size, timeout=timeout
    )


def run(folder: Path, size: int, fn: Callable[[int], T], **options: Any) -> list[T]:
    return run_processes(size, in_group(folder, size, fn, **options))


def outcomes(folder: Path, size: int, fn: Callable[[int], T], **options: Any) -> list[Outcome[T]]:
    return process_outcomes(size, in_group(folder, size, fn, **options))
