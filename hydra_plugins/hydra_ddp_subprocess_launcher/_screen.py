"""The lower end of a terminal: a board that is drawn again and again, and lines that scroll by above it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.text import Text

from ._logs import Terminal, last_state

# Lines that can be drawn again after a resize: hardly a screen is higher.
_KEPT_LINES = 300
# Columns and lines of what is no terminal, though it was taken for one (progress=rich).
_SIZE = (80, 24)


class Screen:
    """A board below lines of text, on one terminal. Nothing here waits for the terminal, except `close`.

    The cursor stays visible, and below the board: whoever kills the program leaves the terminal as it should be.

    Args:
        out: The terminal.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = Terminal(out)
        self._board: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()
        self._drawn_on = _SIZE
        self._above: deque[str] = deque(maxlen=_KEPT_LINES)
        # What threads of the program print comes between two drawings.
        self._lock = threading.RLock()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            size = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            return _SIZE
        return size.columns or _SIZE[0], size.lines or _SIZE[1]

    def show(self, text: str) -> None:
        """Let lines scroll by above the board.

        Args:
            text: Whole lines, each with its newline.
        """
        with self._lock:
            start = self._to_board_start()
            self._above.extend(text.splitlines())
            self._draw(f"{start}\x1b[J{text}" if start else text)

    def paint(self, board: Sequence[str]) -> None:
        """Draw the board anew.

        Args:
            board: Its lines, without newlines, in which nothing moves the cursor. The last ones count where the
                terminal has not as many.
        """
        with self._lock:
            self._board = tuple(board[-max(1, self.size[1] - 1) :])
            unchanged = self._board == self._drawn and self._drawn_on == self.size
            # What a slow terminal cannot take now is not worth a queue: the next board says it all.
            if not unchanged and self._terminal.drain():
                self._draw(self._to_board_start())

    def drain(self) -> bool:
        """Write what the terminal takes now, and return whether nothing waits."""
        with self._lock:
            return self._terminal.drain()

    def forget(self) -> None:
        """Leave the board where it stands, as after a stop: a shell has written below it."""
        with self._lock:
            self._drawn = ()

    def close(self) -> None:
        """Take the board away, and wait until all is written."""
        with self._lock:
            self._board = ()
            if self._drawn:
                self._terminal.show(f"{self._to_board_start()}\x1b[J")
            self._drawn = ()
            self._terminal.finish()

    def _to_board_start(self) -> str:
        """Return what brings the cursor to where the board began."""
        if not _in_foreground(self._out):
            self._drawn = ()
        if not self._drawn:
            return ""
        columns, lines = self.size
        if len(self._drawn) >= lines or any(cell_len(_plain(line)) > columns for line in self._drawn):
            # The terminal was made smaller. Whether it breaks long lines then or cuts them off, differs, and so does
            # where the board is now: begin with an empty screen, and the lines that were on it.
            return "\x1b[H\x1b[2J" + "".join(f"{line}\n" for line in self._last_above(columns, lines))
        return f"\r\x1b[{len(self._drawn)}A"

    def _last_above(self, columns: int, lines: int) -> list[str]:
        room = lines - len(self._board) - 1
        shown: deque[str] = deque()
        for line in reversed(self._above):
            room -= max(1, -(-cell_len(_plain(line)) // columns))
            if room < 0:
                break
            shown.appendleft(line)
        return list(shown)

    def _draw(self, before: str) -> None:
        self._drawn = self._board if _in_foreground(self._out) else ()
        self._drawn_on = self.size
        rows = "".join(f"{line}\x1b[K\n" for line in self._drawn)
        # What is left of a longer board goes, too.
        self._terminal.show(f"{before}{rows}\x1b[J" if rows or before.startswith("\r") else before)


def _plain(line: str) -> str:
    return Text.from_ansi(line).plain if "\x1b" in line else line


def _in_foreground(out: TextIO) -> bool:
    """Return whether this process may draw on a terminal: not while a shell has it in the background."""
    try:
        return os.tcgetpgrp(out.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True  # A terminal of another session, or none.


def same_terminal(one: TextIO | None, other: TextIO | None) -> bool:
    """Return whether two streams are the same terminal."""
    try:
        assert one is not None and other is not None
        return one.isatty() and other.isatty() and os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (AssertionError, AttributeError, OSError, ValueError):
        return False


class _Above(io.TextIOBase):
    """Stand in for a stream that is the board's terminal: what is written scrolls by above the board."""

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream = stream
        self._screen = screen
        # What each thread has written of a line: `print` writes its end separately.
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        *lines, rest = (self._begun.pop(thread, "") + text).split("\n")
        if rest:
            self._begun[thread] = rest
        if lines:
            self._screen.show("".join(f"{last_state(line)}\n" for line in lines))
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def finish(self) -> None:
        """Show last lines that were not ended."""
        for line in self._begun.values():
            self._screen.show(f"{last_state(line)}\n")
        self._begun.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def streams_above(screen: Screen, out: TextIO) -> Iterator[None]:
    """Let standard output, standard error and Hydra's logging scroll by above the board, where they are its terminal.

    Args:
        screen: The board's.
        out: The board's terminal.
    """
    stand_ins = {
        name: _Above(stream, screen)
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))
        if stream is out or same_terminal(stream, out)
    }
    replaced = {id(getattr(sys, name)): stand_in for name, stand_in in stand_ins.items()}
    earlier = {name: getattr(sys, name) for name in stand_ins}
    handlers = [(handler, handler.stream) for handler in _stream_handlers() if id(handler.stream) in replaced]
    try:
        for name, stand_in in stand_ins.items():
            setattr(sys, name, stand_in)
        for handler, stream in handlers:
            handler.setStream(replaced[id(stream)])
        yield
    finally:
        for stand_in in stand_ins.values():
            stand_in.finish()
        for handler, stream in handlers:
            handler.setStream(stream)
        for name, stream in earlier.items():
            # Unless the program has put another one there meanwhile.
            if getattr(sys, name) is stand_ins[name]:
                setattr(sys, name, stream)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler)]
