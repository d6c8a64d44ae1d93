"""Standard streams and logging of this process while jobs run: all that is written to them goes by way of screens."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Hashable, Iterator
from typing import Any, TextIO

from ._logs import last_state
from ._screen import PATIENCE_S, Screen
from ._terminal import descriptor_of, encoding_of, has_reader, is_terminal

# Characters of a line that was begun, from which on it is shown though it has not ended.
_LONGEST_BEGUN = 2000
_PATIENCE_S = 30.0


class Screens:
    """The screens of this process: one for each terminal, pipe or file that its streams write to.

    So nobody waits for a reader, what several streams write there stays in order, and each line whole.

    Args:
        board: The stream on which there is a board; None: there is none.

    Attributes:
        board: Screen of that stream.
        patience_s: Seconds for which a reader may take nothing before he is given up at the end.
    """

    def __init__(self, board: TextIO | None = None) -> None:
        self.patience_s = _PATIENCE_S
        self._by_place: dict[Hashable, Screen] = {}
        self.board = None if board is None else self._by_place.setdefault(_place(board), Screen(board))

    def of(self, stream: TextIO | None) -> Screen:
        """Return the screen by which a stream goes, a new one where there is none yet."""
        found = self.find(stream)
        return self._by_place.setdefault(_place(stream), Screen(stream)) if found is None else found

    def find(self, stream: object) -> Screen | None:
        """Return the screen of what a stream writes to; None: there is none."""
        found = self._by_place.get(_place(stream))
        return self.board if found is None and _may_be_anything(stream) else found

    def drain(self) -> bool:
        """Write what can be written now, and return whether nothing waits."""
        waiting = [screen for screen in self._by_place.values() if not screen.drain()]
        return not waiting

    def hurry(self) -> None:
        """Have little patience at the end: somebody wants it, or nobody reads."""
        self.patience_s = PATIENCE_S

    def close(self, within_s: float) -> None:
        """Take the board away, and give up what readers do not take.

        Args:
            within_s: Seconds for which one may take nothing.
        """
        for screen in self._by_place.values():
            screen.close(within_s)


def _place(stream: object) -> Hashable:
    """Return what is the same for all streams that write to one terminal, pipe or file."""
    descriptor = descriptor_of(stream)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            return status.st_dev, status.st_ino
    return id(stream)


def _may_be_anything(stream: object) -> bool:
    """Return whether a stream is one of the program's own of which nobody can tell where it writes to.

    A copy to a file, and to what was there before, has no descriptor; nor has a text in memory, which does no harm.
    """
    writes = callable(getattr(stream, "write", None))
    return writes and descriptor_of(stream) is None and not isinstance(stream, io.StringIO)


class _StandIn(io.TextIOBase):
    """Stand in for a stream: what is written to it goes by way of a screen.

    Whoever still has it when that is over writes to the stream itself.

    Args:
        stream: The stream.
        screen: Of what it writes to.
    """

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self.stands_for = stream
        self._screen: Screen | None = screen
        # Of one that the program has put there, or changed, nothing is known, and a file lets nobody wait: they write
        # themselves.
        known = type(stream) is io.TextIOWrapper and "write" not in vars(stream)
        self._through = None if known and has_reader(stream) else stream
        # What each thread has written of a line: `print` writes its end separately.
        self._begun: dict[int, str] = {}

    def __del__(self) -> None:
        # A stream is flushed and closed then; the one that this stands for may be closed already, and is not its own.
        pass

    def write(self, text: str) -> int:
        screen = self._screen
        if screen is None:
            return self.stands_for.write(text)
        thread = threading.get_ident()
        begun = self._begun.pop(thread, "") + text
        end = begun.rfind("\n") + 1
        whole, rest = begun[:end], begun[end:]
        if screen.has_board:
            rest = last_state(rest)
        if len(rest) > _LONGEST_BEGUN:
            whole, rest = whole + rest, ""
        if rest:
            self._begun[thread] = rest
        self._show(screen, whole, thread)
        return len(text)

    def _show(self, screen: Screen, text: str, thread: int) -> None:
        screen.show(text, (id(self), thread), self._through)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return is_terminal(self.stands_for)

    def fileno(self) -> int:
        return self.stands_for.fileno()

    def flush(self) -> None:
        screen = self._screen
        if screen is None:
            self.stands_for.flush()
        elif not screen.has_board:
            thread = threading.get_ident()
            self._show(screen, self._begun.pop(thread, ""), thread)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return encoding_of(self.stands_for)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self.stands_for, "errors", None)

    def finish(self) -> None:
        """Show last lines that were not ended, and be the stream from now on."""
        screen, self._screen = self._screen, None
        while screen is not None and self._begun:
            thread, rest = self._begun.popitem()
            self._show(screen, rest, thread)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


class _StandIns:
    """Stand-ins for the standard streams of this process, and for the streams of handlers that write to the same.

    Args:
        screens: Of this process.
    """

    def __init__(self, screens: Screens) -> None:
        self._screens = screens
        self._by_stream: dict[int, _StandIn] = {}
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._handlers = [(handler, handler.stream) for handler in _stream_handlers()]

    def take_over(self) -> None:
        """Put them where the streams were."""
        for name, stream in self._streams.items():
            self._screens.of(_original(stream))
            with contextlib.suppress(Exception):
                # What the program has begun to print comes before. Whatever is wrong with its stream shows later.
                stream.flush()
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
        original = _original(stream)
        screen = None if original is None else self._screens.find(original)
        return stream if screen is None else self._by_stream.setdefault(id(original), _StandIn(original, screen))


def _original(stream: Any) -> Any:
    # A handler may have kept a stand-in from an earlier batch.
    return stream.stands_for if isinstance(stream, _StandIn) else stream


@contextlib.contextmanager
def streams_above(screens: Screens) -> Iterator[None]:
    """Let standard output, standard error and logging go by way of screens while the block runs.

    At its end wait for who reads slowly, but not where the block was left by an exception.

    Args:
        screens: Of this process.
    """
    stand_ins = _StandIns(screens)
    patience_s = PATIENCE_S
    try:
        stand_ins.take_over()
        yield
        patience_s = screens.patience_s
    finally:
        stand_ins.give_back()
        screens.close(patience_s)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler)]
