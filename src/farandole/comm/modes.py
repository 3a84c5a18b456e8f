"""Torch's thread-local modes in which a request is worked on, wherever that happens.

Gradients are not among them: all of it works on detached tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_AS_IT_IS: AbstractContextManager[None] = contextlib.nullcontext()


def modes(*, inference: bool, stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """A context with ``inference`` mode on or off, and ``stream`` as the current one, if given.

    It costs nothing where the thread is in these modes already, as it nearly always is.
    """
    if stream is None and torch.is_inference_mode_enabled() == inference:
        return _AS_IT_IS
    return _entered(inference, stream)


@contextlib.contextmanager
def _entered(inference: bool, stream: torch.cuda.Stream | None) -> Iterator[None]:
    with torch.inference_mode(inference), torch.cuda.stream(stream):
        yield
