"""Text on its way to a terminal, a pipe or a file, for which nobody waits."""

from __future__ import annotations

import os
import select
import stat
import time
import weakref
from collections import deque
from typing import Protocol, TextIO

# Seconds between two tries while waiting for a terminal at the end.
DRAIN_INTERVAL_S = 0.005
# Characters: a pipe that takes anything takes 4096 bytes, and a character has at most four.
_PIECE = 1024
# Pieces from which on nothing but what cannot come later is added.
_MANY_PIECES = 256


def descriptor_of(stream: object) -> int | None:
    """Return the descriptor of a stream, which may be anything that a program has put there; None: it has none."""
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  (a program's own stream may raise anything)
        return None
    return descriptor if isinstance(descriptor, int) and descriptor >= 0 else None


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal, as far as it tells."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  (as above)
        return False


def encoding_of(stream: object) -> str:
    """Return the encoding of a stream, as far as it tells."""
    found = getattr(stream, "encoding", None)
    return found if isinstance(found, str) and found else "utf-8"


def has_reader(stream: object) -> bool:
    """Return whether a stream is a terminal, a pipe or a socket, where a write may wait for somebody who reads."""
    descriptor = descriptor_of(stream)
    if descriptor is None:
        return False
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


class Showing(Protocol):
    """A place for text that does not wait for its reader."""

    def show(self, text: str) -> None:
        """Queue text."""

    def drain(self) -> bool:
        """Write what can be written now, and return whether nothing waits."""

    def has_room(self) -> bool:
        """Write what can be written now, and return whether little waits."""

    def finish(self, within_s: float) -> bool:
        """Write what waits, give up what its reader does not take, and return whether he took all.

        Args:
            within_s: Seconds without any progress.
        """


class Terminal:
    """Write to the terminal without waiting for it: a reader that is slow, or gone, must not hold up the launcher.

    Args:
        out: Standard output; None: it is closed.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._waiting: deque[str] = deque()
        # What a write has left of the first one.
        self._rest = b""
        self._descriptor = _opened_again(out)
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)

    def show(self, text: str) -> None:
        """Queue text and write what the terminal takes now."""
        self._waiting.extend(text[place : place + _PIECE] for place in range(0, len(text), _PIECE))
        self.drain()

    def drain(self) -> bool:
        """Write what the terminal takes now, and return whether nothing waits."""
        try:
            while (self._rest or self._waiting) and self._out is not None and self._write_some(self._out):
                pass
        except (OSError, ValueError):
            # It was closed, or its reader is gone. The logs have everything.
            self._out = None
        if self._out is None:
            self._waiting.clear()
            self._rest = b""
        return not self._waiting and not self._rest

    def has_room(self) -> bool:
        """Write what the terminal takes now, and return whether little waits."""
        return self.drain() or len(self._waiting) < _MANY_PIECES

    def _write_some(self, out: TextIO) -> bool:
        """Write a piece; return whether the terminal has taken all of it."""
        if self._descriptor is None:
            if not self._is_writable():
                return False
            out.write(self._encodable(self._waiting.popleft()))
            out.flush()
            return True
        if not self._rest:
            # What the program has begun to print comes before.
            out.flush()
            self._rest = self._encodable(self._waiting.popleft()).encode(encoding_of(out))
        try:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            return False
        return not self._rest

    def finish(self, within_s: float) -> bool:
        """Write what waits, give up what the terminal does not take, and return whether it took all.

        Args:
            within_s: Seconds without any progress.
        """
        give_up_at = time.monotonic() + within_s
        before = (0, 0)
        while not self.drain() and time.monotonic() < give_up_at:
            now = (len(self._waiting), len(self._rest))
            if now != before:
                give_up_at = time.monotonic() + within_s
            before = now
            time.sleep(DRAIN_INTERVAL_S)
        all_taken = not self._waiting and not self._rest
        self._waiting.clear()
        self._rest = b""
        return all_taken

    def _is_writable(self) -> bool:
        descriptor = descriptor_of(self._out)
        if descriptor is None:
            return True  # Not a file of the system's, such as pytest's or a notebook's.
        watch = select.poll()
        watch.register(descriptor, select.POLLOUT)
        return bool(watch.poll(0))

    def _encodable(self, text: str) -> str:
        """Return the text with a question mark for what the terminal's encoding lacks."""
        encoding = encoding_of(self._out)
        return text.encode(encoding, "replace").decode(encoding)


def _opened_again(out: TextIO | None) -> int | None:
    """Open a terminal or pipe once more, so that writes to it alone do not block; None: that is not possible."""
    descriptor = descriptor_of(out)
    try:
        # A file would be written from its start.
        if descriptor is None or not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
            return None
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
