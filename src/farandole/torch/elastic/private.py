"""What a rank of PyTorch has for itself: random states, and buffers that nobody averages."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from farandole.core.errors import NotInitializedError
from farandole.elastic.neighbour import holds


def matters() -> bool:
    """Whether a rank that rolls back is to be exactly what it was."""
    try:
        return holds()
    except NotInitializedError:
        return False


def packed(models: Mapping[str, torch.nn.Module]) -> bytes:
    """All of it, for :func:`take`. Python's, NumPy's and torch's generators, also on this GPU."""
    content: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "buffers": {
            name: {key: buffer.cpu() for key, buffer in model.named_buffers()}
            for name, model in models.items()
        },
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        content["cuda"] = torch.cuda.get_rng_state()
    if "numpy.random" in sys.modules:
        content["numpy"] = sys.modules["numpy.random"].get_state()
    return pickle.dumps(content)


def take(data: bytes, models: Mapping[str, torch.nn.Module]) -> None:
    """Be the rank of which :func:`packed` was."""
    content = pickle.loads(data)
    random.setstate(content["python"])
    torch.set_rng_state(content["torch"])
    if "cuda" in content:
        torch.cuda.set_rng_state(content["cuda"])
    if "numpy" in content and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(content["numpy"])
    with torch.no_grad():
        for name, buffers in content["buffers"].items():
            own = dict(models[name].named_buffers())
            for key, buffer in buffers.items():
                own[key].copy_(buffer)
