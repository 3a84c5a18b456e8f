"""torch.distributed's ``Store`` over ours, so that c10d groups meet in the job's own store.

torch's ``TCPStore`` lets any stranger in; ours asks for the job's secret. torch's C++ calls back
into these methods while it builds a group, and an exception raised here comes out of that
constructor unchanged.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from farandole.core.clock import Deadline
from farandole.core.store import Store


class C10dStore(dist.Store):  # type: ignore[name-defined,misc]
    """The keys of ``store`` below ``prefix``, in the form in which torch.distributed asks for them.

    Waiting ends at ``deadline``, whatever timeout torch asks for. ``sent`` and ``received`` hold
    the values that were set and got here: an engine reads there where it and its peers listen.

    Example::

        group = ProcessGroupGloo(C10dStore(store, "grads/", Deadline.after(30.0)), rank, size)
    """

    def __init__(self, store: Store, prefix: str, deadline: Deadline) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._deadline = deadline
        self.sent: list[bytes] = []
        self.received: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Bind ``key`` to ``value``."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.sent.append(data)
        self._store.set(self._prefix + key, data)

    def get(self, key: str) -> bytes:
        """The value of ``key``, waiting for it; ``DeadlineError`` when it is not set in time."""
        data = self._store.get(self._prefix + key, self._deadline)
        self.received.append(data)
        return data

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key`` and return the sum."""
        return self._store.add(self._prefix + key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Bind ``key`` to ``desired`` if it has ``expected``, where empty means absent."""
        before = expected.encode() if isinstance(expected, str) else bytes(expected)
        after = desired.encode() if isinstance(desired, str) else bytes(desired)
        return self._store.compare_and_set(self._prefix + key, before or None, after)

    def delete_key(self, key: str) -> bool:
        """Remove ``key`` and say whether it was there."""
        return self._store.delete(self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are set."""
        return all(self._store.peek(self._prefix + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all of ``keys`` are set, until the deadline."""
        for key in keys:
            self._store.get(self._prefix + key, self._deadline)

    def num_keys(self) -> int:
        """How many keys are set."""
        return len(self._store.keys(self._prefix))

    # The names by which torch's C++ looks for these two.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
