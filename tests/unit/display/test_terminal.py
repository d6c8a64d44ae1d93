"""Standard streams while jobs run: above a board, against a terminal emulator, and into pipes and files."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import random
import select
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyte
import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.display import terminal as terminal_module
from hydra_plugins.hydra_ddp_subprocess_launcher.display.terminal import Terminal
from hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config

BOARD = ["first row", "second row", "bar"]


class Emulator:
    """A pseudo-terminal that standard output and standard error write to, and what it shows."""

    def __init__(self, columns: int = 40, lines: int = 12) -> None:
        self._ours, theirs = os.openpty()
        self.screen = pyte.HistoryScreen(columns, lines, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.out = os.fdopen(theirs, "w", encoding="utf-8")
        self.err = os.fdopen(os.dup(theirs), "w", encoding="utf-8")
        self.resize(columns, lines)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be standard output and standard error. Not in a fixture: pytest sets its own ones after those."""
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setattr(sys, "stderr", self.err)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        fcntl.ioctl(self.out, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> None:
        while select.select([self._ours], [], [], 0)[0]:
            self._stream.feed(os.read(self._ours, 65536))

    def lines(self, terminal: Terminal) -> list[str]:
        """Return all lines that it shows, or has shown, when all is written."""
        while not terminal.wait(0.01):
            self.read()
        self.read()
        columns = self.screen.columns
        scrolled = ["".join(line[place].data for place in range(columns)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in [*scrolled, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def close(self) -> None:
        self.out.close()
        self.err.close()
        os.close(self._ours)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    found = Emulator()
    monkeypatch.setattr(
        terminal_module.Board, "size", property(lambda _self: (found.screen.columns, found.screen.lines))
    )
    yield found
    found.close()


@contextmanager
def logger_with(handler: logging.Handler) -> Iterator[logging.Logger]:
    logger = logging.getLogger("of this test")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.handlers.clear()


@pytest.mark.parametrize("seed", range(5))
def test_lines_scroll_by_above_the_board(monkeypatch: pytest.MonkeyPatch, emulator: Emulator, seed: int) -> None:
    """Boards that grow and shrink, and lines of any number, leave the lines in order and the last board below."""
    emulator.install(monkeypatch)
    choose = random.Random(seed)
    terminal = Terminal(board=True)
    shown: list[str] = []
    board: list[str] = []
    with terminal.taken():
        for step in range(40):
            if choose.random() < 0.5:
                lines = [f"line {step}.{part}" for part in range(choose.randint(1, 15))]
                choose.choice([terminal.show, sys.stdout.write, sys.stderr.write])("\n".join([*lines, ""]))
                shown += lines
            else:
                board = [f"board {step}.{part}" for part in range(choose.randint(1, 6))]
                terminal.paint(board)
            assert emulator.lines(terminal) == [*shown, *board]
            assert emulator.screen.cursor.x == 0 and not emulator.screen.cursor.hidden
        terminal.show("end\n")
        assert emulator.lines(terminal) == [*shown, "end", *board]
    emulator.read()
    assert emulator.lines(terminal) == [*shown, "end"]


@pytest.mark.parametrize("lines", [3, 4])
def test_a_terminal_with_few_lines(monkeypatch: pytest.MonkeyPatch, emulator: Emulator, lines: int) -> None:
    """If the board has no room its last lines are shown, and nothing is left behind."""
    emulator.install(monkeypatch)
    emulator.resize(40, lines)
    terminal = Terminal(board=True)
    with terminal.taken():
        for number in range(10):
            terminal.show(f"line {number}\n")
            emulator.lines(terminal)
            terminal.paint(BOARD)
        shown = [*(f"line {number}" for number in range(10)), *BOARD[-(lines - 1) :]]
        assert emulator.lines(terminal) == shown


def test_all_that_is_written_comes_above_the_board(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """Prints, log handlers, a copying stream and whoever has kept a stream do, and all is as it was afterwards."""
    emulator.install(monkeypatch)
    copied: list[str] = []
    before = sys.stdout, sys.stderr, sys.stdout.write

    class Copy:
        def __init__(self, stream: TextIO) -> None:
            self._stream = stream

        def write(self, text: str) -> int:
            copied.append(text)
            return self._stream.write(text)

        def flush(self) -> None:
            self._stream.flush()

    terminal = Terminal(board=True)
    handler = logging.StreamHandler(emulator.err)
    with logger_with(handler) as logger, terminal.taken():
        terminal.paint(BOARD)
        print("printed")
        sys.stderr.write("half ")
        sys.stderr.write("a line\n10%\r50%\r100%\n[bold]no markup[/bold] :smile: [/x]\n")
        logger.warning("logged")
        sys.stdout = Copy(sys.stdout)  # type: ignore[assignment]
        print("copied")
        terminal.show("of a rank\n")
        sys.stdout = before[0]
        assert sys.stdout.isatty() and sys.stdout.encoding == "utf-8"
        shown = ["printed", "half a line", "100%", "[bold]no markup[/bold] :smile: [/x]", "logged", "copied"]
        assert emulator.lines(terminal) == [*shown, "of a rank", *BOARD]
        print("not ended", end="")
    assert emulator.lines(terminal) == [*shown, "of a rank", "not ended"]
    assert (sys.stdout, sys.stderr, sys.stdout.write) == before and handler.stream is emulator.err
    assert "".join(copied) == "copied\nof a rank\n"


class _ReadOnly(logging.StreamHandler):  # type: ignore[type-arg]  # (Python 3.10 cannot subscript it)
    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        if "made" in vars(self):
            raise AttributeError("stream")
        self.made = True


class _Refusing(logging.StreamHandler):  # type: ignore[type-arg]  # (as above)
    def setStream(self, stream: Any) -> Any:
        raise RuntimeError("not this one")


class _WithoutStream(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


def _absl() -> logging.Handler:
    absl = pytest.importorskip("absl.logging")
    handler: logging.Handler = absl.PythonHandler(sys.stderr, logging.Formatter())
    # absl says once that its flags are not parsed.
    absl._warn_preinit_stderr = False
    return handler


def _rich() -> logging.Handler:
    from rich.console import Console
    from rich.logging import RichHandler

    return RichHandler(console=Console(stderr=True, width=40), show_time=False, show_path=False, show_level=False)


HANDLERS = {
    "last resort's": logging._StderrHandler,  # type: ignore[attr-defined]
    "read-only stream": _ReadOnly,
    "setStream raises": _Refusing,
    "no stream": _WithoutStream,
    "absl": _absl,
    "rich": _rich,
}


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("board", [True, False], ids=["board", "plain"])
def test_any_log_handler(monkeypatch: pytest.MonkeyPatch, emulator: Emulator, kind: str, board: bool) -> None:
    """A handler writes above the board whatever becomes of its stream, and may be replaced meanwhile."""
    emulator.install(monkeypatch)
    terminal = Terminal(board=board)
    with logger_with(HANDLERS[kind]()) as logger, terminal.taken():
        terminal.paint(BOARD)
        logger.warning("logged")
        assert [line.strip() for line in emulator.lines(terminal)] == ["logged", *(BOARD if board else [])]
        logger.handlers[:] = []
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.warning("again")
    assert [line.strip() for line in emulator.lines(terminal)] == ["logged", "again"]


@pytest.mark.parametrize("made", ["at import", "meanwhile"])
def test_loguru(monkeypatch: pytest.MonkeyPatch, emulator: Emulator, made: str) -> None:
    """A library that has kept standard error and logs by itself writes above the board, too."""
    emulator.install(monkeypatch)
    loguru = pytest.importorskip("loguru")
    loguru.logger.remove()
    terminal = Terminal(board=True)
    if made == "at import":
        loguru.logger.add(sys.stderr, format="{message}")
    with terminal.taken():
        terminal.paint(BOARD)
        if made == "meanwhile":
            loguru.logger.add(sys.stderr, format="{message}", colorize=False)
        loguru.logger.info("logged")
        assert emulator.lines(terminal) == ["logged", *BOARD]
    loguru.logger.remove()


def _closed() -> TextIO:
    with Path(os.devnull).open("w") as file:
        return file


class _Bare:
    def write(self, text: str) -> int:
        return len(text)


class _Raising(io.StringIO):
    def fileno(self) -> int:
        raise RuntimeError

    def write(self, text: str) -> int:
        raise RuntimeError(text)


@pytest.mark.parametrize("make", [lambda: None, _closed, _Bare, _Raising, io.StringIO])
@pytest.mark.parametrize("board", [True, False], ids=["board", "plain"])
def test_streams_that_are_none_of_ours(monkeypatch: pytest.MonkeyPatch, make: Any, board: bool) -> None:
    """No stream, a closed one, or one of the program's own is left alone, and shows what it can."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, make())
    before = sys.stdout, sys.stderr
    terminal = Terminal(board=board)
    with terminal.taken():
        terminal.paint(BOARD)
        terminal.show("of a rank\n")
    assert (sys.stdout, sys.stderr) == before
    if type(sys.stdout) is io.StringIO:
        assert sys.stdout.getvalue() == "of a rank\n"


def test_a_stream_whose_write_the_program_has_set(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """One that the program set before is called, and stays; one that it sets meanwhile stays, too."""
    emulator.install(monkeypatch)
    copied: list[str] = []

    def copying(text: str, write: Any = sys.stdout.write) -> int:
        copied.append(text)
        return int(write(text))

    emulator.out.write = copying  # type: ignore[method-assign]
    terminal = Terminal(board=True)
    with terminal.taken():
        terminal.paint(BOARD)
        print("printed")
        terminal.paint(BOARD)
        assert emulator.lines(terminal) == ["printed", *BOARD]
        ours = emulator.err.write
        meanwhile = lambda text: ours(text.upper())  # noqa: E731
        emulator.err.write = meanwhile  # type: ignore[method-assign]
        print("loud", file=sys.stderr)
    assert emulator.out.write is copying and emulator.err.write is meanwhile
    print("louder", file=sys.stderr, flush=True)
    assert emulator.lines(terminal) == ["printed", "LOUD", "LOUDER"]
    assert "".join(copied) == "printed\n"


def test_a_stream_that_is_closed_or_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """The program keeps what it set, and a closed stream raises as ever."""
    emulator.install(monkeypatch)
    mine = io.StringIO()
    terminal = Terminal(board=False)
    with terminal.taken():
        sys.stdout = mine
        print("printed")
        terminal.show("of a rank\n")
        emulator.err.close()
        with pytest.raises(ValueError, match="closed"):
            emulator.err.write("more")
    assert sys.stdout is mine and mine.getvalue() == "printed\nof a rank\n"


def test_a_fork_writes_by_itself(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """What a fork of the program prints is not left to a thread that it has not."""
    emulator.install(monkeypatch)
    terminal = Terminal(board=False)
    with terminal.taken():
        pid = os.fork()
        if not pid:
            print("of a fork", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        assert emulator.lines(terminal) == ["of a fork"]


def test_threads(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """What several threads print at once stays whole, line by line."""
    emulator.install(monkeypatch)
    terminal = Terminal(board=True)
    with terminal.taken():

        def chat(name: str) -> None:
            for number in range(50):
                print(name * 8, number)

        threads = [threading.Thread(target=chat, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            terminal.paint(BOARD)
            emulator.lines(terminal)
    assert sorted(emulator.lines(terminal)) == sorted(f"{name * 8} {n}" for name in "abc" for n in range(50))


# --- without a board


@contextmanager
def into_pipe(monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> Iterator[tuple[Terminal, BinaryIO]]:
    """Let standard output and standard error be streams of one pipe; yield its reading end, too."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with (
        os.fdopen(writing, "w", encoding=encoding) as out,
        os.fdopen(os.dup(writing), "w", encoding=encoding) as err,
        os.fdopen(reading, "rb") as reader,
    ):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        yield Terminal(board=False), reader


def test_a_pipe_shows_what_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it ends its line or not; what was begun before the block comes first."""
    with into_pipe(monkeypatch) as (terminal, reader):
        print("before", end=" ")
        with terminal.taken():
            for text in ("and after\rredrawn\n", "10%", "\r20%", "\n€ not ended"):
                print(text, end="")
                assert terminal.wait(10)
                assert reader.read() == (b"before " if "after" in text else b"") + text.encode()


def test_a_line_that_others_write_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands at the end of the text is ended by who writes next, and begun anew when it goes on."""
    with into_pipe(monkeypatch) as (terminal, reader):
        with terminal.taken():
            terminal.show("whole\nhalf ")
            print("printed")
            terminal.show("")
            sys.stderr.write("an error\n")
            terminal.show("a ")
            terminal.show("line\nnext\n")
            print("end")
        assert reader.read() == b"whole\nhalf \nprinted\nan error\nhalf a line\nnext\nend\n"


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_pieces(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """However pieces of lines from ranks and two streams come, each line is there whole, in its own order."""
    choose = random.Random(seed)
    with into_pipe(monkeypatch) as (terminal, reader):
        with terminal.taken():
            ways = {"rank": terminal.show, "out": sys.stdout.write, "err": sys.stderr.write}
            left = {name: "".join(f"{name} {n} {'.' * 9}\n" for n in range(30)) for name in ways}
            while any(left.values()):
                name = choose.choice([name for name, text in left.items() if text])
                size = choose.randint(1, 30)
                ways[name](left[name][:size])
                left[name] = left[name][size:]
        lines = (reader.read() or b"").decode().splitlines()
    for name in ways:
        assert [line for line in lines if line.startswith(name) and line.endswith("." * 9)] == [
            f"{name} {n} {'.' * 9}" for n in range(30)
        ]


def test_a_pipe_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints and logs wait in order until somebody reads, and hold up nothing; what is not read is given up."""
    with into_pipe(monkeypatch) as (terminal, reader):
        with logger_with(logging.StreamHandler(sys.stderr)) as logger, terminal.taken():
            for number in range(2000):
                print(f"line {number:>100}")
                logger.warning("log  %100d", number)
            assert not terminal.has_room() and not terminal.wait(0.01)
            got = b""
            while not got.endswith(b" 1999\n") or b"log" not in got[-110:]:
                got += reader.read() or b""
            assert terminal.wait(10) and terminal.has_room()
            print("never read" * 10_000)
            monkeypatch.setattr(terminal_module, "_LITTLE_PATIENCE_S", 0.1)
            terminal.hurry()
        print("it goes on", file=io.StringIO())
    assert got.decode() == "".join(f"line {number:>100}\nlog  {number:>100}\n" for number in range(2000))


def test_a_pipe_whose_reader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept and nothing is raised: the logs have everything."""
    with into_pipe(monkeypatch) as (terminal, reader), terminal.taken():
        reader.close()
        for _ in range(1000):
            terminal.show("text" * 1000)
        assert terminal.wait(10)


def test_a_pipe_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the encoding lacks becomes a question mark; the rest of the text is shown once."""
    with into_pipe(monkeypatch, "ascii") as (terminal, reader):
        with terminal.taken():
            terminal.show("a€b\n")
            print("plain ü")
        assert reader.read() == b"a?b\nplain ?\n"


def test_a_file_has_everything_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Standard output in a file has lines of the ranks and the program's, each whole."""
    path = tmp_path / "out"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        terminal = Terminal(board=False)
        print("before", end=" ")
        with logger_with(logging.StreamHandler(file)) as logger, terminal.taken():
            print("and after")
            terminal.show("half ")
            logger.warning("logged")
            terminal.show("a line\n")
        print("at the end")
    assert path.read_text() == "before and after\nhalf \nlogged\nhalf a line\nat the end\n"


def test_standard_streams_are_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program has kept of a standard stream finds its ranks' own one."""
    with into_pipe(monkeypatch) as (terminal, _), terminal.taken():
        assert frozen_config.loads(frozen_config.dumps([sys.stdout, sys.stderr], None)) == [sys.stdout, sys.stderr]
