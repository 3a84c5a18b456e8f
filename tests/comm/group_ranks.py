"""What the tests of groups share: a group around a function, and inputs that every rank knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farandole.comm import group as groups
from farandole.comm.group import Group
from farandole.core.config import Settings


def in_group(fn: Callable[[Group], Any], **knobs: Any) -> Callable[[int], Any]:
    """``fn(group)``, as a function for ``run_threads`` or ``run_processes``."""

    def on_rank(rank: int) -> Any:
        settings = Settings.from_environment()
        for name, value in knobs.items():
            object.__setattr__(settings, name, value)
        group = groups.form_root(settings).current
        assert group.rank == rank
        try:
            return fn(group)
        finally:
            groups.leave_root()

    return on_rank


def sample(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small values of ``dtype``, the same for the same ``seed`` anywhere; sums of a few fit."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.bool:
        return whole > 1
    if dtype.is_complex:
        other = torch.randint(0, 4, shape, generator=generator)
        return torch.complex(whole.double(), other.double()).to(dtype)
    if dtype.is_floating_point or dtype.is_signed:
        whole = whole - 1
    return whole.to(dtype)
