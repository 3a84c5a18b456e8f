"""Messages over a socket, in pieces and under pressure."""

from __future__ import annotations

import os
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.channel import Channel, Message
from farandole.launch.sink import Sink


@given(
    st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=50)), max_size=5),
    st.integers(1, 40),
)
def test_messages_survive_any_cut(said: list[tuple[str, bytes]], cut: int) -> None:
    one, other = socket.socketpair()
    sender = Channel(one)
    for text, payload in said:
        sender.send("say", payload, text=text)
    sender.close()
    wire = b""
    while chunk := other.recv(65536):
        wire += chunk
    other.close()

    left, right = socket.socketpair()
    receiver = Channel(right)
    heard: list[Message] = []
    for start in range(0, len(wire), cut):
        left.sendall(wire[start : start + cut])
        heard += receiver.receive()
    assert heard == [Message("say", {"text": text}, payload) for text, payload in said]
    left.close()
    assert receiver.receive() == []
    assert receiver.closed
    receiver.close()


def test_a_full_socket_holds_nobody_up() -> None:
    one, other = socket.socketpair()
    sender, receiver = Channel(one), Channel(other)
    payload = os.urandom(1 << 20)
    for number in range(4):
        sender.send("data", payload, number=number)
    assert sender.unsent > 0
    heard: list[Message] = []
    while len(heard) < 4:
        heard += receiver.receive()
        sender.flush()
    assert [message.fields["number"] for message in heard] == [0, 1, 2, 3]
    assert all(message.payload == payload for message in heard)
    receiver.close()
    sender.send("data", payload)
    assert sender.closed
    sender.close()


def test_a_sink_never_blocks_and_loses_nothing() -> None:
    read, write = os.pipe()
    sink = Sink(write)
    data = os.urandom(300_000)
    sink.write(data)
    assert 0 < sink.pending < len(data)
    got: list[bytes] = []

    def drain() -> None:
        left = len(data)
        while left:
            chunk = os.read(read, 65536)
            left -= len(chunk)
            got.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    while sink.pending:
        sink.flush(timeout=1.0)
    reader.join()
    assert b"".join(got) == data
    os.close(read)
    sink.write(b"nobody reads this")
    assert sink.broken
    assert sink.pending == 0
    os.close(write)
