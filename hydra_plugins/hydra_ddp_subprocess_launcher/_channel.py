"""Messages between the launcher and a keeper over a socketpair: pickled, framed, never blocking."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")


class Channel:
    """One end of a stream socketpair. Both ends belong to processes that this package started from one another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.lost = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes wait for the peer to read."""
        return bool(self._outgoing) and not self.lost

    def send(self, message: object) -> None:
        """Queue a message and send what the socket takes now."""
        data = pickle.dumps(message)
        self._outgoing += _HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.wants_to_write:
            try:
                sent = self._sock.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                # The peer is gone, but what it said last may wait to be read: `receive` notices the end.
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """Return the whole messages that have arrived; sets `lost` when the peer is gone."""
        while not self.lost:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.lost = True
            self._incoming += data
        messages = []
        while len(self._incoming) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + length
            if len(self._incoming) < end:
                break
            messages.append(pickle.loads(bytes(self._incoming[_HEADER.size : end])))
            del self._incoming[:end]
        return messages

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
