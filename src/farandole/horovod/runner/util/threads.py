"""Calling a function in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``target(*args)``; with ``silent`` its exceptions are not shown.

    Example::

        in_thread(save, args=("model.pt",)).join()
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}: write (arg,) for one argument.")  # noqa: TRY004

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread
