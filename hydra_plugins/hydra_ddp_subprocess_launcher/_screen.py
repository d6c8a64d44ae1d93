"""What is shown on one terminal, pipe or file: lines that scroll by, and below them a board, if there is one."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import TextIO

from ._logs import last_state
from ._terminal import Terminal, descriptor_of

# Lines that can be drawn again after a resize: hardly a screen is higher.
_KEPT_LINES = 300
_KEPT_COLUMNS = 2000
# Seconds for which a terminal may take nothing before it is given up, where somebody waits for us.
PATIENCE_S = 2.0
# Columns and lines of what is no terminal, though it was taken for one (progress=rich).
_SIZE = (80, 24)


class Screen:
    """Lines of text, and a board below them once it is painted. Only `finish`, `close` and `show` with `through` wait.

    The cursor stays visible, and below the board: whoever kills the program leaves the terminal as it should be.

    Args:
        out: The terminal, or a pipe or file, which has no board; None: it is closed.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._terminal = Terminal(out)
        self._board: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()
        self._drawn_on = _SIZE
        self._above: deque[str] = deque(maxlen=_KEPT_LINES)
        # Lines that have no end yet, and who has shown something last: only his may stand at the end of all text.
        self._begun: dict[Hashable, str] = {}
        self._last: Hashable = None
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

    @property
    def has_board(self) -> bool:
        """Whether there is a board, above which there are whole lines alone."""
        return bool(self._board)

    def show(self, text: str, by: Hashable = None, through: TextIO | None = None) -> None:
        """Let text scroll by.

        Without a board its last line need not have ended. Somebody else's text ends it all the same, and who goes on
        with a line begins it anew: so each line is whole once, whoever wrote between its parts.

        Args:
            text: The text.
            by: Who shows it.
            through: A stream that writes it to the terminal, pipe or file on its own; None: it is queued.
        """
        with self._lock:
            if not text:
                return
            if self._board:
                text = "".join(f"{last_state(line)}\n" for line in text.removesuffix("\n").split("\n"))
            text = self._in_turn(text, by)
            if through is not None:
                self._take_away(PATIENCE_S)
                through.write(text)
                through.flush()
                self._draw()
                return
            start = self._to_board_start()
            self._above.extend(line[:_KEPT_COLUMNS] for line in text.splitlines())
            self._draw(start, text)

    def _in_turn(self, text: str, by: Hashable) -> str:
        """Return text with what has to come before it, as others may have shown something since `by` has."""
        begun = self._begun.pop(by, "")
        line = last_state((begun + text).rpartition("\n")[2])
        if by != self._last:
            # What is whole but for its end has got that from others.
            text = text[1:] if begun and text.startswith("\n") else begun + text
            if self._last in self._begun:
                text = f"\n{text}"
            self._last = by
        if line:
            self._begun[by] = line[-_KEPT_COLUMNS:]
        return text

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
                # The board counts as somebody who shows something.
                self._draw(self._to_board_start(), self._in_turn("", self))

    def drain(self) -> bool:
        """Write what the terminal takes now, and return whether nothing waits."""
        with self._lock:
            return self._terminal.drain()

    def has_room(self) -> bool:
        """Write what the terminal takes now, and return whether little waits."""
        with self._lock:
            return self._terminal.has_room()

    def finish(self, within_s: float) -> bool:
        """Wait until all is written, and return whether the terminal took all.

        Args:
            within_s: Seconds for which it may take nothing.
        """
        with self._lock:
            return self._terminal.finish(within_s)

    def forget(self) -> None:
        """Leave the board where it stands, as after a stop: a shell has written below it."""
        with self._lock:
            self._drawn = ()

    def close(self, within_s: float = PATIENCE_S) -> bool:
        """Take the board away, wait until all is written, and return whether the terminal took all.

        Args:
            within_s: Seconds for which it may take nothing.
        """
        with self._lock:
            self._board = ()
            return self._take_away(within_s)

    def _take_away(self, within_s: float) -> bool:
        if self._drawn:
            self._terminal.show(f"{self._to_board_start()}\x1b[J")
        self._drawn = ()
        return self._terminal.finish(within_s)

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

    def _draw(self, start: str = "", text: str = "") -> None:
        """Write text and the board below it, from where the board began if it is there."""
        self._drawn = self._board if _in_foreground(self._out) else ()
        self._drawn_on = self.size
        # Without breaks of lines: terminals differ from us in how wide they take some characters to be.
        rows = "".join(f"\x1b[?7l{line}\x1b[?7h\x1b[K\n" for line in self._drawn)
        above = f"{start}\x1b[J{text}" if start and text else f"{start}{text}"
        # What is left of a longer board goes, too.
        self._terminal.show(f"{above}{rows}\x1b[J" if rows or start else above)


def _width(line: str) -> int:
    from rich.cells import cell_len  # Not needed without a board.
    from rich.text import Text

    return cell_len(Text.from_ansi(line).plain if "\x1b" in line else line)


def _in_foreground(out: TextIO | None) -> bool:
    """Return whether this process may draw on a terminal: not while a shell has it in the background."""
    descriptor = descriptor_of(out)
    try:
        return descriptor is None or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True  # A terminal of another session, or none.
