"""The lower end of a terminal: a board that is drawn again and again, and lines that scroll by above it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TextIO

from ._terminal import Terminal, descriptor_of

# Lines that can be drawn again after a resize: hardly a screen is higher.
_KEPT_LINES = 300
_KEPT_COLUMNS = 2000
# Seconds for which a terminal may take nothing before it is given up at the end.
PATIENCE_S = 2.0
# Columns and lines of what is no terminal, though it was taken for one (progress=rich).
_SIZE = (80, 24)


class Screen:
    """A board below lines of text, on one terminal. Only `aside` and `close` wait for the terminal.

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
        descriptor = descriptor_of(self._out)
        if descriptor is None:
            return _SIZE
        try:
            size = os.get_terminal_size(descriptor)
        except OSError:
            return _SIZE
        return size.columns or _SIZE[0], size.lines or _SIZE[1]

    def show(self, text: str) -> None:
        """Let lines scroll by above the board.

        Args:
            text: Whole lines, each with its newline.
        """
        with self._lock:
            start = self._to_board_start()
            self._above.extend(line[:_KEPT_COLUMNS] for line in text.splitlines())
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

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Have the board away while the block writes whole lines to the terminal on its own."""
        with self._lock:
            self._take_away()
            yield
            self._draw("")

    def close(self) -> bool:
        """Take the board away, wait until all is written, and return whether the terminal took all."""
        with self._lock:
            self._board = ()
            return self._take_away()

    def _take_away(self) -> bool:
        if self._drawn:
            self._terminal.show(f"{self._to_board_start()}\x1b[J")
        self._drawn = ()
        return self._terminal.finish(PATIENCE_S)

    def _to_board_start(self) -> str:
        """Return what brings the cursor to where the board began."""
        if not _in_foreground(self._out):
            self._drawn = ()
        if not self._drawn:
            return ""
        columns, lines = self.size
        if len(self._drawn) >= lines or any(_width(line) > columns for line in self._drawn):
            # The terminal was made smaller. Whether it breaks long lines then or cuts them off, differs, and so does
            # where the board is now: begin with an empty screen, and the lines that were on it.
            return "\x1b[H\x1b[2J" + "".join(f"{line}\n" for line in self._last_above(columns, lines))
        return f"\r\x1b[{len(self._drawn)}A"

    def _last_above(self, columns: int, lines: int) -> list[str]:
        room = lines - len(self._board) - 1
        shown: deque[str] = deque()
        for line in reversed(self._above):
            room -= max(1, -(-_width(line) // columns))
            if room < 0:
                break
            shown.appendleft(line)
        return list(shown)

    def _draw(self, before: str) -> None:
        self._drawn = self._board if _in_foreground(self._out) else ()
        self._drawn_on = self.size
        # Without breaks of lines: terminals differ from us in how wide they take some characters to be.
        rows = "".join(f"\x1b[?7l{line}\x1b[?7h\x1b[K\n" for line in self._drawn)
        # What is left of a longer board goes, too.
        self._terminal.show(f"{before}{rows}\x1b[J" if rows or before.startswith("\r") else before)


def _width(line: str) -> int:
    from rich.cells import cell_len  # Not needed without a board.
    from rich.text import Text

    return cell_len(Text.from_ansi(line).plain if "\x1b" in line else line)


def _in_foreground(out: TextIO) -> bool:
    """Return whether this process may draw on a terminal: not while a shell has it in the background."""
    descriptor = descriptor_of(out)
    try:
        return descriptor is None or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True  # A terminal of another session, or none.
