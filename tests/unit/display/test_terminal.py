"""Screens: lines above a board, against a terminal emulator, and without a board, into pipes and files."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

import pyte
import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher import _pickling, _screen
from hydra_plugins.hydra_ddp_subprocess_launcher._screen import Screen
from hydra_plugins.hydra_ddp_subprocess_launcher._streams import Screens, streams_above

BOARD = ["first row", "second row", "bar"]


class Emulator(io.StringIO):
    """A terminal that shows at once what is written."""

    def __init__(self, columns: int = 40, lines: int = 12) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, lines, history=5000)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def isatty(self) -> bool:
        return True

    @property
    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    @property
    def lines(self) -> list[str]:
        columns = self.screen.columns
        scrolled = ["".join(line[place].data for place in range(columns)) for line in self.screen.history.top]
        lines = [line.rstrip() for line in [*scrolled, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    emulator = Emulator()
    monkeypatch.setattr(Screen, "size", property(lambda _self: emulator.size))
    return emulator


def test_lines_scroll_by_above_the_board(terminal: Emulator) -> None:
    """The board is at the end, once, and all lines are above it in order, however many there are."""
    screen = Screen(terminal)
    shown = []
    for number in range(50):
        screen.show(f"line {number}\n")
        shown.append(f"line {number}")
        screen.paint([*BOARD, f"step {number}"])
        assert terminal.lines == [*shown, *BOARD, f"step {number}"]
    screen.close()
    assert terminal.lines == shown
    assert terminal.screen.cursor.x == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_things(terminal: Emulator, seed: int) -> None:
    """Boards that grow and shrink, and lines of any number, leave the lines in order and the last board below."""
    choose = random.Random(seed)
    screen = Screen(terminal)
    shown: list[str] = []
    board: list[str] = []
    for step in range(60):
        if choose.random() < 0.5:
            lines = [f"line {step}.{part}" for part in range(choose.randint(1, 15))]
            screen.show("".join(f"{line}\n" for line in lines))
            shown += lines
        else:
            board = [f"board {step}.{part}" for part in range(choose.randint(0, 6))]
            screen.paint(board)
        assert terminal.lines == [*shown, *board]
    screen.close()
    assert terminal.lines == shown


@pytest.mark.parametrize("lines", [2, 3, 4])
def test_a_terminal_with_few_lines(terminal: Emulator, lines: int) -> None:
    """Where the board has no room its last lines are shown, and nothing is left behind."""
    terminal.screen.resize(lines, 40)
    screen = Screen(terminal)
    for number in range(10):
        screen.show(f"line {number}\n")
        screen.paint(BOARD)
    assert terminal.lines == [*(f"line {number}" for number in range(10)), *BOARD[-(lines - 1) :]]


@pytest.mark.parametrize(("columns", "lines"), [(5, 12), (8, 30), (40, 3), (4, 4)])
def test_a_terminal_that_is_made_smaller(terminal: Emulator, columns: int, lines: int) -> None:
    """The board stands once, in the new size, whatever the terminal did to its lines; what fits of the lines, too."""
    screen = Screen(terminal)
    for number in range(3):
        screen.show(f"{number}\n")
    screen.paint(BOARD)
    terminal.screen.resize(lines, columns)
    fitting = [line[: columns - 1].rstrip() for line in BOARD][-(lines - 1) :]
    screen.paint(fitting)
    shown = [line for line in terminal.screen.display if line.strip()]
    assert [line.rstrip() for line in shown][-len(fitting) :] == fitting
    assert len(shown) <= len(fitting) + 3
    if lines == 12:
        assert [line.rstrip() for line in shown] == ["0", "1", "2", *fitting]


def test_the_same_board_is_not_drawn_twice(terminal: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing has changed nothing is written."""
    screen = Screen(terminal)
    screen.paint(BOARD)
    monkeypatch.setattr(terminal, "write", lambda _text: pytest.fail("it was written to"))
    screen.paint(BOARD)


def test_a_terminal_that_takes_nothing() -> None:
    """While nobody reads the terminal (Ctrl-S) boards are left out, lines wait, and nothing blocks."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as out, os.fdopen(reading, "rb") as reader:
        screen = Screen(out)
        for number in range(5000):
            screen.show(f"line {number:>6}\n")
            screen.paint([f"board {number}"])
        got = b""
        while b"line   4999" not in got:
            got += os.read(reader.fileno(), 65536)
            screen.drain()
        text = got.decode()
    assert all(f"line {number:>6}\n" in text for number in range(5000))


def test_streams_and_logging(terminal: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output, standard error and log handlers write above the board, and are as they were afterwards."""
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    elsewhere = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("of this test")
    logger.addHandler(handler)
    logger.addHandler(elsewhere)
    screens = Screens(terminal)
    assert screens.board is not None
    with streams_above(screens):
        screens.board.paint(BOARD)
        print("printed")
        sys.stderr.write("half ")
        sys.stderr.write("a line\n10%\r50%\r100%\n")
        logger.warning("logged")
        assert terminal.lines == ["printed", "half a line", "100%", "logged", *BOARD]
        assert sys.stdout.isatty()
        print("not ended", end="")
    assert sys.stdout is terminal and sys.stderr is terminal and handler.stream is terminal
    assert terminal.lines == ["printed", "half a line", "100%", "logged", "not ended"]
    assert isinstance(elsewhere.stream, io.StringIO) and elsewhere.stream.getvalue() == "logged\n"


def test_a_stream_that_the_program_replaced_stays(terminal: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sets `sys.stdout` meanwhile keeps what he set."""
    monkeypatch.setattr(sys, "stdout", terminal)
    mine = io.StringIO()
    with streams_above(Screens(terminal)):
        sys.stdout = mine
    assert sys.stdout is mine


def test_threads(terminal: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several threads print at once stays whole, line by line."""
    monkeypatch.setattr(sys, "stdout", terminal)
    screens = Screens(terminal)
    assert screens.board is not None
    with streams_above(screens):

        def chat(name: str) -> None:
            for number in range(100):
                print(name * 8, number)

        threads = [threading.Thread(target=chat, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            screens.board.paint(BOARD)
    assert sorted(terminal.lines) == sorted(f"{name * 8} {number}" for name in "abc" for number in range(100))


def test_which_streams_have_one_screen(tmp_path: Path) -> None:
    """Two descriptors of one terminal, pipe or file have; another terminal, a file or a text in memory has its own."""
    ours, theirs = os.openpty()
    other, end = os.openpty()
    with os.fdopen(theirs, "w") as one, os.fdopen(os.dup(theirs), "w") as two, os.fdopen(end, "w") as three:
        screens = Screens(one)
        assert screens.of(two) is screens.of(one) is screens.board
        assert screens.find(three) is None
        assert len({screens.of(three), screens.of(io.StringIO()), screens.of(None), screens.board}) == 4
        with (tmp_path / "file").open("a") as here, (tmp_path / "file").open("a") as too:
            assert screens.of(here) is screens.of(too) is not screens.board
    os.close(ours)
    os.close(other)


# --- without a board


@contextmanager
def into_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Screens, TextIO, BinaryIO]]:
    """Let standard output and standard error be streams of one pipe; yield its reading end, too."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with (
        os.fdopen(writing, "w", encoding="utf-8") as out,
        os.fdopen(os.dup(writing), "w", encoding="utf-8") as err,
        os.fdopen(reading, "rb") as reader,
    ):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        yield Screens(), out, reader


def test_a_pipe_shows_what_was_begun_as_the_stream_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line comes when it ends, and what was begun when it is flushed or the block ends, as it was written."""
    with into_pipe(monkeypatch) as (screens, out, reader):
        print("before", end=" ")
        with streams_above(screens):
            print("and after\rredrawn")
            assert reader.read() == b"before and after\rredrawn\n"
            print("10%", end="")
            assert reader.read() is None
            sys.stdout.flush()
            assert reader.read() == b"10%"
            print("\r20%", end="", flush=True)
            assert reader.read() == b"\r20%"
            print("\r30%")
            print("€ not ended", end="")
            assert reader.read() == b"\r30%\n"
        assert sys.stdout is out
        assert reader.read() == "€ not ended".encode()


def test_a_line_that_others_write_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands at the end of the text is ended by who writes next, and begun anew when it goes on."""
    with into_pipe(monkeypatch) as (screens, out, reader):
        ranks = screens.of(out)
        with streams_above(screens):
            ranks.show("whole\nhalf ")
            print("printed")
            ranks.show("")
            sys.stderr.write("an error\n")
            ranks.show("a ")
            ranks.show("line\nnext\n")
            print("end")
        assert reader.read() == b"whole\nhalf \nprinted\nan error\nhalf a line\nnext\nend\n"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_pieces(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """However pieces of lines from ranks, two streams and a log come, each line is there whole, in its own order."""
    choose = random.Random(seed)
    with into_pipe(monkeypatch) as (screens, out, reader), os.fdopen(os.dup(out.fileno()), "w") as another:
        ranks = screens.of(out)
        logger, handler = logging.getLogger("of this test"), logging.StreamHandler(another)
        logger.addHandler(handler)
        with streams_above(screens):
            ways = {
                "rank": ranks.show,
                "out": lambda text: print(text, end="", flush=choose.random() < 0.5),
                "err": lambda text: print(text, end="", file=sys.stderr, flush=choose.random() < 0.5),
            }
            left = {name: "".join(f"{name} {n} {'.' * 9}\n" for n in range(30)) for name in ways}
            logged = 0
            while any(left.values()):
                if choose.random() < 0.2:
                    logger.warning("log %d", logged)
                    logged += 1
                name = choose.choice([name for name, text in left.items() if text])
                size = choose.randint(1, 30)
                ways[name](left[name][:size])
                left[name] = left[name][size:]
        logger.removeHandler(handler)
        lines = (reader.read() or b"").decode().splitlines()
    for name in ways:
        assert [line for line in lines if line.startswith(name) and line.endswith("." * 9)] == [
            f"{name} {n} {'.' * 9}" for n in range(30)
        ]
    assert [line for line in lines if line.startswith("log")] == [f"log {n}" for n in range(logged)]


def test_a_pipe_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints and logs wait in order until somebody reads, and hold up nobody; what is not read is given up."""
    with into_pipe(monkeypatch) as (screens, _, reader):
        handler = logging.StreamHandler(sys.stderr)
        logger = logging.getLogger("of this test")
        logger.addHandler(handler)
        with streams_above(screens):
            for number in range(10_000):
                print(f"line {number:>6}")
                logger.warning("log  %6d", number)
            assert not screens.drain()
            got = b""
            while b"log    9999\n" not in got[-100:]:
                got += reader.read() or b""
                screens.drain()
            assert screens.drain()
            for _ in range(10_000):
                print("never read")
            screens.patience_s = 0.1
        logger.removeHandler(handler)
        assert screens.drain()
    assert got.decode() == "".join(f"line {number:>6}\nlog  {number:>6}\n" for number in range(10_000))


@pytest.mark.parametrize("kind", ["file", "memory", "capture"])
def test_what_has_no_reader_is_written_directly(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files, texts in memory and pytest's own streams have everything at once, written by themselves, and in order."""
    path = tmp_path / "out"
    with path.open("w", encoding="ascii", errors="backslashreplace") as file:
        stream = {"file": file, "memory": io.StringIO(), "capture": sys.stdout}[kind]
        monkeypatch.setattr(sys, "stdout", stream)
        handler = logging.StreamHandler(stream)
        logger = logging.getLogger("of this test")
        logger.addHandler(handler)
        screens = Screens()
        ranks = screens.of(stream)
        print("before", end=" ")
        with streams_above(screens):
            print("and after")
            ranks.show("half ")
            logger.warning("logged")
            ranks.show("a line\n")
            print("é" if kind == "file" else "\\xe9")
            text = path.read_text() if kind == "file" else None
        logger.removeHandler(handler)
        assert sys.stdout is stream and handler.stream is stream
        if isinstance(stream, io.StringIO):
            text = stream.getvalue()
    if text is None:
        text = capsys.readouterr().out
    assert text == "before and after\nhalf \nlogged\nhalf a line\n\\xe9\n"


def test_a_board_that_comes_later(terminal: Emulator) -> None:
    """A board that is painted below a line without an end begins on a line of its own, and the other one anew."""
    screen = Screen(terminal)
    screen.show("half ")
    screen.paint(BOARD)
    screen.show("a line\n")
    screen.paint(BOARD)
    assert terminal.lines == ["half", "half a line", *BOARD]


def test_standard_streams_are_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program has kept of a standard stream finds its ranks' own one, also while another stands in for it."""
    with into_pipe(monkeypatch) as (screens, out, _), streams_above(screens):
        for stream in (out, sys.stdout):
            assert _pickling.loads(_pickling.dumps([stream], None)) == [sys.stdout]


def test_a_process_without_the_terminal_does_not_draw() -> None:
    """A terminal whose foreground is another's is only written to."""
    assert _screen._in_foreground(io.StringIO())
