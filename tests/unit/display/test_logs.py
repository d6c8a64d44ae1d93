"""Rank logs: the way to the terminal, raw or line by line, and the last lines for a report."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.display.logs import LogTee, last_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.log"


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def encodable(tee: LogTee, *, last: bool = False) -> str:
    """Return all that a tee has to show now."""
    pieces = []
    while piece := tee.read(last=last):
        pieces.append(piece)
    return "".join(pieces)


# --- raw


def test_raw_output_is_shown_as_it_comes(log: Path) -> None:
    """Without a prefix every byte is shown at once, so that progress bars and prompts move; nothing twice."""
    tee = LogTee(str(log), "", raw=True)
    assert encodable(tee) == ""
    for data in (b"no newline", b"\rredrawn 10%", b"\r\n", b"\x1b[1mbold\x1b[0m\n\n"):
        add(log, data)
        assert encodable(tee) == data.decode()
        assert encodable(tee) == ""
    assert encodable(tee, last=True) == ""


def test_a_character_in_two_parts(log: Path) -> None:
    """A character whose bytes arrive one by one is shown when it is whole."""
    tee = LogTee(str(log), "", raw=True)
    pieces = []
    for byte in "a€ü𝄞b".encode():
        add(log, bytes([byte]))
        pieces.append(encodable(tee))
    assert "".join(pieces) == "a€ü𝄞b"


def test_bytes_that_are_no_text(log: Path) -> None:
    """Bytes that are no UTF-8 are shown as replacement characters, and what follows is not lost."""
    tee = LogTee(str(log), "", raw=True)
    add(log, b"a\xff\xfeb\xe2\x82c\n")
    assert encodable(tee) == "a\ufffd\ufffdb\ufffdc\n"


def test_the_last_line_is_ended_once(log: Path) -> None:
    """What the launcher says next begins on a line of its own, and output that ended its last line gets none."""
    for data, end in ((b"", ""), (b"done\n", ""), (b"50%", "\n"), (b"\r100%", "\n")):
        log.write_bytes(data)
        tee = LogTee(str(log), "", raw=True)
        assert encodable(tee, last=True) == data.decode() + end
        assert encodable(tee, last=True) == ""


# --- with a prefix


def test_lines_with_a_prefix(log: Path) -> None:
    """With a prefix a line is shown when it is whole, and at the end also when it is not."""
    tee = LogTee(str(log), "[r1] ")
    add(log, b"one\ntw")
    assert encodable(tee) == "[r1] one\n"
    add(log, b"o\n\nthree")
    assert encodable(tee) == "[r1] two\n[r1] \n"
    assert encodable(tee) == ""
    assert encodable(tee, last=True) == "[r1] three\n"
    assert encodable(tee, last=True) == ""


def test_a_progress_bar_with_a_prefix(log: Path) -> None:
    """Of a line that is redrawn the last state is shown, once, when its newline comes."""
    tee = LogTee(str(log), "[r1] ")
    for percent in (10, 50, 100):
        add(log, f"\r{percent}%".encode())
        assert encodable(tee) == ""
    add(log, b"\nnext\n")
    assert encodable(tee) == "[r1] 100%\n[r1] next\n"


def test_a_character_in_two_parts_with_a_prefix(log: Path) -> None:
    """Nor is a character torn apart where lines are."""
    tee = LogTee(str(log), "> ")
    for byte in "ä\n€\n".encode():
        add(log, bytes([byte]))
        assert encodable(tee) in ("", "> ä\n", "> €\n")
    add(log, "ü".encode())
    assert encodable(tee, last=True) == "> ü\n"


@pytest.mark.parametrize("seed", range(10))
def test_any_pieces_give_the_same_lines(log: Path, seed: int) -> None:
    """However the bytes arrive, raw output is what was written, with its last line ended, and lines are whole."""
    choose = random.Random(seed)
    text = "".join(choose.choice(["a", "ü", "€", "\n", "word ", "𝄞"]) for _ in range(300)) + "end"
    data = text.encode()
    raw, lines = LogTee(str(log), "", raw=True), LogTee(str(log), "> ")
    texts = ["", ""]
    while data:
        size = choose.randint(1, 12)
        add(log, data[:size])
        data = data[size:]
        texts[0] += encodable(raw)
        texts[1] += encodable(lines)
    texts[0] += encodable(raw, last=True)
    texts[1] += encodable(lines, last=True)
    assert texts[0] == f"{text}\n"
    assert texts[1] == "".join(f"> {line}\n" for line in text.split("\n"))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\x1b[32mgreen\x1b[0m and \x1b[1;31mred", "\x1b[32mgreen\x1b[0m and \x1b[1;31mred\x1b[0m"),
        (b"\x1b[2J\x1b[Hcleared", "cleared"),
        (b"\x1b[1A\x1b[2Kbar\x1b[?25l", "bar"),
        (b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "textlink"),
        (b"bell\x07 back\x08 null\x00 del\x7f", "bell back null del"),
        (b"\x1b7saved\x1b8", "saved"),
        (b"torn \x1b[3", "torn "),
        (b"a\tb", "a\tb"),
        ("c1 \x9b2J".encode(), "c1 2J"),
    ],
)
def test_lines_move_no_cursor(log: Path, data: bytes, line: str) -> None:
    """Of what a terminal obeys only colours stay, and they end with their line: no line can spoil another one."""
    tee = LogTee(str(log), "> ")
    add(log, data + b"\n")
    assert encodable(tee) == f"> {line}\n"


@pytest.mark.parametrize("raw", [True, False])
def test_a_log_that_grows_faster_than_it_is_shown(log: Path, raw: bool) -> None:
    """Who is far behind goes on at the end, at the start of a line, and says how much was left out and where it is."""
    tee = LogTee(str(log), "" if raw else "> ", raw=raw)
    lines = [f"line {number:>12}" for number in range(700_000)]
    add(log, ("\n".join(lines) + "\n").encode())
    text = encodable(tee)
    note, *rest = [line.removeprefix("> ") for line in text.splitlines() if line.removeprefix("> ")]
    assert "MB left out" in note and str(log) in note
    assert rest == lines[-len(rest) :]
    assert 100 < len(rest) < 2000
    add(log, b"and on\n")
    assert encodable(tee) == ("and on\n" if raw else "> and on\n")


def test_a_big_log(log: Path) -> None:
    """Many lines at once are shown whole."""
    tee = LogTee(str(log), "> ")
    lines = [f"line {number}" for number in range(80_000)]
    add(log, ("\n".join(lines) + "\n").encode())
    assert encodable(tee) == "".join(f"> {line}\n" for line in lines)


# --- logs that come and go


def test_a_log_that_is_not_there(log: Path) -> None:
    """A log that does not exist yet, or no more, shows nothing and is no error."""
    tee = LogTee(str(log), "", raw=True)
    assert encodable(tee) == ""
    add(log, b"a\n")
    assert encodable(tee) == "a\n"
    log.unlink()
    assert encodable(tee, last=True) == ""
    assert last_lines(str(log), 5) == []


# --- the last lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\ntwo\nthree\nfour\n", ["two", "three", "four"]),
        (b"\n\none\n\n  \ntwo\n\n", ["one", "two"]),
        (b"10%\r50%\r100%\ndone\n", ["100%", "done"]),
        (b"dos\r\nlines\r\n", ["dos", "lines"]),
        (b"bar 1%\rbar 9%\r", ["bar 9%"]),
        (b"  indented\n", ["  indented"]),
        (b"bad \xff bytes\n", ["bad \ufffd bytes"]),
    ],
)
def test_last_lines(log: Path, data: bytes, lines: list[str]) -> None:
    """The last lines that say something, at most so many, each in its last state."""
    log.write_bytes(data)
    assert last_lines(str(log), 3) == lines


def test_the_last_lines_of_a_big_log(log: Path) -> None:
    """Of a big log the end is read, whatever stands before it."""
    log.write_bytes(b"x" * 5_000_000 + b"\n" + "".join(f"line {n}\n" for n in range(1000)).encode())
    assert last_lines(str(log), 3) == ["line 997", "line 998", "line 999"]
