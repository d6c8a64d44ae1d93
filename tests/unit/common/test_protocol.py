"""Messages over real socketpairs: framed, never blocking, and honest about a peer that is gone."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Channel, Limits
from support.runner import NOISE_S, PATIENCE_S

BIG = b"x" * (8 << 20)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a socketpair, closed after the test."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def frame(message: object) -> bytes:
    """Return a message as it stands on the wire: length, then pickle."""
    data = pickle.dumps(message)
    return struct.pack("!Q", len(data)) + data


def collect(receiver: Channel, sender: Channel, count: int, timeout_s: float = PATIENCE_S) -> list[Any]:
    """Let both ends run in turn until so many messages have arrived."""
    messages: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(messages) < count and time.monotonic() < deadline:
        sender.flush()
        messages += receiver.receive()
    return messages


def test_messages_arrive_whole_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    """What one end sends, the other receives, with its types; then there is nothing more."""
    a, b = map(Channel, ends)
    sent = [1, "two", Limits(1.5), {"k": [None, b""]}, ""]
    for message in sent:
        a.send(message)
    assert not a.wants_to_write
    assert b.receive() == sent
    assert b.receive() == []
    b.send("back")
    assert a.receive() == ["back"]
    assert not a.disconnected and not b.disconnected


def test_a_message_byte_by_byte(ends: tuple[socket.socket, socket.socket]) -> None:
    """A message is handed out when its last byte is there, and the bytes of the next one are kept."""
    raw, channel = ends[0], Channel(ends[1])
    wire = frame(["first"]) + frame("second")
    received = []
    for position in range(len(wire)):
        raw.sendall(wire[position : position + 1])
        received.append((position + 1, channel.receive()))
    arrived = [(position, messages) for position, messages in received if messages]
    assert arrived == [(len(frame(["first"])), [["first"]]), (len(wire), ["second"])]


def test_a_peer_that_does_not_read_blocks_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    """A message that the socket does not take stays queued, and goes out piece by piece when the peer reads."""
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    a, b = map(Channel, ends)
    began = time.monotonic()
    for number in range(50):
        a.send((number, BIG[:20_000]))
    assert time.monotonic() - began < 5 + NOISE_S
    assert a.wants_to_write
    assert b.receive() == [] or b.receive() == []
    messages = collect(b, a, 50)
    assert [number for number, _ in messages] == list(range(50))
    assert all(data == BIG[:20_000] for _, data in messages)
    assert not a.wants_to_write


def test_a_big_message(ends: tuple[socket.socket, socket.socket]) -> None:
    """Several MiB pass in both directions at once, in a time that does not grow with the square of the size."""
    a, b = map(Channel, ends)
    began = time.monotonic()
    a.send(BIG)
    b.send(BIG[::2])
    received: list[list[Any]] = [[], []]
    while not all(received) and time.monotonic() - began < PATIENCE_S:
        for place, channel in enumerate((a, b)):
            channel.flush()
            received[place] += channel.receive()
    assert received == [[BIG[::2]], [BIG]]
    assert time.monotonic() - began < PATIENCE_S


def test_what_arrived_before_the_peer_went_is_handed_out(ends: tuple[socket.socket, socket.socket]) -> None:
    """A last word is read although its sender is gone, and only then is the channel known to be lost."""
    a, b = map(Channel, ends)
    a.send("last word")
    a.close()
    assert b.receive() == ["last word"]
    assert b.disconnected
    assert b.receive() == []


def test_half_a_message_of_a_peer_that_went(ends: tuple[socket.socket, socket.socket]) -> None:
    """A message that never became whole is not handed out."""
    raw, channel = ends[0], Channel(ends[1])
    raw.sendall(frame("whole") + frame("half")[:-1])
    raw.close()
    assert channel.receive() == ["whole"]
    assert channel.disconnected


def test_sending_to_a_peer_that_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    """Sending to nobody raises nothing and leaves nothing to write; `receive` then says that the peer is lost."""
    a, b = map(Channel, ends)
    b.close()
    a.send("anybody?")
    a.flush()
    assert not a.wants_to_write
    assert a.receive() == []
    assert a.disconnected
    a.send("hello?")
    assert not a.wants_to_write


def test_a_last_word_is_read_after_a_failed_send(ends: tuple[socket.socket, socket.socket]) -> None:
    """What a peer said before it went is not lost because we spoke to it in the meantime."""
    a, b = map(Channel, ends)
    b.send("last word")
    b.close()
    a.send("stop")
    assert a.receive() == ["last word"]
    assert a.disconnected


def test_a_peer_that_goes_with_unread_bytes(ends: tuple[socket.socket, socket.socket]) -> None:
    """A connection reset is a peer that is gone, not an error."""
    a, b = map(Channel, ends)
    a.send("never read")
    b.close()
    assert a.receive() == []
    assert a.disconnected


def test_what_a_selector_needs(ends: tuple[socket.socket, socket.socket]) -> None:
    """A channel has its socket's descriptor, until it is closed."""
    channel = Channel(ends[0])
    assert channel.fileno() == ends[0].fileno() >= 0
    assert not ends[0].getblocking()
    channel.close()
    assert channel.fileno() == -1
