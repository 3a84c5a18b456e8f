"""Engines by name, each loaded on first use."""

from __future__ import annotations

import importlib

import torch.distributed as dist

from farandole.comm.engines.base import Opener
from farandole.core.errors import SetupError, UsageError

_OPENERS = {
    "auto": "farandole.comm.engines.choice:open_chosen",
    "hierarchical": "farandole.comm.engines.hierarchical.opening:open_hierarchical",
    "shm": "farandole.comm.engines.shm.opening:open_shm",
    "threads": "farandole.comm.engines.threads:open_threads",
    "torch": "farandole.comm.engines.c10d_open:open_torch",
}


def names() -> tuple[str, ...]:
    """The names that :func:`opener` knows, sorted."""
    return tuple(sorted(_OPENERS))


def opener(name: str) -> Opener:
    """How to open a channel with the engine called ``name``; ``auto`` chooses one.

    Raises ``UsageError`` when there is no such engine, and ``SetupError`` when there is but this
    torch cannot serve it.

    Example::

        engine = opener("torch")(seat)
    """
    if name not in _OPENERS:
        raise UsageError(f"There is no engine {name!r}. There are: {', '.join(names())}.")
    if name != "threads" and not dist.is_available():
        raise SetupError(
            f"The engine {name!r} needs torch.distributed, and this build of torch comes without. "
            "Install torch from its official wheels: pip install torch"
        )
    module, _, function = _OPENERS[name].partition(":")
    open_: Opener = getattr(importlib.import_module(module), function)
    return open_
