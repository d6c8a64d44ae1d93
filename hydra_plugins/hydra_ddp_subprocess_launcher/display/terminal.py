"""Standard streams and logging of this process while jobs run."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from ..common.text import last_state

if TYPE_CHECKING:
    from rich.live import Live


# Bytes: a pipe takes so few at once or not at all, so that each piece that is written counts as progress.
_PIECE = 1024
# Bytes from which on nothing but what cannot come later is added.
_MUCH = 256 * 1024
# Characters of an unfinished line that are kept.
_LONGEST_BEGUN = 2000
# Seconds for which a reader may take nothing before he is given up: at the end of a sweep, and where somebody waits.
_PATIENCE_S = 30.0
_LITTLE_PATIENCE_S = 2.0


def descriptor_of(stream: object) -> int | None:
    """Return the descriptor of a stream, which may be anything that a program has put there; None: it has none."""
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        os.fstat(descriptor)
    except Exception:  # noqa: BLE001  (a program's own stream may raise anything)
        return None
    return int(descriptor)


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal, as far as it tells."""
    try:
        return bool(stream.isatty()) and descriptor_of(stream) is not None  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  (as above)
        return False


def _place(stream: object) -> Hashable:
    """Return what is the same for all streams that write to one terminal, pipe or file; None: nobody can tell."""
    descriptor = descriptor_of(stream)
    if descriptor is None:
        return None
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class _Writer:
    """Write to a descriptor in a thread, so that nothing else waits for who reads there."""

    def __init__(self, descriptor: int) -> None:
        # A copy: the program may close its own, and open something else that gets its number.
        self._descriptor = os.dup(descriptor)
        self._text = bytearray()
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="ddp-output", daemon=True).start()

    def write(self, text: bytes) -> None:
        with self._changed:
            if not self._closed:
                self._text += text
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Bytes that have not been written."""
        return len(self._text)

    def wait(self, within_s: float) -> bool:
        """Wait until all is written; return False if nothing was for `within_s` seconds."""
        with self._changed:
            while (before := len(self._text)) and self._changed.wait_for(lambda: len(self._text) < before, within_s):
                pass
            return not self._text

    def close(self) -> None:
        """Give up what is not written."""
        with self._changed:
            self._closed = True
            self._text.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._text or self._closed)
                piece = bytes(self._text[:_PIECE])
            if not piece:
                break
            try:
                written = os.write(self._descriptor, piece)
            except BlockingIOError:  # Somebody who shares it has made it so.
                select.select([], [self._descriptor], [])
            except OSError:  # The reader is gone. The logs have everything.
                self.close()
            else:
                with self._changed:
                    del self._text[:written]
                    self._changed.notify_all()
        os.close(self._descriptor)


class Board:
    """Lines at the end of a terminal that are drawn again and again, by rich.

    The cursor stays visible, and below the board: whoever kills the program leaves the terminal as it should be.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = self._new_live()
        self._drawn = False

    def _new_live(self) -> Live:
        from rich.console import Console  # Not loaded where no board is shown.
        from rich.live import Live

        console = Console(
            file=self._out,
            force_terminal=True,
            force_jupyter=False,
            legacy_windows=False,
            color_system=None if os.environ.get("NO_COLOR") else "auto",
        )
        # Rich would hide the cursor until the board is removed.
        console.show_cursor = lambda *_: False  # type: ignore[method-assign]
        return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        return self._live.console.size

    @property
    def encoding(self) -> str:
        """Encoding of the terminal."""
        return self._out.encoding or "utf-8"

    def paint(self, lines: Sequence[str]) -> None:
        """Draw the board anew; its last lines if the terminal has not as many."""
        if not self._may_draw():
            return
        from rich.text import Text

        if not self._drawn:
            self._live = self._new_live()
            self._live.start()
            self._drawn = True
        self._live.update(Text.from_ansi("\n".join([*lines[-max(1, self.size[1] - 1) :], ""])), refresh=True)

    def print_above(self, text: str) -> None:
        """Let whole lines scroll by."""
        if not self._drawn or not self._may_draw():
            self._out.write(text)
            return
        from rich.segment import Segment, Segments

        self._live.console.print(Segments([Segment(text)]), soft_wrap=True, end="")

    def forget(self) -> None:
        """Leave the board where it stands, as after a stop: a shell has written below it."""
        self._drawn = False

    def take_away(self) -> None:
        """Remove the board until it is painted again."""
        if self._drawn and self._may_draw():
            self._live.stop()
        self._drawn = False

    def _may_draw(self) -> bool:
        """Return whether this process may draw on the terminal: not while a shell has it in the background."""
        descriptor = descriptor_of(self._out)
        with contextlib.suppress(OSError):  # A terminal of another session, or none.
            if descriptor is not None and os.tcgetpgrp(descriptor) != os.getpgrp():
                self._drawn = False
                return False
        return True


class _Output(io.TextIOBase):
    """One terminal, pipe or file, on which the program and the ranks write, and perhaps a board is drawn.

    As a file of its own, it is where the board is drawn to.
    """

    def __init__(self, stream: TextIO, descriptor: int, *, has_board: bool) -> None:
        self._stream = stream
        self._fileno = descriptor
        self.writer = _Writer(descriptor)
        self.board = Board(cast("TextIO", self)) if has_board else None
        # What threads of the program print comes between two drawings.
        self._lock = threading.RLock()
        # Lines that have no end yet, and who has shown something last: only his may stand at the end of all text.
        self._begun: dict[Hashable, str] = {}
        self._last: Hashable = None

    def fileno(self) -> int:
        return self._fileno

    @property
    def encoding(self) -> str:  # type: ignore[override]
        encoding = getattr(self._stream, "encoding", None)
        return encoding if isinstance(encoding, str) and encoding else "utf-8"

    def write(self, text: str) -> int:
        self.writer.write(text.encode(self.encoding, "replace"))
        return len(text)

    def show(self, text: str, by: Hashable = None, through: Callable[[str], object] | None = None) -> None:
        """Let text scroll by, above the board if there is one.

        Args:
            by: Who shows it. Each line is whole, whoever wrote between its parts.
            through: Writes it on its own; None: it is queued.
        """
        with self._lock:
            text = self._in_turn(text, by) if self.board is None else self._whole_lines(text, by)
            if through is not None and text:
                self._take_away()
                through(text)
                self._stream.flush()
            elif text and self.board is not None:
                self.board.print_above(text)
            elif text:
                self.write(text)

    def _in_turn(self, text: str, by: Hashable) -> str:
        """Return text with what has to come before it, as others may have shown something since `by` has."""
        begun = self._begun.pop(by, "") if text else ""
        line = last_state((begun + text).rpartition("\n")[2])
        if text and by != self._last:
            # What is whole but for its end has got that from others.
            text = text[1:] if begun and text.startswith("\n") else begun + text
            if self._last in self._begun:
                text = f"\n{text}"
            self._last = by
        if line:
            self._begun[by] = line[-_LONGEST_BEGUN:]
        return text

    def _whole_lines(self, text: str, by: Hashable) -> str:
        """Return the lines that are whole by now, in their last state."""
        *lines, rest = (self._begun.pop(by, "") + text).split("\n")
        rest = last_state(rest)
        if len(rest) > _LONGEST_BEGUN:
            lines.append(rest)
        elif rest:
            self._begun[by] = rest
        return "".join(f"{last_state(line)}\n" for line in lines)

    def paint(self, lines: Sequence[str]) -> None:
        """Draw the board, unless the terminal has not even taken the last one."""
        with self._lock:
            if self.board is not None and not self.writer.waiting:
                self.board.paint(lines)

    def _take_away(self) -> None:
        if self.board is not None:
            self.board.take_away()
        self.writer.wait(_LITTLE_PATIENCE_S)

    def finish(self, within_s: float) -> None:
        with self._lock:
            if self.board is not None:
                self.board.take_away()
                # From now on it is as without one, for lines that were not ended.
                self.board = None
                for text in self._begun.values():
                    self.write(f"{text}\n")
            self.writer.wait(within_s)
            self.writer.close()


class Terminal:
    """Standard output and standard error of this process while jobs run.

    The streams stay the objects that they are, and only their `write` is another: so whoever has one, such as a log
    handler of any kind, a copying stream of the program's, or a library, writes beside the board and waits for nobody.
    What is no plain text file with a descriptor, or has no settable `write`, is left alone.

    Args:
        board: Whether there is a board on standard error.
    """

    def __init__(self, *, board: bool) -> None:
        self._board = board
        self._patience_s = _PATIENCE_S
        self._outputs: dict[Hashable, _Output] = {}
        self._on_board: _Output | None = None
        self._process = os.getpid()
        self._over = True

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the streams over while the block runs, and wait for who reads slowly at its end.

        Where the block is left by an exception, that is not long.
        """
        self._over = False
        undo = []
        patience_s = _LITTLE_PATIENCE_S
        try:
            if self._board:
                self._on_board = self._output(sys.stderr)
            streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
            undo = [self._take(stream) for stream in {id(stream): stream for stream in streams}.values()]
            yield
            patience_s = self._patience_s
        finally:
            self._over = True
            for restore in undo:
                with contextlib.suppress(Exception):
                    restore()
            for output in self._outputs.values():
                output.finish(patience_s)
            self._outputs.clear()
            self._on_board = None

    def _output(self, stream: Any) -> _Output | None:
        """Return where a stream writes to; None: nobody can tell."""
        place, descriptor = _place(stream), descriptor_of(stream)
        if place is None or descriptor is None:
            return None
        if place not in self._outputs:
            self._outputs[place] = _Output(stream, descriptor, has_board=self._board and stream is sys.stderr)
        return self._outputs[place]

    def _take(self, stream: Any) -> Callable[[], None]:
        """Let a stream write by way of its output, and return what undoes that."""
        with contextlib.suppress(Exception):
            place = _place(stream)
            if isinstance(stream, io.TextIOWrapper) and (output := self._output(stream)) is not None:
                # What the program has begun to print comes before.
                stream.flush()
                before = vars(stream).get("write")
                write = self._write_by(stream, place, output)
                stream.write = write  # type: ignore[method-assign]
                return lambda: _restore(stream, write, before)
        return lambda: None

    def _write_by(self, stream: io.TextIOWrapper, place: Hashable, output: _Output) -> Callable[[str], int]:
        original = stream.write
        # Its own way of writing, as by a program that copies what is written.
        is_plain = "write" not in vars(stream) and type(stream).write is io.TextIOWrapper.write
        through = None if is_plain else original

        def write(text: str, /) -> int:
            ours = not self._over and os.getpid() == self._process and isinstance(text, str)
            # It may have been closed, or made to write elsewhere.
            if not ours or _place(stream) != place:
                return original(text)
            output.show(text, (id(stream), threading.get_ident()), through)
            return len(text)

        return write

    def show(self, text: str) -> None:
        """Show output of ranks on standard output."""
        if not text:
            return
        output = self._outputs.get(_place(sys.stdout)) if isinstance(sys.stdout, io.TextIOWrapper) else None
        with contextlib.suppress(Exception):  # It may be closed, or the program's own. The logs have everything.
            if output is not None:
                output.show(text)
            elif sys.stdout is not None:
                sys.stdout.write(text)
                sys.stdout.flush()

    def has_room(self) -> bool:
        """Return whether little waits to be written."""
        return all(output.writer.waiting < _MUCH for output in self._outputs.values())

    def wait(self, within_s: float) -> bool:
        """Wait until all is written; return False where nothing was for `within_s` seconds."""
        taken = [output.writer.wait(within_s) for output in self._outputs.values()]
        return all(taken)

    @property
    def patience_s(self) -> float:
        """Seconds for which a reader may take nothing before he is given up at the end."""
        return self._patience_s

    def hurry(self) -> None:
        """Have little patience at the end: somebody wants it, or nobody reads."""
        self._patience_s = _LITTLE_PATIENCE_S

    @property
    def board(self) -> Board | None:
        """The board, while there is one."""
        return None if self._on_board is None else self._on_board.board

    def paint(self, lines: Sequence[str]) -> None:
        """Draw the board anew."""
        if self._on_board is not None:
            self._on_board.paint(lines)

    def forget_board(self) -> None:
        """Leave the board where it stands: a shell has written below it."""
        if self.board is not None:
            self.board.forget()


def _restore(stream: io.TextIOWrapper, write: object, before: Any) -> None:
    if vars(stream).get("write") is not write:
        return  # The program has changed it meanwhile, and calls ours, which calls the one before.
    if before is None:
        del stream.write
    else:
        stream.write = before  # type: ignore[method-assign]
