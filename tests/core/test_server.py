from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.core import server as server_module
from farandole.core.clock import Deadline
from farandole.core.errors import (
    AuthenticationError,
    ConnectionLost,
    FarandoleBug,
    FarandoleError,
    SetupError,
    UsageError,
)
from farandole.core.secret import Secret
from farandole.core.server import Peer, Server
from farandole.core.wire import Connection, Session, connect

pytestmark = pytest.mark.usefixtures("no_leaks")


class Recorder:
    """Echoes, and tells the test what happened."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[Peer, bytes]] = queue.Queue()
        self.ends: queue.Queue[tuple[Peer, FarandoleError | None]] = queue.Queue()
        self.threads: set[str] = set()

    def on_message(self, peer: Peer, message: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        self.messages.put((peer, message))
        if message == b"refuse me":
            raise UsageError("That is no message.")
        if message == b"break":
            raise RuntimeError("boom")
        peer.send(message)

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        self.threads.add(threading.current_thread().name)
        self.ends.put((peer, error))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def server(secret: Secret, recorder: Recorder, no_leaks: None) -> Iterator[Server]:
    made = Server(secret, recorder)
    yield made
    made.close()


def stranger(server: Server) -> socket.socket:
    sock = socket.create_connection(server.address)
    sock.settimeout(20)
    return sock


def wait_for_end(sock: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    said = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1000):
            said += data
    return said


def echoes(connection: Connection, soon: Deadline) -> bool:
    connection.send(b"are you there")
    return connection.receive(soon) == b"are you there"


def test_a_server_listens_on_loopback_with_a_port_of_its_own(server: Server) -> None:
    assert server.address.host == "127.0.0.1"
    assert server.address.port > 0


def test_ipv6(secret: Secret, recorder: Recorder, soon: Deadline) -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    server = Server(secret, recorder, host="::1")
    with connect(server.address, secret, soon) as connection:
        assert echoes(connection, soon)
    server.close()


def test_a_port_that_is_taken_is_a_setup_error(server: Server, secret: Secret) -> None:
    with pytest.raises(SetupError, match=f"port {server.address.port}"):
        Server(secret, Recorder(), port=server.address.port)


def test_all_calls_come_in_the_servers_thread(
    server: Server, recorder: Recorder, secret: Secret, soon: Deadline
) -> None:
    with connect(server.address, secret, soon) as connection:
        assert echoes(connection, soon)
    recorder.ends.get(timeout=20)
    names: queue.Queue[str] = queue.Queue()
    server.call_soon(lambda: names.put(threading.current_thread().name))
    server.call_later(0.0, lambda: names.put(threading.current_thread().name))
    recorder.threads |= {names.get(timeout=20), names.get(timeout=20)}
    assert recorder.threads == {"farandole-server"}


def test_a_goodbye_between_messages_is_no_error(
    server: Server, recorder: Recorder, secret: Secret, soon: Deadline
) -> None:
    with connect(server.address, secret, soon) as connection:
        assert echoes(connection, soon)
    peer, error = recorder.ends.get(timeout=20)
    assert peer is recorder.messages.get(timeout=20)[0]
    assert error is None
    peer.send(b"to nobody")


def test_an_end_within_a_message_is_an_error(
    server: Server, recorder: Recorder, secret: Secret
) -> None:
    sock, session = _handshake(server, secret)
    sock.sendall(session.seal(b"whole") + session.seal(b"half")[:10])
    recorder.messages.get(timeout=20)
    sock.close()
    assert isinstance(recorder.ends.get(timeout=20)[1], ConnectionLost)


def test_a_peer_that_is_reset_is_an_error(
    server: Server, recorder: Recorder, secret: Secret
) -> None:
    sock, session = _handshake(server, secret)
    sock.sendall(session.seal(b"x"))
    recorder.messages.get(timeout=20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    assert isinstance(recorder.ends.get(timeout=20)[1], ConnectionLost)


def test_tampering_ends_the_peer_and_nothing_of_it_reaches_the_handler(
    server: Server, recorder: Recorder, secret: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    sock, session = _handshake(server, secret)
    frame = session.seal(b"x")
    sock.sendall(frame + frame)
    assert recorder.messages.empty()
    assert isinstance(recorder.ends.get(timeout=20)[1], AuthenticationError)
    wait_for_end(sock)
    assert "altered" in caplog.text


@pytest.mark.parametrize(
    ("message", "kind"), [(b"refuse me", UsageError), (b"break", FarandoleBug)]
)
def test_a_handler_that_fails_drops_that_peer_alone(
    server: Server,
    recorder: Recorder,
    secret: Secret,
    soon: Deadline,
    caplog: pytest.LogCaptureFixture,
    message: bytes,
    kind: type[Exception],
) -> None:
    with (
        connect(server.address, secret, soon) as good,
        connect(server.address, secret, soon) as bad,
    ):
        bad.send(message)
        with pytest.raises(ConnectionLost):
            bad.receive(soon)
        assert isinstance(recorder.ends.get(timeout=20)[1], kind)
        assert echoes(good, soon)
    assert caplog.records


def test_what_was_sent_before_a_close_arrives(
    server: Server, recorder: Recorder, secret: Secret, soon: Deadline
) -> None:
    with connect(server.address, secret, soon) as connection:
        connection.send(b"first")
        peer, _ = recorder.messages.get(timeout=20)
        assert connection.receive(soon) == b"first"
        large = os.urandom(8_000_000)
        peer.send(large)
        peer.close()
        peer.send(b"after the close")
        assert connection.receive(soon) == large
        with pytest.raises(ConnectionLost):
            connection.receive(soon)
    assert recorder.ends.get(timeout=20) == (peer, None)


def test_what_was_sent_before_the_servers_end_arrives(
    secret: Secret, recorder: Recorder, soon: Deadline
) -> None:
    server = Server(secret, recorder)
    with connect(server.address, secret, soon) as connection:
        connection.send(b"first")
        peer, _ = recorder.messages.get(timeout=20)
        assert connection.receive(soon) == b"first"
        large = os.urandom(8_000_000)
        peer.send(large)
        closing = threading.Thread(target=server.close)
        closing.start()
        assert connection.receive(soon) == large
        closing.join(20)
    assert recorder.ends.empty()
    server.close()


def test_a_handler_may_close_the_server(secret: Secret, soon: Deadline) -> None:
    class Closing(Recorder):
        def on_message(self, peer: Peer, message: bytes) -> None:
            server.close()

    server = Server(secret, Closing())
    with connect(server.address, secret, soon) as connection:
        connection.send(b"close")
        with pytest.raises(ConnectionLost):
            connection.receive(soon)
    server.close()


def test_threads_can_send_to_one_peer(
    server: Server, recorder: Recorder, secret: Secret, soon: Deadline
) -> None:
    with connect(server.address, secret, soon) as connection:
        connection.send(b"hello")
        peer, _ = recorder.messages.get(timeout=20)
        assert connection.receive(soon) == b"hello"

        def send(number: int) -> None:
            for each in range(50):
                peer.send(b"%d" % (number * 50 + each) + b" " * 20_000)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        received = [int(connection.receive(soon)) for _ in range(200)]
        for thread in threads:
            thread.join(20)
    assert sorted(received) == list(range(200))


def test_a_peer_that_does_not_read_is_dropped_and_holds_up_nobody(
    secret: Secret, recorder: Recorder, soon: Deadline
) -> None:
    server = Server(secret, recorder, max_frame=1_000_000)
    with (
        connect(server.address, secret, soon) as idle,
        connect(server.address, secret, soon) as lively,
    ):
        idle.send(b"hello")
        peer, _ = recorder.messages.get(timeout=20)
        while recorder.ends.empty():
            peer.send(b"x" * 1_000_000)
        assert echoes(lively, soon)
        dropped, error = recorder.ends.get(timeout=20)
    assert dropped is peer
    assert isinstance(error, ConnectionLost)
    assert "does not read" in str(error)
    server.close()


def test_timers_fire_in_order_unless_cancelled(server: Server) -> None:
    fired: queue.Queue[str] = queue.Queue()
    server.call_later(0.06, lambda: fired.put("last"))
    server.call_later(0.02, lambda: fired.put("cancelled")).cancel()
    server.call_later(0.01, lambda: fired.put("first"))
    server.call_soon(lambda: fired.put("at once"))
    assert [fired.get(timeout=20) for _ in range(3)] == ["at once", "first", "last"]


def test_a_call_that_fails_is_logged_and_the_server_lives(
    server: Server, secret: Secret, soon: Deadline, caplog: pytest.LogCaptureFixture
) -> None:
    server.call_soon(lambda: {}["missing"])
    with connect(server.address, secret, soon) as connection:
        assert echoes(connection, soon)
    assert "KeyError" in caplog.text


def test_an_idle_server_uses_no_processor_time(
    server: Server, secret: Secret, soon: Deadline
) -> None:
    with connect(server.address, secret, soon) as connection, stranger(server):
        assert echoes(connection, soon)
        before = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.05


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4])
def test_strangers_are_refused_and_logged_once_for_each_host(
    server: Server, recorder: Recorder, caplog: pytest.LogCaptureFixture, says: bytes
) -> None:
    with caplog.at_level(logging.WARNING, "farandole"):
        for _ in range(5):
            sock = stranger(server)
            with contextlib.suppress(OSError):  # It may have been shown the door by then.
                sock.sendall(says)
                sock.shutdown(socket.SHUT_WR)
            wait_for_end(sock)
    assert caplog.text.count("Refused a connection from 127.0.0.1") == 1
    assert recorder.messages.empty()
    assert recorder.ends.empty()


def test_other_secrets_are_refused_and_never_shown(
    server: Server,
    recorder: Recorder,
    secret: Secret,
    soon: Deadline,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        with pytest.raises(AuthenticationError):
            connect(server.address, Secret.new(), soon)
    assert caplog.text.count("does not hold the job's secret") == 1
    assert secret.hex() not in caplog.text
    assert recorder.ends.empty()


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.binary(min_size=1, max_size=100), max_size=5))
def test_no_garbage_reaches_the_handler_or_hurts_the_others(
    server: Server, recorder: Recorder, secret: Secret, pieces: list[bytes]
) -> None:
    with connect(server.address, secret, Deadline.after(20)) as connection:
        sock = stranger(server)
        with contextlib.suppress(OSError):
            for piece in pieces:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        wait_for_end(sock)
        connection.send(b"are you there")
        assert connection.receive(Deadline.after(20)) == b"are you there"
    assert {recorder.messages.get(timeout=20)[1]} == {b"are you there"}
    assert recorder.messages.empty()


def test_a_stranger_that_dawdles_is_dropped_while_others_are_served(
    secret: Secret, recorder: Recorder, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_LIMIT", 0.1)
    server = Server(secret, recorder)
    silent, dawdling = stranger(server), stranger(server)
    dawdling.sendall(b"farand")
    with connect(server.address, secret, soon) as connection:
        assert echoes(connection, soon)
        for sock in (silent, dawdling):
            assert wait_for_end(sock).startswith(b"farandole wire")
        assert echoes(connection, soon)
    server.close()


def test_a_crowd_of_strangers_cannot_keep_ranks_out(
    secret: Secret, recorder: Recorder, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 8)
    monkeypatch.setattr(server_module, "CROWDED_LIMIT", 0.05)
    server = Server(secret, recorder)
    with connect(server.address, secret, soon) as early:
        crowd = [stranger(server) for _ in range(40)]
        assert echoes(early, soon)
        with connect(server.address, secret, soon) as late:
            assert echoes(late, soon)
        for sock in crowd:
            sock.close()
    server.close()


def test_only_so_many_strangers_are_heard_at_a_time(
    secret: Secret, recorder: Recorder, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 8)
    monkeypatch.setattr(server_module, "CROWDED_LIMIT", 60.0)
    server = Server(secret, recorder)
    with connect(server.address, secret, soon) as early, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(stranger(server)) for _ in range(20)]
        for sock in crowd[:8]:
            assert sock.recv(1000).startswith(b"farandole wire")
        assert echoes(early, soon)
        assert select.select(crowd, [], [], 0.1)[0] == []
    server.close()


def test_many_ranks_that_come_at_once_all_get_in(
    secret: Secret, recorder: Recorder, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 4)
    server = Server(secret, recorder)
    answers: queue.Queue[bool] = queue.Queue()

    def join() -> None:
        with connect(server.address, secret, soon) as connection:
            answers.put(echoes(connection, soon))

    threads = [threading.Thread(target=join) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [answers.get(timeout=1) for _ in threads] == [True] * 50
    server.close()


def test_without_free_descriptors_the_server_waits_and_goes_on(
    server: Server,
    recorder: Recorder,
    secret: Secret,
    soon: Deadline,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server_module, "DESCRIPTOR_PAUSE", 0.05)
    real, failures = server._listener, [OSError(24, "Too many open files")]

    class Short:
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(server, "_listener", Short())
    with connect(server.address, secret, soon) as connection:
        assert echoes(connection, soon)
    assert "Too many open files" in caplog.text


def test_a_forked_child_holds_no_connection_open(
    server: Server, recorder: Recorder, secret: Secret, soon: Deadline
) -> None:
    connection = connect(server.address, secret, soon)
    assert echoes(connection, soon)
    blocked_read, blocked_write = os.pipe()
    report_read, report_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            connection.send(b"from the child")
        except ConnectionLost as error:
            os.write(report_write, str(error).encode())
        os.read(blocked_read, 1)
        os._exit(0)
    try:
        assert b"belongs to the parent process" in os.read(report_read, 1000)
        assert echoes(connection, soon)  # The child has not disturbed the parent's.
        connection.close()
        assert recorder.ends.get(timeout=20)[1] is None  # It is gone although the child lives.
    finally:
        os.write(blocked_write, b"x")
        os.waitpid(child, 0)
        for descriptor in (blocked_read, blocked_write, report_read, report_write):
            os.close(descriptor)


def test_a_forked_child_does_not_keep_the_port(secret: Secret, recorder: Recorder) -> None:
    server = Server(secret, recorder)
    blocked_read, blocked_write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        server.close()
        os.write(ready_write, b"x")
        os.read(blocked_read, 1)
        os._exit(0)
    try:
        os.read(ready_read, 1)
        server.close()
        with pytest.raises(ConnectionLost, match="refused"):
            connect(server.address, secret, Deadline.after(20))
    finally:
        os.write(blocked_write, b"x")
        os.waitpid(child, 0)
        for descriptor in (blocked_read, blocked_write, ready_read, ready_write):
            os.close(descriptor)


def _handshake(server: Server, secret: Secret) -> tuple[socket.socket, Session]:
    sock, session = stranger(server), Session(secret, "client")
    while not session.is_open:
        sock.sendall(session.take_outgoing())
        session.receive(sock.recv(session.wanted))
    return sock, session
