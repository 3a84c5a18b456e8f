"""Handles of asynchronous collectives as Horovod gives them: small integers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farandole.comm.handle import Handle
from farandole.core.errors import UsageTypeError

_numbers = itertools.count()
_lock = threading.Lock()
_pending: dict[int, Pending] = {}


@dataclass(frozen=True)
class Pending:
    """A collective under way, and what the front makes of its result."""

    handle: Handle[Any]
    dress: Callable[[Any], Any]


def register(handle: Handle[Any], dress: Callable[[Any], Any] = lambda result: result) -> int:
    """A number for ``handle``; ``dress`` turns its result into what the user gets."""
    number = next(_numbers)
    with _lock:
        _pending[number] = Pending(handle, dress)
    return number


def poll(handle: int) -> bool:
    """Whether :func:`synchronize` would return, or raise, at once.

    ``True`` for a handle that was synchronized already.

    Example::

        while not hvd.poll(handle):
            prepare_next_batch()
    """
    _check(handle)
    with _lock:
        pending = _pending.get(handle)
    return True if pending is None else pending.handle.done()


def synchronize(handle: int) -> Any:
    """Wait for the collective of ``handle`` and return its result: what the waiting form returns.

    ``None`` for a handle that was synchronized already. Raises what went wrong: ``MismatchError``
    when the ranks asked for different things, ``PeerLost`` when a rank is gone, ``StallError``.

    Example::

        handle = hvd.allreduce_async(loss, name="loss")
        ...
        loss = hvd.synchronize(handle)
    """
    _check(handle)
    with _lock:
        pending = _pending.pop(handle, None)
    return None if pending is None else pending.dress(pending.handle.wait())


def _check(handle: int) -> None:
    if not isinstance(handle, int):
        raise UsageTypeError(
            f"a handle is the integer that an _async collective returned, not {handle!r}."
        )
