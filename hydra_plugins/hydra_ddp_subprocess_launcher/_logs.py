"""Rank logs: their last lines, and their way to the terminal."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO

_TAIL_BYTES = 16 * 1024
_READ_BYTES = 1 << 20


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
    """Copy what arrives in one rank's log to the terminal.

    Args:
        path: The log.
        prefix: Put before each line, which is then shown when it is whole; empty: show bytes as they come, so that
            progress bars move.
    """

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def pump(self, out: TextIO, *, last: bool = False) -> None:
        """Copy what is new.

        Args:
            out: The terminal.
            last: Nothing more will come: show an unfinished line, too.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                while data := file.read(_READ_BYTES):
                    self._offset += len(data)
                    self._show(self._decoder.decode(data), out)
        except OSError:
            return  # Not there yet, or the run directory is gone: the log is what counts, this is a copy.
        if last and self._rest:
            self._show("\n", out)

    def _show(self, text: str, out: TextIO) -> None:
        if self._prefix:
            *lines, self._rest = (self._rest + text).split("\n")
            text = "".join(f"{self._prefix}{line.rsplit(chr(13), 1)[-1]}\n" for line in lines)
        write_replacing(out, text)


def write_replacing(out: TextIO, text: str) -> None:
    """Write text; what the terminal's encoding lacks becomes a question mark."""
    if not text:
        return
    try:
        out.write(text)
    except UnicodeEncodeError:
        encoding = out.encoding or "ascii"
        out.write(text.encode(encoding, "replace").decode(encoding))
    out.flush()


def terminal() -> TextIO:
    """Return where rank output is shown."""
    return sys.stdout
