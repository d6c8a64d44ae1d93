"""Rank logs: their last lines, and their way to the terminal."""

from __future__ import annotations

import codecs
import os
import select
from collections.abc import Sequence
from typing import TextIO

# Seconds between two looks at logs that are shown.
LOOK_INTERVAL_S = 0.1
# Pieces of one log to show before all else is looked at.
_SHOWN_PIECES = 16
_TAIL_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
# Characters: a pipe that takes anything takes 4096 bytes, and a character has at most four.
_PIECE = 1024


def last_lines(path: str, count: int) -> list[str]:
    """Return the last lines of a log, at most `count`; of a line redrawn by carriage returns its last state."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]


def _last_state(line: str) -> str:
    """Return what a terminal shows of a line with carriage returns; one at the end stays, as a line feed may follow."""
    start = line.rfind("\r", 0, len(line.rstrip("\r")))
    return line[start + 1 :]


class LogTee:
    """Read what arrives in one rank's log, as it is to be shown on the terminal.

    Args:
        path: The log.
        prefix: Put before each line, which is then shown when it is whole; empty: show text as it comes, so that
            progress bars move.
    """

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def read(self, *, last: bool = False) -> str:
        """Return the next piece; empty: there is nothing new.

        Args:
            last: Nothing more will come: an unfinished line is shown, too.
        """
        while True:
            try:
                with open(self._path, "rb") as file:
                    file.seek(self._offset)
                    data = file.read(_READ_BYTES)
            except OSError:
                return ""  # Not there yet, or the run directory is gone: the log is what counts, this is a copy.
            self._offset += len(data)
            shown = self._as_shown(self._decoder.decode(data, final=last and not data), last=last and not data)
            # A piece of a long line or of a character cannot be shown yet, but more may have come.
            if shown or not data:
                return shown

    def _as_shown(self, text: str, *, last: bool) -> str:
        if not self._prefix:
            return text
        if last and self._rest + text:
            text += "\n"
        *lines, rest = (self._rest + text).split("\n")
        # Of a line that is redrawn for hours only the last state is kept.
        self._rest = _last_state(rest)
        return "".join(f"{self._prefix}{_last_state(line).rstrip(chr(13))}\n" for line in lines)


class Terminal:
    """Write to the terminal without waiting for it: a reader that is slow, or gone, must not hold up the launcher.

    Args:
        out: Standard output; None: it is closed.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._waiting = ""

    def show(self, text: str) -> None:
        """Queue text and write what the terminal takes now."""
        self._waiting += text
        self.drain()

    def drain(self) -> bool:
        """Write what the terminal takes now, and return whether nothing waits."""
        try:
            while self._waiting and self._out is not None and self._is_writable():
                piece, self._waiting = self._waiting[:_PIECE], self._waiting[_PIECE:]
                self._out.write(self._encodable(piece))
                self._out.flush()
        except (OSError, ValueError):
            # It was closed, or its reader is gone. The logs have everything.
            self._out = None
        if self._out is None:
            self._waiting = ""
        return not self._waiting

    def _is_writable(self) -> bool:
        assert self._out is not None
        try:
            descriptor = self._out.fileno()
        except (OSError, ValueError, AttributeError):
            return True  # Not a file of the system's, such as pytest's or a notebook's.
        watch = select.poll()
        watch.register(descriptor, select.POLLOUT)
        return bool(watch.poll(0))

    def _encodable(self, text: str) -> str:
        """Return the text with a question mark for what the terminal's encoding lacks."""
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


class LogView:
    """Show what arrives in the logs of many ranks, a bounded amount at a time.

    Args:
        out: Standard output; None: it is closed.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._terminal = Terminal(out)
        self._waits = False

    def begin_round(self) -> None:
        """Begin to look at all logs once."""
        self._waits = False

    def show(self, tees: Sequence[LogTee], *, last: bool) -> bool:
        """Show what is new; return whether that was all.

        Args:
            tees: One a log.
            last: Nothing more will come.
        """
        shown = self._show_pieces(tees, last=last)
        self._waits |= not shown
        return shown

    def _show_pieces(self, tees: Sequence[LogTee], *, last: bool) -> bool:
        for tee in tees:
            for _ in range(_SHOWN_PIECES):
                if not self._terminal.drain():
                    return False
                text = tee.read(last=last)
                if not text:
                    break
                self._terminal.show(text)
            else:
                return False
        return self._terminal.drain()

    def due_s(self, otherwise: float) -> float:
        """Return in how many seconds to look again; `otherwise` if nothing is left from this round."""
        if not self._waits:
            return otherwise
        return 0.0 if self._terminal.drain() else LOOK_INTERVAL_S
