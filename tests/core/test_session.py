"""The rules of a connection, byte by byte: no socket here."""

from __future__ import annotations

import hmac
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.errors import AuthenticationError, UsageError
from farandole.core.secret import Secret
from farandole.core.session import HELLO_BYTES, MAGIC, PROOF_BYTES, REFUSAL, Session

SECRET = Secret(b"s" * 32)
MAX = 1000

messages_strategy = st.lists(st.binary(max_size=MAX), max_size=6)


def shake_hands(client: Session, server: Session) -> None:
    while not (client.is_open and server.is_open):
        assert server.receive(client.take_outgoing()) == []
        assert client.receive(server.take_outgoing()) == []


def open_pair(secret: Secret = SECRET, max_frame: int = MAX) -> tuple[Session, Session]:
    client, server = Session(secret, "client", max_frame), Session(secret, "server", max_frame)
    shake_hands(client, server)
    return client, server


def test_both_sides_open_after_two_messages_each() -> None:
    client, server = Session(SECRET, "client"), Session(SECRET, "server")
    assert (client.wanted, server.wanted) == (HELLO_BYTES, HELLO_BYTES)
    server.receive(client.take_outgoing())
    client.receive(server.take_outgoing())
    assert (client.wanted, server.wanted) == (PROOF_BYTES, PROOF_BYTES)
    assert not server.take_outgoing()  # The server proves itself to nobody who has not.
    server.receive(client.take_outgoing())
    assert server.is_open
    assert not client.is_open
    client.receive(server.take_outgoing())
    assert client.is_open


@given(messages_strategy, messages_strategy)
def test_messages_arrive_as_sent_both_ways(there: list[bytes], back: list[bytes]) -> None:
    client, server = open_pair()
    assert server.receive(b"".join(map(client.seal, there))) == there
    assert client.receive(b"".join(map(server.seal, back))) == back
    assert client.is_between_messages
    assert server.is_between_messages


@given(messages_strategy, st.lists(st.integers(1, 200), min_size=1))
def test_any_split_of_the_bytes_is_the_same(messages: list[bytes], cuts: list[int]) -> None:
    """The whole conversation, handshake included, in pieces of any size."""
    client, server = Session(SECRET, "client", MAX), Session(SECRET, "server", MAX)
    sizes = iter(cuts * 10_000)

    def feed(session: Session, data: bytes) -> list[bytes]:
        received = []
        while data:
            size = next(sizes)
            received += session.receive(data[:size])
            data = data[size:]
        return received

    while not client.is_open:
        feed(server, client.take_outgoing())
        feed(client, server.take_outgoing())
    assert feed(server, b"".join(map(client.seal, messages))) == messages


@given(messages_strategy)
def test_a_server_may_speak_right_after_its_proof(messages: list[bytes]) -> None:
    client, server = Session(SECRET, "client", MAX), Session(SECRET, "server", MAX)
    server.receive(client.take_outgoing())
    client.receive(server.take_outgoing())
    server.receive(client.take_outgoing())
    data = server.take_outgoing() + b"".join(map(server.seal, messages))
    assert client.receive(data) == messages


def test_the_client_with_another_secret_is_refused_and_told() -> None:
    client, server = Session(Secret.new(), "client"), Session(SECRET, "server")
    server.receive(client.take_outgoing())
    client.receive(server.take_outgoing())
    with pytest.raises(AuthenticationError, match="does not hold the job's secret"):
        server.receive(client.take_outgoing())
    answer = server.take_outgoing()
    assert answer == REFUSAL
    with pytest.raises(AuthenticationError, match="refused us"):
        client.receive(answer)
    assert not server.is_open
    assert not client.is_open


def test_a_server_that_accepts_everybody_does_not_pass_for_ours() -> None:
    client, server = Session(SECRET, "client"), Session(Secret.new(), "server")
    server.receive(client.take_outgoing())
    client.receive(server.take_outgoing())
    with pytest.raises(AuthenticationError, match="does not hold"):
        client.receive(b"x" * PROOF_BYTES)


def test_reflecting_what_a_session_says_proves_nothing() -> None:
    for role in ("client", "server"):
        session = Session(SECRET, role)  # type: ignore[arg-type]
        session.receive(session.take_outgoing())
        proof = session.take_outgoing() or b"\0" * PROOF_BYTES
        with pytest.raises(AuthenticationError):
            session.receive(proof)


def test_a_recorded_client_proves_nothing_to_a_later_session() -> None:
    client, server = Session(SECRET, "client"), Session(SECRET, "server")
    hello = client.take_outgoing()
    server.receive(hello)
    client.receive(server.take_outgoing())
    proof = client.take_outgoing()
    later = Session(SECRET, "server")
    later.receive(hello)
    with pytest.raises(AuthenticationError):
        later.receive(proof)


@given(st.binary(min_size=HELLO_BYTES, max_size=400))
def test_garbage_for_a_hello_is_refused(garbage: bytes) -> None:
    server = Session(SECRET, "server")
    with pytest.raises(AuthenticationError):
        server.receive(garbage + b"\0" * PROOF_BYTES)
    with pytest.raises(AuthenticationError):
        server.receive(b"more")


@given(st.binary(min_size=PROOF_BYTES, max_size=400))
def test_garbage_for_a_proof_is_refused(garbage: bytes) -> None:
    server = Session(SECRET, "server")
    server.receive(MAGIC + b"n" * 32)
    with pytest.raises(AuthenticationError):
        server.receive(garbage)


@given(st.binary(max_size=HELLO_BYTES - 1))
def test_nothing_happens_before_a_hello_is_complete(part: bytes) -> None:
    server = Session(SECRET, "server")
    server.take_outgoing()
    assert server.receive(part) == []
    assert server.wanted == HELLO_BYTES - len(part)
    assert server.take_outgoing() == b""


@given(messages_strategy.filter(bool), st.data())
def test_any_flipped_bit_is_noticed(messages: list[bytes], data: st.DataObject) -> None:
    client, server = open_pair()
    stream = bytearray(b"".join(map(client.seal, messages)))
    at = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[at // 8] ^= 1 << at % 8
    received = []
    try:
        received = server.receive(bytes(stream))
        # A length that was made larger waits for bytes that do not come: add what does.
        received += server.receive(b"\0" * (MAX + 100))
        noticed = False
    except AuthenticationError:
        noticed = True
    assert noticed
    assert received == messages[: len(received)]


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=5), st.data())
def test_repeating_dropping_and_reordering_are_noticed(
    messages: list[bytes], data: st.DataObject
) -> None:
    client, server = open_pair()
    frames = [client.seal(message) for message in messages]
    order = data.draw(st.lists(st.sampled_from(range(len(frames))), min_size=1, max_size=6))
    if order == list(range(len(order))):
        order = [*order, order[-1]]
    with pytest.raises(AuthenticationError, match="altered, repeated or left out"):
        server.receive(b"".join(frames[each] for each in order))


def test_what_one_side_said_is_not_taken_for_the_other_sides_words() -> None:
    client, server = open_pair()
    with pytest.raises(AuthenticationError):
        client.receive(client.seal(b"hello"))
    assert server.receive(b"") == []


def test_frames_of_another_connection_are_not_taken() -> None:
    client, _ = open_pair()
    _, server = open_pair()
    with pytest.raises(AuthenticationError):
        server.receive(client.seal(b"hello"))


@pytest.mark.parametrize("length", [MAX + 1, 2**31, 2**32 - 1])
def test_a_huge_length_is_refused_before_anything_is_allocated(length: int) -> None:
    _, server = open_pair()
    tracemalloc.start()
    try:
        with pytest.raises(AuthenticationError, match=f"{length} bytes, over the limit of {MAX}"):
            server.receive(length.to_bytes(4, "big"))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_announced_length_alone_allocates_nothing() -> None:
    _, server = open_pair(max_frame=64 * 1024 * 1024)
    tracemalloc.start()
    try:
        assert server.receive((60 * 1024 * 1024).to_bytes(4, "big")) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_messages_up_to_the_limit_and_no_longer_ones_can_be_sent() -> None:
    client, server = open_pair()
    assert server.receive(client.seal(b"x" * MAX)) == [b"x" * MAX]
    with pytest.raises(UsageError, match=f"{MAX + 1} bytes"):
        client.seal(b"x" * (MAX + 1))
    assert server.receive(client.seal(b"still works")) == [b"still works"]


def test_no_message_before_the_handshake() -> None:
    with pytest.raises(UsageError, match="handshake"):
        Session(SECRET, "client").seal(b"early")


def test_the_end_between_messages_and_within_one_can_be_told_apart() -> None:
    client, server = open_pair()
    frame = client.seal(b"hello")
    server.receive(frame[:7])
    assert not server.is_between_messages
    assert server.receive(frame[7:]) == [b"hello"]
    assert server.is_between_messages


def test_secrets_hide_compare_and_sign() -> None:
    secret = Secret.from_hex("ab" * 32)
    assert "ab" not in repr(secret) + str(secret) + f"{secret}"
    assert secret == Secret(b"\xab" * 32) != Secret.new()
    assert hash(secret) == hash(Secret(b"\xab" * 32))
    assert secret != "ab" * 32
    assert secret.sign(b"m") == hmac.digest(b"\xab" * 32, b"m", "sha256")
    assert Secret.from_hex(Secret.new().hex()) != Secret.new()


@pytest.mark.parametrize("text", ["", "ab" * 15, "xy" * 32])
def test_short_and_other_secrets_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Secret.from_hex(text)
