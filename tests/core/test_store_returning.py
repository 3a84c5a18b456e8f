"""A store whose server dies and comes back, or does not."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost, DeadlineError
from farandole.core.secret import Secret
from farandole.core.store import LocalStore, ReturningStore, Store, StoreServer

LIMIT = 20.0


def test_what_is_under_way_fails_and_what_comes_after_finds_the_new_one() -> None:
    secret = Secret.new()
    first = StoreServer(secret)
    store = ReturningStore(first.address, secret, Deadline.after(LIMIT), patience=LIMIT)
    seen: list[bytes | None] = []

    def on_return(fresh: Store) -> None:
        seen.append(fresh.peek("here"))
        fresh.set("back", b"1")

    store.on_return = on_return
    store.set("here", b"1")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            store.get("never", Deadline.after(LIMIT))
        except ConnectionLost as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    first.close()
    waiting.join(LIMIT)
    assert len(errors) == 1
    second = StoreServer(secret, port=first.address.port)
    assert store.peek("here") is None
    assert store.add("count", 2) == 2
    assert store.compare_and_set("here", None, b"2") == b"2"
    assert store.keys("") == ["back", "count", "here"]
    assert store.delete("here")
    assert store.get("back", Deadline.after(LIMIT)) == b"1"
    assert seen == [None]  # once, before anything else
    store.close()
    second.close()


def test_many_threads_connect_again_once() -> None:
    secret = Secret.new()
    first = StoreServer(secret)
    store = ReturningStore(first.address, secret, Deadline.after(LIMIT), patience=LIMIT)
    store.on_return = lambda fresh: fresh.set(f"back/{fresh.add('times', 1)}", b"")
    first.close()
    done: list[int] = []

    def call() -> None:
        end = time.monotonic() + LIMIT
        mine: list[int] = []
        while not mine and time.monotonic() < end:
            with contextlib.suppress(ConnectionLost):
                mine.append(store.add("calls", 1))
        done.extend(mine)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    kept = LocalStore()
    second = StoreServer(secret, port=first.address.port, store=kept)
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(done) == list(range(1, 9))
    assert kept.peek("times") == b"1"
    store.close()
    second.close()


@pytest.mark.parametrize("closes", [False, True])
def test_it_is_not_looked_for_for_ever(closes: bool) -> None:
    secret = Secret.new()
    server = StoreServer(secret)
    patience = LIMIT if closes else 0.3
    store = ReturningStore(server.address, secret, Deadline.after(LIMIT), patience=patience)
    server.close()
    with pytest.raises(ConnectionLost):
        store.peek("key")
    if closes:
        threading.Timer(0.2, store.close).start()
    with pytest.raises(ConnectionLost if closes else DeadlineError):
        store.peek("key")
    assert store.ended
    with pytest.raises(ConnectionLost if closes else DeadlineError):
        store.peek("key")


def test_who_closes_it_while_it_connects_is_heeded() -> None:
    secret = Secret.new()
    first = StoreServer(secret)
    store = ReturningStore(first.address, secret, Deadline.after(LIMIT), patience=LIMIT)
    first.close()
    with contextlib.suppress(ConnectionLost):
        store.set("lost", b"")
    second = StoreServer(secret, port=first.address.port)
    store.on_return = lambda fresh: store.close()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            store.set("late", b"")
    assert store.ended
    assert second.store.peek("late") is None
    second.close()
