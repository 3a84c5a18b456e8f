r"""A store lent out over authenticated connections. See ``core.store``.

A request is a line of JSON and then the values that it carries, one after the other::

    {"id": 7, "do": "set", "key": "address/0", "sizes": [13]}\n10.0.0.1:4711

and so is the answer: ``{"id": 7, "result": true, "sizes": []}``, or ``{"id": 7, "refused": "…"}``.
``sizes`` has ``null`` for an absent value. A ``get`` is answered when the key is set; ``forget``
takes it back, and has no answer itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from farandole.core import wire
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import (
    AuthenticationError,
    ConnectionLost,
    DeadlineError,
    FarandoleBug,
    FarandoleError,
    UsageError,
)
from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.core.store_local import LocalStore, missed

ANSWER_LIMIT = 60.0
"""Seconds within which the server answers what needs no waiting for a key."""

Values = list[bytes | None]


class StoreServer:
    """Lends ``store`` (a new one if ``None``) to whoever holds the secret, until :meth:`close`.

    Example::

        server = StoreServer(secret)
        child_environment["FARANDOLE_STORE"] = str(server.address)
        server.store.get("formed/0", Deadline.after(60.0))
    """

    def __init__(
        self,
        secret: Secret,
        host: str = "127.0.0.1",
        port: int = 0,
        store: LocalStore | None = None,
    ) -> None:
        self.store = LocalStore() if store is None else store
        """The store itself, for use in this process."""
        self._owns_store = store is None
        self._waiting: dict[Peer, dict[int, Callable[[], None]]] = {}
        self._server = Server(secret, self, host, port)
        self.address: Address = self._server.address
        """Where clients connect to."""

    def close(self) -> None:
        """Stop serving: clients get ``ConnectionLost``. Closes the store if it was made here."""
        self._server.close()
        for waiting in self._waiting.values():
            for cancel in waiting.values():
                cancel()
        self._waiting.clear()
        if self._owns_store:
            self.store.close()

    def on_message(self, peer: Peer, message: bytes) -> None:
        """See ``core.server.Handler``."""
        request, values = _unpack(message)
        number: int = request["id"]
        do: str = request["do"]
        key: str = request["key"]
        if do == "get":
            self._get(peer, number, key)
        elif do == "forget":
            self._stop_waiting(peer, number)
        else:
            try:
                result, answer = _DOES[do](self.store, key, request.get("amount", 0), values)
            except UsageError as error:
                peer.send(_pack({"id": number, "refused": error.message}, ()))
            else:
                peer.send(_pack({"id": number, "result": result}, answer))

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        """See ``core.server.Handler``."""
        for cancel in self._waiting.pop(peer, {}).values():
            cancel()

    def _get(self, peer: Peer, number: int, key: str) -> None:
        value = self.store.peek(key)
        if value is not None:
            peer.send(_pack({"id": number, "result": None}, (value,)))
            return

        def answer(value: bytes | None) -> None:
            if self._stop_waiting(peer, number) and value is not None:
                peer.send(_pack({"id": number, "result": None}, (value,)))

        # Whoever sets the key is another thread at times; all that is here is the server's.
        self._waiting.setdefault(peer, {})[number] = self.store.watch(
            key, lambda value: self._server.call_soon(lambda: answer(value))
        )

    def _stop_waiting(self, peer: Peer, number: int) -> bool:
        cancel = self._waiting.get(peer, {}).pop(number, None)
        if cancel is None:
            return False
        cancel()
        return True


class StoreClient:
    """The store of a :class:`StoreServer`, from another process. See ``core.store.Store``.

    Raises what ``core.wire.connect`` raises when it cannot connect by the deadline; ``patient`` is
    explained there. When the connection is lost, every waiting and later call raises
    ``ConnectionLost``; there is no second try, since what was set might be gone.

    Example::

        store = StoreClient(Address.parse("10.0.0.1:4711"), secret, Deadline.after(30.0))
    """

    # There is no thread for reading: one of the callers that wait reads for all of them, and when
    # it has its own answer, another one that still waits takes over.

    def __init__(
        self, address: Address, secret: Secret, deadline: Deadline, *, patient: bool = False
    ) -> None:
        self._connection = wire.connect(address, secret, deadline, patient=patient)
        self._changed = threading.Condition()
        self._last_number = 0
        self._answers: dict[int, tuple[dict[str, Any], Values] | None] = {}
        self._somebody_reads = False
        self._failure: FarandoleError | None = None

    def set(self, key: str, value: bytes) -> None:
        """See ``core.store.Store``."""
        self._call("set", key, (value,))

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See ``core.store.Store``."""
        number = self._ask("get", key, (), 0)
        try:
            _, values = self._answer(number, deadline)
        except _NotInTime:
            self._ask("forget", key, (), 0, number)
            raise missed(key, deadline) from None
        return _present(values)

    def peek(self, key: str) -> bytes | None:
        """See ``core.store.Store``."""
        return self._call("peek", key)[1][0]

    def add(self, key: str, amount: int) -> int:
        """See ``core.store.Store``."""
        return int(self._call("add", key, (), amount)[0]["result"])

    def compare_and_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes:
        """See ``core.store.Store``."""
        return _present(self._call("compare_and_set", key, (expected, desired))[1])

    def delete(self, key: str) -> bool:
        """See ``core.store.Store``."""
        return bool(self._call("delete", key)[0]["result"])

    def keys(self, prefix: str) -> list[str]:
        """See ``core.store.Store``."""
        return list(self._call("keys", prefix)[0]["result"])

    def close(self) -> None:
        """See ``core.store.Store``."""
        self._connection.close()

    def _call(
        self, do: str, key: str, values: Sequence[bytes | None] = (), amount: int = 0
    ) -> tuple[dict[str, Any], Values]:
        deadline = Deadline.after(ANSWER_LIMIT)
        number = self._ask(do, key, values, amount)
        try:
            answer, returned = self._answer(number, deadline)
        except _NotInTime:
            raise DeadlineError(
                f"The job's store at {self._connection.address} did not answer a {do!r} of the key "
                f"{key!r} within {ANSWER_LIMIT:g} s."
            ) from None
        if "refused" in answer:
            raise UsageError(answer["refused"])
        return answer, returned

    def _ask(
        self,
        do: str,
        key: str,
        values: Sequence[bytes | None],
        amount: int,
        about: int | None = None,
    ) -> int:
        """Send a request and return its number (for ``forget``: the one that it is about)."""
        with self._changed:
            self._raise_failure()
            if about is None:
                self._last_number += 1
                self._answers[self._last_number] = None
            number = about or self._last_number
        request = {"id": number, "do": do, "key": key}
        if amount:
            request["amount"] = amount
        try:
            self._connection.send(_pack(request, values))
        except BaseException:
            with self._changed:
                self._answers.pop(number, None)
                self._raise_failure()
            raise
        return number

    def _answer(self, number: int, deadline: Deadline) -> tuple[dict[str, Any], Values]:
        try:
            while True:
                with self._changed:
                    answer = self._answers[number]
                    if answer is not None:
                        return answer
                    self._raise_failure()
                    if deadline.expired():
                        raise _NotInTime
                    if self._somebody_reads:
                        self._changed.wait(deadline.remaining())
                        continue
                    self._somebody_reads = True
                self._read_for_all(deadline)
        finally:
            with self._changed:
                del self._answers[number]

    def _read_for_all(self, deadline: Deadline) -> None:
        message: bytes | None = None
        failure: FarandoleError | None = None
        try:
            message = self._connection.receive(deadline)
        except DeadlineError:
            raise _NotInTime from None
        except (ConnectionLost, AuthenticationError) as error:
            failure = error
        finally:
            with self._changed:
                self._somebody_reads = False
                if message is not None:
                    answer, values = _unpack(message)
                    if answer["id"] in self._answers:  # Else its caller has given up.
                        self._answers[answer["id"]] = (answer, values)
                if failure is not None:
                    self._failure = failure
                self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"The job's store is lost. {self._failure.message}")


class _NotInTime(Exception):
    """The deadline passed; the caller knows what was waited for."""


def _set(store: LocalStore, key: str, amount: int, values: Values) -> tuple[Any, Values]:
    store.set(key, _present(values))
    return None, []


def _compare_and_set(
    store: LocalStore, key: str, amount: int, values: Values
) -> tuple[Any, Values]:
    expected, desired = values
    return None, [store.compare_and_set(key, expected, _present([desired]))]


_DOES: dict[str, Callable[[LocalStore, str, int, Values], tuple[Any, Values]]] = {
    "set": _set,
    "peek": lambda store, key, amount, values: (None, [store.peek(key)]),
    "add": lambda store, key, amount, values: (store.add(key, amount), []),
    "compare_and_set": _compare_and_set,
    "delete": lambda store, key, amount, values: (store.delete(key), []),
    "keys": lambda store, key, amount, values: (store.keys(key), []),
}


def _pack(header: dict[str, Any], values: Sequence[bytes | None]) -> bytes:
    header["sizes"] = [None if value is None else len(value) for value in values]
    present = (value for value in values if value is not None)
    return b"".join((json.dumps(header).encode("ascii"), b"\n", *present))


def _unpack(message: bytes) -> tuple[dict[str, Any], Values]:
    line, _, rest = message.partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    values: Values = []
    at = 0
    for size in header["sizes"]:
        values.append(None if size is None else rest[at : at + size])
        at += size or 0
    return header, values


def _present(values: Values) -> bytes:
    (value,) = values
    if value is None:
        raise FarandoleBug("The store's protocol has no value where there must be one.")
    return value
