"""Standard streams and logging of this process while a board is on their terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from ._logs import last_state
from ._screen import Screen
from ._terminal import descriptor_of, encoding_of, is_terminal

# Characters of a line that was begun, from which on it is shown though it has not ended.
_LONGEST_BEGUN = 2000


def same_terminal(one: object, other: object) -> bool:
    """Return whether two streams are the same terminal."""
    ours, theirs = descriptor_of(one), descriptor_of(other)
    if ours is None or theirs is None or not is_terminal(one) or not is_terminal(other):
        return False
    try:
        return os.path.samestat(os.fstat(ours), os.fstat(theirs))
    except OSError:
        return False


class _Above(io.TextIOBase):
    """Stand in for a stream that is, or may be, the board's terminal: its lines scroll by above the board.

    Whoever still has it when the board is gone writes to the stream itself.

    Args:
        stream: The stream.
        screen: The board's.
    """

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self.stream = stream
        self._screen: Screen | None = screen
        # Of one that the program has put there, or changed, nothing is known: it gets its lines itself.
        self._plain = type(stream) is io.TextIOWrapper and "write" not in vars(stream)
        # What each thread has written of a line: `print` writes its end separately.
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        if self._screen is None:
            return self.stream.write(text)
        thread = threading.get_ident()
        *lines, rest = (self._begun.pop(thread, "") + text).split("\n")
        rest = last_state(rest)
        if len(rest) > _LONGEST_BEGUN:
            lines, rest = [*lines, rest], ""
        if rest:
            self._begun[thread] = rest
        if lines:
            self._show(self._screen, "".join(f"{last_state(line)}\n" for line in lines))
        return len(text)

    def _show(self, screen: Screen, lines: str) -> None:
        if self._plain:
            screen.show(lines)
            return
        with screen.aside():
            self.stream.write(lines)
            self.stream.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return is_terminal(self.stream)

    def fileno(self) -> int:
        return self.stream.fileno()

    def flush(self) -> None:
        if self._screen is None:
            self.stream.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return encoding_of(self.stream)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self.stream, "errors", None)

    def finish(self) -> None:
        """Show last lines that were not ended, and be the stream from now on."""
        if self._screen is not None and self._begun:
            self._show(self._screen, "".join(f"{line}\n" for line in self._begun.values()))
        self._screen = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _StandIns:
    """Stand-ins for the streams of this process that are, or may be, the board's terminal.

    Args:
        screen: The board's.
        out: The board's terminal.
    """

    def __init__(self, screen: Screen, out: TextIO) -> None:
        self._screen = screen
        self._out = out
        self._by_stream: dict[int, _Above] = {}
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._handlers = [(handler, handler.stream) for handler in _stream_handlers()]

    def take_over(self) -> None:
        """Put them where the streams were."""
        for name, stream in self._streams.items():
            setattr(sys, name, self._of(stream))
        for handler, stream in self._handlers:
            if self._of(stream) is not stream:
                handler.setStream(self._of(stream))

    def give_back(self) -> None:
        """Put the streams where they were, unless the program has put others there meanwhile."""
        for one in self._by_stream.values():
            one.finish()
        for handler, stream in self._handlers:
            if handler.stream is not stream and handler.stream is self._of(stream):
                handler.setStream(stream)
        for name, stream in self._streams.items():
            if getattr(sys, name) is self._of(stream):
                setattr(sys, name, stream)

    def _of(self, stream: Any) -> Any:
        # One that a handler has kept from an earlier board.
        original = stream.stream if isinstance(stream, _Above) else stream
        if original is None or not (original is self._out or may_be(original, self._out)):
            return stream
        return self._by_stream.setdefault(id(original), _Above(original, self._screen))


@contextlib.contextmanager
def streams_above(screen: Screen, out: TextIO) -> Iterator[None]:
    """Let standard output, standard error and logging scroll by above the board, where they may be its terminal.

    Args:
        screen: The board's.
        out: The board's terminal.
    """
    stand_ins = _StandIns(screen, out)
    try:
        stand_ins.take_over()
        yield
    finally:
        stand_ins.give_back()


def may_be(stream: object, out: TextIO) -> bool:
    """Return whether a stream is the terminal `out`, or one of the program's own of which that cannot be told."""
    if stream is None or descriptor_of(stream) is not None:
        return same_terminal(stream, out)
    # A copy to a file, and to what was there before, has no descriptor; nor has a text in memory, to which it does no
    # harm.
    return callable(getattr(stream, "write", None)) and not isinstance(stream, io.StringIO)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler)]
