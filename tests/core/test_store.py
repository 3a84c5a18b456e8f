"""One contract, every store: each test runs on all of them unless it says otherwise."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core import store_remote
from farandole.core.clock import Deadline
from farandole.core.errors import (
    AuthenticationError,
    ConnectionLost,
    DeadlineError,
    FarandoleError,
    UsageError,
)
from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.core.store import LocalStore, PrefixStore, Store, StoreClient, StoreServer

pytestmark = pytest.mark.usefixtures("no_leaks")


def _local() -> Iterator[Store]:
    store = LocalStore()
    yield store
    store.close()


def _remote() -> Iterator[Store]:
    secret = Secret.new()
    server = StoreServer(secret)
    client = StoreClient(server.address, secret, Deadline.after(20))
    yield client
    client.close()
    server.close()


def _prefixed() -> Iterator[Store]:
    store = LocalStore()
    store.set("other", b"not seen through the prefix")
    yield PrefixStore(PrefixStore(store, "job/"), "generation/3/")
    assert store.peek("other") == b"not seen through the prefix"
    assert all(key.startswith("job/generation/3/") for key in store.keys("") if key != "other")
    store.close()


@pytest.fixture(params=[_local, _remote, _prefixed], ids=["local", "remote", "prefixed"])
def store(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Store]:
    yield from request.param()


@pytest.fixture
def server(secret: Secret, no_leaks: None) -> Iterator[StoreServer]:
    made = StoreServer(secret)
    yield made
    made.close()


@pytest.fixture
def client(server: StoreServer, secret: Secret, soon: Deadline) -> Iterator[StoreClient]:
    made = StoreClient(server.address, secret, soon)
    yield made
    made.close()


def in_thread(work: Callable[[], object]) -> queue.Queue[object]:
    """Run ``work`` aside; its result or exception comes through the queue."""
    results: queue.Queue[object] = queue.Queue()

    def run() -> None:
        try:
            results.put(work())
        except FarandoleError as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    return results


@pytest.mark.parametrize("value", [b"", b"text", b"\n{}\0\xff", b"x" * 3_000_000], ids=len)
def test_a_value_is_there_once_it_is_set(store: Store, soon: Deadline, value: bytes) -> None:
    assert store.peek("key") is None
    store.set("key", value)
    assert store.peek("key") == value
    assert store.get("key", soon) == value
    store.set("key", b"another")
    assert store.get("key", soon) == b"another"


@pytest.mark.parametrize("key", ["", "a/b c", 'quote"back\\slash\n', "été/🎉"])
def test_any_text_is_a_key(store: Store, soon: Deadline, key: str) -> None:
    store.set(key, b"1")
    assert store.get(key, soon) == b"1"
    assert store.keys("") == [key]


def test_get_waits_for_set(store: Store, soon: Deadline) -> None:
    results = in_thread(lambda: store.get("late", soon))
    store.set("early", b"1")
    assert store.get("early", soon) == b"1"  # The one that waits holds up nobody.
    store.set("late", b"2")
    assert results.get(timeout=20) == b"2"


def test_every_waiter_is_woken(store: Store, soon: Deadline) -> None:
    waiters = [in_thread(lambda: store.get("late", soon)) for _ in range(20)]
    store.set("late", b"2")
    assert [each.get(timeout=20) for each in waiters] == [b"2"] * 20


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_key_that_is_not_set_ends_at_the_deadline_which_the_error_names(
    store: Store, soon: Deadline, seconds: float
) -> None:
    with pytest.raises(DeadlineError, match=f"never.* was not set .*within {seconds:g} s"):
        store.get("never", Deadline.after(seconds))
    store.set("never", b"after all")
    assert store.get("never", soon) == b"after all"


def test_add_counts_from_zero_and_leaves_decimal_text(store: Store, soon: Deadline) -> None:
    assert store.add("count", 3) == 3
    assert store.add("count", -5) == -2
    assert store.add("count", 0) == -2
    assert store.get("count", soon) == b"-2"
    store.set("count", b"40")
    assert store.add("count", 2) == 42


def test_add_refuses_what_is_no_number_and_leaves_it(store: Store) -> None:
    store.set("name", b"rank 0")
    with pytest.raises(UsageError, match=r"name.*rank 0"):
        store.add("name", 1)
    assert store.peek("name") == b"rank 0"


def test_add_wakes_waiters(store: Store, soon: Deadline) -> None:
    results = in_thread(lambda: store.get("count", soon))
    store.add("count", 1)
    assert results.get(timeout=20) == b"1"


def test_compare_and_set(store: Store, soon: Deadline) -> None:
    assert store.compare_and_set("key", b"something", b"new") == b""
    assert store.peek("key") is None
    assert store.compare_and_set("key", None, b"first") == b"first"
    assert store.compare_and_set("key", None, b"second") == b"first"
    assert store.compare_and_set("key", b"wrong", b"second") == b"first"
    assert store.compare_and_set("key", b"first", b"") == b""
    assert store.compare_and_set("key", b"", b"last") == b"last"
    assert store.get("key", soon) == b"last"


def test_compare_and_set_wakes_waiters(store: Store, soon: Deadline) -> None:
    results = in_thread(lambda: store.get("key", soon))
    store.compare_and_set("key", None, b"1")
    assert results.get(timeout=20) == b"1"


def test_delete_and_keys(store: Store) -> None:
    assert store.keys("") == []
    for key in ("b/2", "a/1", "b/1"):
        store.set(key, b"")
    assert store.keys("b/") == ["b/1", "b/2"]
    assert store.keys("") == ["a/1", "b/1", "b/2"]
    assert store.keys("c") == []
    assert store.delete("b/1") is True
    assert store.delete("b/1") is False
    assert store.keys("b/") == ["b/2"]


def test_a_deleted_key_is_waited_for_again(store: Store) -> None:
    store.set("key", b"1")
    store.delete("key")
    with pytest.raises(DeadlineError):
        store.get("key", Deadline.after(0.02))


def test_many_threads_see_one_order(store: Store, soon: Deadline) -> None:
    """Increments by ``add`` and by ``compare_and_set``, with waits in between: none is lost."""

    def work(number: int) -> None:
        for each in range(25):
            store.add("added", 1)
            seen = store.peek("swapped")
            while True:
                wanted = b"%d" % (int(seen or b"0") + 1) + b" by %d" % number
                now = store.compare_and_set("swapped", seen, wanted.split()[0])
                if now == wanted.split()[0]:
                    break
                seen = now
            store.set(f"done/{number}/{each}", b"1")
            store.get(f"done/{(number + 1) % 8}/{each}", soon)

    done = [in_thread(lambda number=number: work(number)) for number in range(8)]
    assert [each.get(timeout=60) for each in done] == [None] * 8
    assert store.peek("added") == b"200"
    assert len(store.keys("done/")) == 200


def test_closing_ends_those_who_wait(secret: Secret, soon: Deadline) -> None:
    store = LocalStore()
    results = in_thread(lambda: store.get("never", soon))
    while not store._watchers:
        time.sleep(0.001)
    store.close()
    store.close()
    assert isinstance(results.get(timeout=20), ConnectionLost)
    for use in (
        lambda: store.get("key", soon),
        lambda: store.peek("key"),
        lambda: store.set("key", b""),
    ):
        with pytest.raises(ConnectionLost, match="closed"):
            use()


def test_a_store_that_is_waited_for_in_vain_keeps_no_waiters() -> None:
    store = LocalStore()
    for _ in range(3):
        with pytest.raises(DeadlineError):
            store.get("never", Deadline.after(0.0))
    assert store._watchers == {}


commands = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("ab"), st.sampled_from([b"", b"1", b"x"])),
        st.tuples(st.just("peek"), st.sampled_from("ab")),
        st.tuples(st.just("add"), st.sampled_from("ab"), st.integers(-3, 3)),
        st.tuples(
            st.just("compare_and_set"),
            st.sampled_from("ab"),
            st.sampled_from([None, b"", b"1", b"x"]),
            st.sampled_from([b"", b"1", b"x"]),
        ),
        st.tuples(st.just("delete"), st.sampled_from("ab")),
        st.tuples(st.just("keys"), st.sampled_from(["", "a"])),
    ),
    max_size=12,
)


def test_remote_and_local_answer_alike(client: StoreClient) -> None:
    @given(commands)
    def compare(steps: list[tuple[str, ...]]) -> None:
        local = LocalStore()
        for key in "ab":
            client.delete(key)
        for do, *arguments in steps:
            assert _outcome(client, do, arguments) == _outcome(local, do, arguments)

    compare()


def _outcome(store: Store, do: str, arguments: list[str]) -> object:
    try:
        return getattr(store, do)(*arguments)
    except UsageError as error:
        return error.message


def test_the_server_and_its_clients_share_one_store(
    server: StoreServer, client: StoreClient, soon: Deadline
) -> None:
    server.store.set("from the server", b"1")
    assert client.get("from the server", soon) == b"1"
    results = in_thread(lambda: client.get("later", soon))
    server.store.set("later", b"2")
    assert results.get(timeout=20) == b"2"
    client.set("from the client", b"3")
    assert server.store.get("from the client", soon) == b"3"


def test_a_store_that_was_lent_outlives_its_server(secret: Secret) -> None:
    store = LocalStore()
    server = StoreServer(secret, store=store)
    server.close()
    store.set("key", b"1")
    assert store.peek("key") == b"1"


def test_waits_that_were_given_up_or_whose_client_left_leave_nothing(
    server: StoreServer, client: StoreClient, secret: Secret, soon: Deadline
) -> None:
    with pytest.raises(DeadlineError):
        client.get("never", Deadline.after(0.02))
    leaving = StoreClient(server.address, secret, soon)
    results = in_thread(lambda: leaving.get("never", soon))
    _until(lambda: len(server.store._watchers.get("never", [])) == 1)
    leaving.close()
    assert isinstance(results.get(timeout=20), ConnectionLost)
    _until(lambda: not server.store._watchers)
    assert client.keys("") == []


def test_a_late_answer_is_not_taken_for_another(client: StoreClient, server: StoreServer) -> None:
    for number in range(50):
        results = in_thread(lambda number=number: client.get(f"k{number}", Deadline.after(0.001)))
        server.store.set(f"k{number}", b"%d" % number)
        outcome = results.get(timeout=20)
        assert outcome == b"%d" % number or isinstance(outcome, DeadlineError)
        assert client.peek(f"k{number}") == b"%d" % number


def test_a_server_that_closes_ends_every_call_and_all_later_ones(
    server: StoreServer, client: StoreClient, soon: Deadline
) -> None:
    waiting = [in_thread(lambda: client.get("never", soon)) for _ in range(4)]
    _until(lambda: len(server.store._watchers.get("never", [])) == 4)
    server.close()
    for results in waiting:
        assert isinstance(results.get(timeout=20), ConnectionLost)
    with pytest.raises(ConnectionLost, match=f"store is lost.*{server.address}"):
        client.peek("key")
    with pytest.raises(ConnectionLost):
        client.get("key", Deadline.after(0.01))


def test_a_server_process_that_is_killed_ends_every_call(secret: Secret, soon: Deadline) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(secret, theirs))
    process.start()
    client = StoreClient(ours.recv(), secret, soon)
    client.set("key", b"1")
    results = in_thread(lambda: client.get("never", soon))
    assert client.get("key", soon) == b"1"
    os.kill(process.pid or 0, signal.SIGKILL)
    assert isinstance(results.get(timeout=20), ConnectionLost)
    with pytest.raises(ConnectionLost):
        client.set("key", b"2")
    client.close()
    process.join(20)
    process.close()
    ours.close()
    theirs.close()


def _serve(secret: Secret, pipe: object) -> None:
    pipe.send(StoreServer(secret).address)  # type: ignore[attr-defined]
    threading.Event().wait(60)


def test_closing_a_client_ends_its_waits(
    server: StoreServer, client: StoreClient, soon: Deadline
) -> None:
    results = in_thread(lambda: client.get("never", soon))
    _until(lambda: bool(server.store._watchers))
    client.close()
    client.close()
    outcome = results.get(timeout=20)
    assert isinstance(outcome, ConnectionLost)
    assert "closed here" in str(outcome)


def test_a_client_with_another_secret_is_refused(server: StoreServer, soon: Deadline) -> None:
    with pytest.raises(AuthenticationError):
        StoreClient(server.address, Secret.new(), soon)


def test_a_server_that_does_not_answer_is_a_deadline_error_that_says_what_was_asked(
    secret: Secret, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute:
        def on_message(self, peer: Peer, message: bytes) -> None:
            pass

        def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
            pass

    monkeypatch.setattr(store_remote, "ANSWER_LIMIT", 0.05)
    server = Server(secret, Mute())
    client = StoreClient(server.address, secret, soon)
    with pytest.raises(DeadlineError, match=r"did not answer a 'peek' of the key 'k' within 0\.05"):
        client.peek("k")
    client.close()
    server.close()


@pytest.mark.parametrize(
    "message", [b"", b"\n", b"[]\n", b"{}\n", b'{"id": 1, "do": "eval", "key": "", "sizes": []}\n']
)
def test_a_request_that_makes_no_sense_drops_its_sender_alone(
    server: StoreServer, client: StoreClient, secret: Secret, soon: Deadline, message: bytes
) -> None:
    odd = StoreClient(server.address, secret, soon)
    odd._connection.send(message)
    with pytest.raises(ConnectionLost):
        odd.peek("key")
    odd.close()
    client.set("key", b"1")
    assert client.get("key", soon) == b"1"


def test_fifty_clients_at_once(server: StoreServer, secret: Secret, soon: Deadline) -> None:
    def join(number: int) -> int:
        store = StoreClient(server.address, secret, soon)
        store.set(f"here/{number}", b"1")
        for other in range(50):
            store.get(f"here/{other}", soon)
        store.close()
        return number

    joined = [in_thread(lambda number=number: join(number)) for number in range(50)]
    assert [each.get(timeout=60) for each in joined] == list(range(50))


def _until(condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(20.0)
    while not condition():
        assert not deadline.expired()
        time.sleep(0.001)
