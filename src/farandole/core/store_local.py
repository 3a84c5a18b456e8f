"""The contract of a store, and the stores within one process. See ``core.store``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost, DeadlineError, UsageError


class Store(Protocol):
    """What every store does. See the module's guarantees.

    Example::

        store.set("address/0", b"10.0.0.1:4711")
        store.get("address/1", Deadline.after(30.0))   # waits until rank 1 has set it
    """

    def set(self, key: str, value: bytes) -> None:
        """Bind ``key`` to ``value`` and wake those who wait for it."""
        ...

    def get(self, key: str, deadline: Deadline) -> bytes:
        """The value of ``key``, waiting for it to be set.

        Raises ``DeadlineError``, which names the key, when that has not happened in time.
        """
        ...

    def peek(self, key: str) -> bytes | None:
        """The value of ``key`` now, or ``None``."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal integer at ``key`` (absent: 0) and return the sum.

        Raises ``UsageError`` when the value is not a decimal integer.
        """
        ...

    def compare_and_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes:
        """Bind ``key`` to ``desired`` if it now has ``expected`` (``None``: is absent).

        Returns the value afterwards: ``desired`` when it was done, otherwise what is there. When
        the key is absent but something was expected, nothing is set and ``b""`` is returned.
        """
        ...

    def delete(self, key: str) -> bool:
        """Remove ``key`` and say whether it was there."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix``, sorted."""
        ...

    def close(self) -> None:
        """Give the store up; idempotent. Waiting calls of this object raise ``ConnectionLost``."""
        ...


Watcher = Callable[[bytes | None], None]


class LocalStore:
    """A store within this process. See :class:`Store`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._watchers: dict[str, list[Watcher]] = {}
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """See :class:`Store`."""
        with self._lock:
            self._require_open()
            watchers = self._bind(key, bytes(value))
        for watcher in watchers:
            watcher(value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See :class:`Store`."""
        arrived = threading.Event()
        received: list[bytes | None] = []

        def on_value(value: bytes | None) -> None:
            received.append(value)
            arrived.set()

        cancel = self.watch(key, on_value)
        try:
            while not arrived.wait(deadline.remaining()):
                if deadline.expired():
                    raise missed(key, deadline)
        finally:
            cancel()
        value = received[0]
        if value is None:
            raise _closed_while(f"waiting for the key {key!r}")
        return value

    def peek(self, key: str) -> bytes | None:
        """See :class:`Store`."""
        with self._lock:
            self._require_open()
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """See :class:`Store`."""
        with self._lock:
            self._require_open()
            before = self._values.get(key, b"0")
            try:
                total = int(before) + amount
            except ValueError:
                raise UsageError(
                    f"add() needs a decimal integer at the key {key!r}, found {before[:40]!r}."
                ) from None
            value = b"%d" % total
            watchers = self._bind(key, value)
        for watcher in watchers:
            watcher(value)
        return total

    def compare_and_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes:
        """See :class:`Store`."""
        with self._lock:
            self._require_open()
            present = self._values.get(key)
            if present != expected:
                return b"" if present is None else present
            watchers = self._bind(key, bytes(desired))
        for watcher in watchers:
            watcher(desired)
        return desired

    def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        with self._lock:
            self._require_open()
            return self._values.pop(key, None) is not None

    def keys(self, prefix: str) -> list[str]:
        """See :class:`Store`."""
        with self._lock:
            self._require_open()
            return sorted(key for key in self._values if key.startswith(prefix))

    def watch(self, key: str, watcher: Watcher) -> Callable[[], None]:
        """Call ``watcher`` once with the value of ``key``: now if it has one, else when it is set.

        The call comes from the thread that sets the key, without a lock held; it must not block.
        ``None`` means that the store was closed. Returns the way to stop waiting.
        """
        with self._lock:
            value = None if self._closed else self._values.get(key)
            if value is None and not self._closed:
                self._watchers.setdefault(key, []).append(watcher)

                def cancel() -> None:
                    with self._lock:
                        waiting = self._watchers.get(key, [])
                        if watcher in waiting:
                            waiting.remove(watcher)
                            if not waiting:
                                del self._watchers[key]

                return cancel
        watcher(value)
        return _nothing

    def close(self) -> None:
        """See :class:`Store`. Closes it for all threads that share it."""
        with self._lock:
            self._closed = True
            watchers = [each for waiting in self._watchers.values() for each in waiting]
            self._watchers.clear()
        for watcher in watchers:
            watcher(None)

    def _bind(self, key: str, value: bytes) -> list[Watcher]:
        self._values[key] = value
        return self._watchers.pop(key, [])

    def _require_open(self) -> None:
        if self._closed:
            raise _closed_while("in use")


class PrefixStore:
    """The keys of ``store`` that begin with ``prefix``, under their names without it.

    The other store stays the property of whoever made it: :meth:`close` does not close it.

    Example::

        PrefixStore(store, "generation/3/").set("ready", b"1")   # sets "generation/3/ready"
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """See :class:`Store`."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See :class:`Store`."""
        return self._store.get(self._prefix + key, deadline)

    def peek(self, key: str) -> bytes | None:
        """See :class:`Store`."""
        return self._store.peek(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """See :class:`Store`."""
        return self._store.add(self._prefix + key, amount)

    def compare_and_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes:
        """See :class:`Store`."""
        return self._store.compare_and_set(self._prefix + key, expected, desired)

    def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        return self._store.delete(self._prefix + key)

    def keys(self, prefix: str) -> list[str]:
        """See :class:`Store`."""
        cut = len(self._prefix)
        return [key[cut:] for key in self._store.keys(self._prefix + prefix)]

    def close(self) -> None:
        """Nothing to give up: the store below belongs to its maker."""


def missed(key: str, deadline: Deadline) -> DeadlineError:
    """The error for a key that was not set in time."""
    limit = "" if deadline.limit is None else f" within {deadline.limit:g} s"
    return DeadlineError(f"The key {key!r} was not set in the job's store{limit}.")


def _closed_while(doing: str) -> ConnectionLost:
    return ConnectionLost(f"The job's store was closed while {doing}.")


def _nothing() -> None:
    pass
