"""One blocking end against real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from farandole.core import wire
from farandole.core.address import Address
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
from farandole.core.wire import Connection, Session, connect

pytestmark = pytest.mark.usefixtures("no_leaks")


class Echo:
    def on_message(self, peer: Peer, message: bytes) -> None:
        if message == b"leave":
            peer.close()
        else:
            peer.send(message)

    def on_close(self, peer: Peer, error: FarandoleError | None) -> None:
        pass


@pytest.fixture
def echo(secret: Secret, no_leaks: None) -> Iterator[Server]:
    server = Server(secret, Echo())
    yield server
    server.close()


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def address_of(listener: socket.socket) -> Address:
    return Address(*listener.getsockname())


def accept_as_server(listener: socket.socket, secret: Secret) -> tuple[socket.socket, Session]:
    """The server's end of a handshake, by hand."""
    sock, _ = listener.accept()
    session = Session(secret, "server")
    while not session.is_open:
        sock.sendall(session.take_outgoing())
        session.receive(sock.recv(session.wanted))
    sock.sendall(session.take_outgoing())
    return sock, session


@pytest.mark.parametrize("size", [0, 1, 100, 70_000, 5_000_000])
def test_messages_come_back(echo: Server, secret: Secret, soon: Deadline, size: int) -> None:
    message = os.urandom(size)
    with connect(echo.address, secret, soon) as connection:
        for _ in range(2):
            connection.send(message)
            assert connection.receive(soon) == message


def test_many_messages_sent_at_once_arrive_in_order(
    echo: Server, secret: Secret, soon: Deadline
) -> None:
    with connect(echo.address, secret, soon) as connection:
        for number in range(2000):
            connection.send(b"%d" % number)
        assert [int(connection.receive(soon)) for _ in range(2000)] == list(range(2000))


def test_threads_can_share_a_connection(echo: Server, secret: Secret, soon: Deadline) -> None:
    received = []

    def receive() -> None:
        received.extend(connection.receive(soon) for _ in range(300))

    def send(number: int) -> None:
        for each in range(100):
            connection.send(b"%d" % (number * 100 + each))

    with connect(echo.address, secret, soon) as connection:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
        threads += [threading.Thread(target=receive) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(map(int, received)) == list(range(600))


def test_a_silent_server_ends_at_the_deadline_which_the_error_names(
    echo: Server, secret: Secret, soon: Deadline
) -> None:
    with connect(echo.address, secret, soon) as connection:
        with pytest.raises(DeadlineError, match=r"127\.0\.0\.1:\d+ did not answer within 0\.05 s"):
            connection.receive(Deadline.after(0.05))
        connection.send(b"after that")
        assert connection.receive(soon) == b"after that"


def test_a_deadline_within_a_message_loses_nothing(secret: Secret, soon: Deadline) -> None:
    with listening() as listener:
        accepted: list[tuple[socket.socket, Session]] = []
        thread = threading.Thread(
            target=lambda: accepted.append(accept_as_server(listener, secret))
        )
        thread.start()
        with connect(address_of(listener), secret, soon) as connection:
            thread.join(20)
            ((sock, session),) = accepted
            with sock:
                frame = session.seal(b"in two parts")
                sock.sendall(frame[:9])
                with pytest.raises(DeadlineError):
                    connection.receive(Deadline.after(0.05))
                sock.sendall(frame[9:])
                assert connection.receive(soon) == b"in two parts"


def test_the_other_end_closing_is_connection_lost(
    echo: Server, secret: Secret, soon: Deadline
) -> None:
    with connect(echo.address, secret, soon) as connection:
        connection.send(b"leave")
        with pytest.raises(ConnectionLost, match="the other end closed it"):
            connection.receive(soon)


def test_closing_wakes_a_thread_that_receives(echo: Server, secret: Secret, soon: Deadline) -> None:
    connection = connect(echo.address, secret, soon)
    failures: list[Exception] = []
    entered = threading.Event()

    def receive() -> None:
        entered.set()
        try:
            connection.receive(Deadline.after(None))
        except ConnectionLost as error:
            failures.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    entered.wait(20)
    connection.close()
    thread.join(20)
    assert [str(error) for error in failures] == [
        f"The connection to {echo.address} is gone: it was closed here."
    ]
    connection.close()
    assert connection.fileno() == -1
    with pytest.raises(ConnectionLost, match="closed here"):
        connection.send(b"x")
    with pytest.raises(ConnectionLost, match="closed here"):
        connection.receive(soon)


def test_a_tampered_message_ends_the_connection(secret: Secret, soon: Deadline) -> None:
    with listening() as listener:
        accepted: list[tuple[socket.socket, Session]] = []
        thread = threading.Thread(
            target=lambda: accepted.append(accept_as_server(listener, secret))
        )
        thread.start()
        with connect(address_of(listener), secret, soon) as connection:
            thread.join(20)
            ((sock, session),) = accepted
            with sock:
                frame = bytearray(session.seal(b"pay 10"))
                frame[9] ^= 1
                sock.sendall(frame)
                with pytest.raises(AuthenticationError, match=r"127.*altered"):
                    connection.receive(soon)
                with pytest.raises(ConnectionLost):
                    connection.send(b"x")


def test_who_does_not_read_ends_the_connection(
    secret: Secret, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SEND_LIMIT", 0.05)
    with listening() as listener:
        accepted: list[tuple[socket.socket, Session]] = []
        thread = threading.Thread(
            target=lambda: accepted.append(accept_as_server(listener, secret))
        )
        thread.start()
        with connect(address_of(listener), secret, soon) as connection:
            thread.join(20)
            with accepted[0][0]:
                with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
                    connection.send(b"x" * 60_000_000)
                with pytest.raises(ConnectionLost, match="broken off"):
                    connection.send(b"x")


def test_a_message_over_the_limit_is_refused_and_the_connection_lives(
    echo: Server, secret: Secret, soon: Deadline
) -> None:
    with connect(echo.address, secret, soon, max_frame=10) as connection:
        with pytest.raises(UsageError, match="11 bytes"):
            connection.send(b"x" * 11)
        connection.send(b"x")
        assert connection.receive(soon) == b"x"


def test_another_secret_is_an_authentication_error_that_says_what_to_do(
    echo: Server, soon: Deadline
) -> None:
    with pytest.raises(AuthenticationError, match="same FARANDOLE_SECRET") as caught:
        connect(echo.address, Secret.new(), soon)
    assert str(echo.address) in caught.value.message


def test_a_server_of_another_kind_is_an_authentication_error(
    secret: Secret, soon: Deadline
) -> None:
    with listening() as listener:

        def answer() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\nno")
                sock.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AuthenticationError, match="no Farandole process"):
            connect(address_of(listener), secret, soon)
        thread.join(20)


def test_a_server_that_says_nothing_ends_at_the_deadline(secret: Secret) -> None:
    with listening() as listener, pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        connect(address_of(listener), secret, Deadline.after(0.1))


def test_a_handshake_that_breaks_off_is_tried_again_but_not_for_ever(
    secret: Secret, soon: Deadline
) -> None:
    with listening() as listener:
        attempts = []

        def break_off() -> None:
            for _ in range(wire.ATTEMPTS):
                sock, _ = listener.accept()
                attempts.append(sock.recv(10))
                sock.close()

        thread = threading.Thread(target=break_off)
        thread.start()
        with pytest.raises(ConnectionLost, match="broke the handshake off"):
            connect(address_of(listener), secret, soon)
        thread.join(20)
    assert len(attempts) == wire.ATTEMPTS


def test_nobody_there_is_connection_lost_at_once(secret: Secret) -> None:
    with listening() as listener:
        address = address_of(listener)
    with pytest.raises(ConnectionLost, match=rf"Cannot connect to {address}.*refused"):
        connect(address, secret, Deadline.after(None))


def test_a_patient_client_tries_until_the_deadline(secret: Secret) -> None:
    with listening() as listener:
        address = address_of(listener)
    with pytest.raises(DeadlineError, match=r"refused.*within 0\.2 s"):
        connect(address, secret, Deadline.after(0.2), patient=True)


def test_a_patient_client_meets_a_server_that_comes_later(secret: Secret, soon: Deadline) -> None:
    with listening() as listener:
        address = address_of(listener)
    connections: list[Connection] = []
    thread = threading.Thread(
        target=lambda: connections.append(connect(address, secret, soon, patient=True))
    )
    thread.start()
    server = Server(secret, Echo(), port=address.port)
    thread.join(20)
    (connection,) = connections
    connection.close()
    server.close()


def test_an_unknown_host_is_connection_lost(secret: Secret, soon: Deadline) -> None:
    with pytest.raises(ConnectionLost, match=r"no-such-host\.invalid:4711"):
        connect(Address("no-such-host.invalid", 4711), secret, soon)


def test_a_socket_that_meets_itself_has_met_nobody(
    secret: Secret, soon: Deadline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet_itself(address: Address, timeout: float | None) -> socket.socket:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        return sock

    monkeypatch.setattr(socket, "create_connection", meet_itself)
    with pytest.raises(ConnectionLost, match="nobody listens there"):
        connect(Address("127.0.0.1", 4711), secret, soon)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node7:4711", Address("node7", 4711)),
        ("10.0.0.1:1", Address("10.0.0.1", 1)),
        ("[::1]:65535", Address("::1", 65535)),
    ],
)
def test_addresses_read_and_write(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "node7", ":4711", "node7:", "node7:0", "node7:65536", "node7:x", "::1:80", "a b:1"]
)
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        Address.parse(text)
