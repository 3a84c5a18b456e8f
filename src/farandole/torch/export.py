"""Weights as a safetensors file, which others read without running code."""

from __future__ import annotations

import os

from torch import nn

from farandole.core.errors import MissingExtraError


def write_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write ``model``'s weights; whole or not at all.

    Raises ``MissingExtraError`` without the package safetensors.

    Example::

        write_weights(model, "model.safetensors")
    """
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise MissingExtraError(
            "Weights are exported with the package safetensors, which is not installed: "
            "pip install 'farandole[export]'"
        ) from None
    aside = f"{os.fspath(path)}.tmp"
    save_model(model, aside, metadata={"format": "pt"})
    os.replace(aside, path)
