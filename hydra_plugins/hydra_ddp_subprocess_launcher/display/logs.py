"""Rank logs: their last lines, and their way to the terminal."""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import Sequence
from typing import BinaryIO, Protocol

from ..common.text import last_state

# Seconds between two looks at logs that are shown.
LOOK_INTERVAL_S = 0.1
# Seconds between two looks whether there is room for the rest of them.
_ROOM_INTERVAL_S = 0.005
# Of all logs together, at one look: more than anybody can read, and little work.
_ROUND_BYTES = 512 * 1024
_LEAST_SHARE = 4 * 1024
# From here on what is shown would only get older and older.
_MOST_BEHIND = 1024 * 1024
# Characters of a line that is shown as one; what is longer is broken.
_LONGEST_LINE = 8 * 1024
_TAIL_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
# Escape sequences, whole or not, and other control characters than a tab: what a terminal would obey.
_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
    # Ends of lines and paragraphs, and changes of direction, of Unicode.
    r"|[\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
_COLORS = re.compile(r"\x1b\[[0-9;:]*m")


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


class LogTee:
    """Read what arrives in one rank's log, as it is to be shown on the terminal.

    Args:
        prefix: Put before each line.
        raw: Show text as it comes, so that progress bars move; else each line when it is whole, in its last state and
            without what would move the cursor. A raw log has no prefix.
    """

    def __init__(self, path: str, prefix: str, *, raw: bool = False) -> None:
        self._path = path
        self._prefix = prefix
        self._raw = raw
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def read(self, most: int = _READ_BYTES, *, last: bool = False) -> str:
        """Return the next piece; empty: there is nothing new.

        Args:
            most: Bytes of the log that may be read.
            last: Nothing more will come: an unfinished line is shown, too.
        """
        while True:
            try:
                with open(self._path, "rb") as file:
                    left_out = self._skip(file)
                    data = file.read(most)
            except OSError:
                return ""  # Not there yet, or the run directory is gone: the log is what counts, this is a copy.
            self._offset += len(data)
            text = left_out + self._decoder.decode(data, final=last and not data)
            shown = self._as_shown(text, last=last and not data)
            # A piece of a long line or of a character cannot be shown yet, but more may have come.
            if shown or not data:
                return shown

    def _skip(self, file: BinaryIO) -> str:
        """Go to where to read on, past what nobody could read any more; return a line that says so."""
        behind = os.fstat(file.fileno()).st_size - self._offset
        if behind <= _MOST_BEHIND:
            file.seek(self._offset)
            return ""
        skipped = behind - _TAIL_BYTES
        file.seek(self._offset + skipped)
        skipped += len(file.readline(_TAIL_BYTES))
        self._offset += skipped
        self._decoder.reset()
        return f"\n… {skipped / 1e6:.1f} MB left out here; all of it is in {self._path}\n"

    def _as_shown(self, text: str, *, last: bool) -> str:
        if self._raw:
            if last and not text and self._rest not in ("", "\n"):
                text = "\n"  # What the launcher itself says next begins on a line of its own.
            self._rest = (self._rest + text)[-1:]
            return text
        if last and self._rest + text:
            text += "\n"
        *lines, rest = (self._rest + text).split("\n")
        # Of a line that is redrawn for hours only the last state is kept.
        self._rest = last_state(rest)
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = ""
        return "".join(f"{self._prefix}{_still(last_state(line))}\n" for line in lines)


def printable(text: str) -> str:
    """Return a text on one line, without anything that a terminal would obey."""
    return _CONTROLS.sub("", text.replace("\t", " "))


def _still(line: str) -> str:
    """Return a line without what would move the cursor, and with its colours ended."""
    still = _CONTROLS.sub(lambda found: found[0] if _COLORS.fullmatch(found[0]) else "", line)
    return f"{still}\x1b[0m" if "\x1b" in still else still


class Showing(Protocol):
    """A place for text that does not wait for its reader."""

    def show(self, text: str) -> None:
        """Queue text."""

    def has_room(self) -> bool:
        """Return whether little waits to be written."""

    def wait(self, within_s: float) -> bool:
        """Wait until all is written; return False if nothing was for `within_s` seconds."""


class LogView:
    """Show what arrives in the logs of many ranks, as much at a time as a person could read."""

    def __init__(self, terminal: Showing) -> None:
        self._terminal = terminal
        self._due = False
        self._next_at = 0.0
        self._tees = 0
        self._share = _READ_BYTES
        # Of ranks that have ended, what the terminal did not take yet.
        self._left: list[LogTee] = []

    def begin_round(self) -> None:
        """Begin to look at all logs once."""
        now = time.monotonic()
        self._due = now >= self._next_at
        if self._due:
            self._next_at = now + LOOK_INTERVAL_S
            self._share = max(_LEAST_SHARE, _ROUND_BYTES // max(1, self._tees))
            self._tees = 0
        self._left = [tee for tee in self._left if not self._show_last(tee)]

    def show(self, tees: Sequence[LogTee], *, last: bool) -> None:
        """Show what is new.

        Args:
            last: Nothing more will come. What the terminal does not take now is shown later.
        """
        self._tees += len(tees) if self._due else 0
        for tee in tees:
            if last:
                self._left += [] if self._show_last(tee) else [tee]
            elif self._due and self._terminal.has_room():
                self._terminal.show(tee.read(self._share))

    def _show_last(self, tee: LogTee) -> bool:
        """Show the rest of a log; return whether that was possible.

        What is said of the job comes after it, so that it is queued as long as that is not too much.
        """
        while self._terminal.has_room():
            text = tee.read(last=True)
            if not text:
                return True
            self._terminal.show(text)
        return False

    def finish(self, within_s: float) -> bool:
        """Show what is left of all logs; return whether the terminal took it.

        Args:
            within_s: Seconds for which the terminal may take nothing.
        """
        give_up_at = time.monotonic() + within_s
        while self._left and time.monotonic() < give_up_at:
            before = self._left
            self._left = [tee for tee in self._left if not self._show_last(tee)]
            if self._left == before:
                time.sleep(_ROOM_INTERVAL_S)
            else:
                give_up_at = time.monotonic() + within_s
        all_queued = not self._left
        self._left.clear()
        return self._terminal.wait(within_s) and all_queued

    def due_s(self, otherwise: float) -> float:
        """Return in how many seconds to look again; `otherwise` if nothing is left from this round."""
        return min(otherwise, LOOK_INTERVAL_S) if self._left else otherwise
