"""A store whose server may die, and come back at the same address with nothing in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost, DeadlineError, FarandoleError
from farandole.core.secret import Secret
from farandole.core.store_local import Store
from farandole.core.store_remote import StoreClient

ResultT = TypeVar("ResultT")

ATTEMPT = 5.0
"""Seconds for one attempt to connect again."""

PAUSE = 0.25
"""Seconds between two attempts."""


class ReturningStore:
    """A :class:`~farandole.core.store.StoreClient` that connects again. See ``core.store.Store``.

    What is under way when the server dies raises ``ConnectionLost``, since nobody can tell what
    became of it, and what had been set is gone. The next call, of any thread, connects again, and
    has :attr:`on_return` called first; it raises ``DeadlineError`` when nobody is there within
    ``patience`` seconds, and so do all that follow.

    Example::

        store = ReturningStore(address, secret, Deadline.after(30.0), patience=600.0)
        store.on_return = lambda fresh: fresh.set("back/3", b"")
    """

    def __init__(
        self, address: Address, secret: Secret, deadline: Deadline, *, patience: float
    ) -> None:
        self.on_return: Callable[[Store], None] = lambda fresh: None
        """Called with the store that has come back, before anybody else uses it."""
        self._address = address
        self._secret = secret
        self._patience = patience
        self._lock = threading.Lock()  # while connecting
        self._client: StoreClient | None = StoreClient(address, secret, deadline)
        self._ended: FarandoleError | None = None

    @property
    def ended(self) -> bool:
        """Whether it was closed, or did not come back in time: no call succeeds any more."""
        return self._ended is not None

    def set(self, key: str, value: bytes) -> None:
        """See ``core.store.Store``."""
        self._use(lambda client: client.set(key, value))

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See ``core.store.Store``."""
        return self._use(lambda client: client.get(key, deadline))

    def peek(self, key: str) -> bytes | None:
        """See ``core.store.Store``."""
        return self._use(lambda client: client.peek(key))

    def add(self, key: str, amount: int) -> int:
        """See ``core.store.Store``."""
        return self._use(lambda client: client.add(key, amount))

    def compare_and_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes:
        """See ``core.store.Store``."""
        return self._use(lambda client: client.compare_and_set(key, expected, desired))

    def delete(self, key: str) -> bool:
        """See ``core.store.Store``."""
        return self._use(lambda client: client.delete(key))

    def keys(self, prefix: str) -> list[str]:
        """See ``core.store.Store``."""
        return self._use(lambda client: client.keys(prefix))

    def close(self) -> None:
        """See ``core.store.Store``."""
        self._ended = self._ended or ConnectionLost("The job's store was closed here.")
        client = self._client
        if client is not None:
            client.close()

    def _use(self, call: Callable[[StoreClient], ResultT]) -> ResultT:
        client = self._client or self._connected()
        try:
            return call(client)
        except ConnectionLost:
            with self._lock:
                if self._client is client:
                    self._client = None
            client.close()
            raise

    def _connected(self) -> StoreClient:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
                if self._ended is not None:  # closed meanwhile, when there was nothing to close
                    self._client.close()
            return self._client

    def _connect(self) -> StoreClient:
        deadline = Deadline.after(self._patience)
        why = "there was no time to try"
        while self._ended is None and not deadline.expired():
            found = self._try_once()
            if isinstance(found, StoreClient):
                return found
            why = found.message
            time.sleep(PAUSE)
        if self._ended is None:
            self._ended = DeadlineError(
                f"The job's store at {self._address} was lost, and did not come back within "
                f"{self._patience:g} s (FARANDOLE_DRIVER_TIMEOUT): {why}"
            )
        raise type(self._ended)(self._ended.message)

    def _try_once(self) -> StoreClient | FarandoleError:
        try:
            fresh = StoreClient(self._address, self._secret, Deadline.after(ATTEMPT))
        except FarandoleError as error:
            return error
        try:
            self.on_return(fresh)
        except FarandoleError as error:
            fresh.close()
            return error
        return fresh
