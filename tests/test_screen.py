"""The lower end of a terminal, against a terminal emulator: a board, and lines that scroll by above it."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import threading

import pyte
import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher import _screen
from hydra_plugins.hydra_ddp_subprocess_launcher._screen import Screen
from hydra_plugins.hydra_ddp_subprocess_launcher._streams import same_terminal, streams_above

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
    screen = Screen(terminal)
    with streams_above(screen, terminal):
        screen.paint(BOARD)
        print("printed")
        sys.stderr.write("half ")
        sys.stderr.write("a line\n10%\r50%\r100%\n")
        logger.warning("logged")
        assert terminal.lines == ["printed", "half a line", "100%", "logged", *BOARD]
        assert sys.stdout.isatty()
        print("not ended", end="")
    assert sys.stdout is terminal and sys.stderr is terminal and handler.stream is terminal
    screen.close()
    assert terminal.lines == ["printed", "half a line", "100%", "logged", "not ended"]
    assert isinstance(elsewhere.stream, io.StringIO) and elsewhere.stream.getvalue() == "logged\n"


def test_a_stream_that_the_program_replaced_stays(terminal: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sets `sys.stdout` meanwhile keeps what he set."""
    monkeypatch.setattr(sys, "stdout", terminal)
    mine = io.StringIO()
    with streams_above(Screen(terminal), terminal):
        sys.stdout = mine
    assert sys.stdout is mine


def test_threads(terminal: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several threads print at once stays whole, line by line."""
    monkeypatch.setattr(sys, "stdout", terminal)
    screen = Screen(terminal)
    with streams_above(screen, terminal):

        def chat(name: str) -> None:
            for number in range(100):
                print(name * 8, number)

        threads = [threading.Thread(target=chat, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            screen.paint(BOARD)
    screen.close()
    assert sorted(terminal.lines) == sorted(f"{name * 8} {number}" for name in "abc" for number in range(100))


def test_which_streams_are_one_terminal() -> None:
    """Two descriptors of one terminal are; a file, a pipe or nothing is not."""
    ours, theirs = os.openpty()
    other, end = os.openpty()
    with os.fdopen(theirs, "w") as one, os.fdopen(os.dup(theirs), "w") as two, os.fdopen(end, "w") as three:
        assert same_terminal(one, two)
        assert not same_terminal(one, three)
        assert not same_terminal(one, None)
        assert not same_terminal(one, io.StringIO())
        with open(os.devnull, "w") as nothing:
            assert not same_terminal(nothing, nothing)
    os.close(ours)
    os.close(other)


def test_a_process_without_the_terminal_does_not_draw() -> None:
    """A terminal whose foreground is another's is only written to."""
    assert _screen._in_foreground(io.StringIO())
