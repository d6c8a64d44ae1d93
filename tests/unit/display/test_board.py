"""The board as text: rows, the bar, and the time that is left, in any width and state."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.cells import cell_len

from hydra_plugins.hydra_ddp_subprocess_launcher.display import board as board_module
from hydra_plugins.hydra_ddp_subprocess_launcher.display.board import clock, draw_board, seconds_left
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import (
    JobEnded,
    JobPaused,
    JobsAdded,
    JobStarted,
    JobSubmitted,
    SweepRecord,
)

NOW = 1000.0


def sweep(count: int = 6, at_once: int = 2, devices: bool = True) -> SweepRecord:
    """Return a sweep with one job that is done, one that failed, two that run, and the rest waiting."""
    record = SweepRecord()
    record.apply(JobsAdded(NOW - 100, 0, tuple((f"lr={number}", "model=cnn") for number in range(count)), at_once))
    for number in range(4):
        held = (str(2 * number), str(2 * number + 1)) if devices else ()
        record.apply(JobStarted(NOW - 90 + number * 10, number, 0, 2, held, f"/run/{number}"))
    record.apply(JobEnded(NOW - 50, 0, True, 0.5, "0.5", "", 40.0))
    record.apply(JobEnded(NOW - 85, 1, False, None, "", "bad", 5.0))
    return record


def drawn(record: SweepRecord, columns: int = 100, lines: int = 24, **options: Any) -> list[str]:
    return draw_board(record, NOW, (columns, lines), options.get("encoding", "utf-8"))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(board_module, "last_line_of_rank_0", lambda job: f"epoch {job.number}")


def test_a_wide_board() -> None:
    """A row a running job with what tells it from the others, and all counts in the last line."""
    header, *rows, summary = drawn(sweep())
    assert header.split() == ["job", "overrides", "devices", "ranks", "time", "last", "line", "of", "rank", "0"]
    assert [row.split() for row in rows] == [
        ["2", "lr=2", "4,5", "2", "1:10", "epoch", "2"],
        ["3", "lr=3", "6,7", "2", "1:00", "epoch", "3"],
    ]
    bar, text = summary.split(" ", 1)
    assert bar == "━" * 5 + "x" * 5 + ">" * 10 + "·" * 10
    assert re.fullmatch(r"1/6 done, 1 failed, 2 running, 2 waiting, 0:40 left, until \d\d:\d\d", text)


def test_without_devices_there_is_no_column_for_them() -> None:
    """On CPUs the room goes to the last line."""
    assert "devices" not in drawn(sweep(devices=False))[0]


@pytest.mark.parametrize("columns", [10, 20, 39, 40, 60, 69, 70, 80, 99, 100, 200])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in a row, it is cut to the terminal, of which the last column stays free."""
    record = SweepRecord()
    record.apply(JobsAdded(0, 0, (("name=" + "数字" * 40,), ("name=" + "x" * 200,)), 2))
    for number in range(2):
        record.apply(JobStarted(NOW, number, 0, 16, tuple(map(str, range(16))), "/run"))
    monkeypatch.setattr(board_module, "last_line_of_rank_0", lambda _job: "ﬁ" * 50 + "数" * 100 + "\u0301" * 5)
    lines = drawn(record, columns)
    assert all(cell_len(line) < columns for line in lines)
    assert len(lines) <= 4 + 60 // columns * 4 + 4


@pytest.mark.parametrize("lines", [1, 3, 5, 10, 24])
def test_there_is_room_for_more_than_the_board(lines: int) -> None:
    """With more jobs than lines the first ones are shown, and how many there are besides."""
    record = SweepRecord()
    record.apply(JobsAdded(0, 0, tuple((f"x={number}",) for number in range(50)), 50))
    for number in range(50):
        record.apply(JobStarted(NOW, number, 0, 2, (), "/run"))
    board = drawn(record, 100, lines)
    assert len(board) <= max(4, int(lines * 0.6) + 3)
    shown = sum("epoch" in line for line in board)
    assert shown >= 1 and board[-2] == f"… and {50 - shown} more running"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[31mred\x1b[0m alert", "red alert"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x1b]0;title\x07text", "text"),
        ("a\tb", "a b"),
        ("bell\x07\x00", "bell"),
        ("[bold]no markup[/bold] :smile:", "[bold]no markup[/bold] :smile:"),
    ],
)
def test_what_ranks_print_cannot_spoil_it(printed: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escape sequences, control characters and rich's own markup in a log line have no effect."""
    monkeypatch.setattr(board_module, "last_line_of_rank_0", lambda _job: printed)
    assert drawn(sweep())[1].endswith(shown)
    assert not any("\x1b" in line or "\x07" in line for line in drawn(sweep()))


def test_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are colours unless NO_COLOR is set, and with it no escape sequence at all."""
    assert not any("\x1b" in line for line in drawn(sweep()))
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in drawn(sweep())[-1] and "\x1b[31m" in drawn(sweep())[-1]


def test_a_terminal_that_knows_ascii_alone() -> None:
    """There the bar is drawn with what it has."""
    assert drawn(sweep(), encoding="ascii")[-1].startswith("=" * 5 + "x" * 5 + ">" * 10 + "." * 10 + " ")


def test_a_job_between_two_starts() -> None:
    """A job that waits for its next start says so, and counts as running."""
    record = sweep()
    record.apply(JobPaused(NOW, 2, "rank 1: bad"))
    assert drawn(record)[1].endswith("waits for its next start")
    assert "2 running" in drawn(record)[-1]


def test_before_the_first_and_after_the_last_job() -> None:
    """Without running jobs there is the bar alone."""
    record = SweepRecord()
    assert drawn(record) == [" 0/0 done"] or drawn(record)[-1].endswith("0/0 done")
    record.apply(JobsAdded(0, 0, (("x=1",),), 1))
    assert drawn(record)[-1].endswith("0/1 done, 1 waiting")
    record.apply(JobStarted(NOW, 0, 0, 1, (), "/run"))
    record.apply(JobEnded(NOW, 0, True, 1, "1", "", 1.0))
    (line,) = drawn(record)
    assert line == "━" * 30 + " 1/1 done"


@pytest.mark.parametrize("count", [4, 5, 6, 7, 13, 100, 999])
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_bar_has_one_length(count: int, columns: int) -> None:
    """However many jobs there are, the bar is as long as it is."""
    lines = drawn(sweep(count), columns)
    bar = next(re.match(r"[━x>·]+", line) for line in lines if re.match(r"[━x>·]", line))
    assert bar is not None and len(bar[0]) == {40: 39, 80: 20, 120: 30}[columns]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (-3, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_clock(seconds: float, text: str) -> None:
    """A clock shows seconds, minutes, and hours where there are some."""
    assert clock(seconds) == text


def test_the_time_that_is_left() -> None:
    """It follows the jobs that completed, what the running ones have had, and how many run at a time."""
    record = SweepRecord()
    assert seconds_left(record.by_state(), record.at_once, NOW) is None
    record.apply(JobsAdded(0, 0, tuple((f"x={number}",) for number in range(8)), 2))
    record.apply(JobStarted(NOW - 100, 0, 0, 1, (), "/run"))
    assert seconds_left(record.by_state(), record.at_once, NOW) is None
    record.apply(JobEnded(NOW, 0, False, None, "", "bad", 2.0))
    assert seconds_left(record.by_state(), record.at_once, NOW) == 7 * 2.0 / 2
    record.apply(JobStarted(NOW - 100, 1, 0, 1, (), "/run"))
    record.apply(JobEnded(NOW, 1, True, 1, "1", "", 100.0))
    assert seconds_left(record.by_state(), record.at_once, NOW) == 6 * 100.0 / 2
    record.apply(JobStarted(NOW - 60, 2, 0, 1, (), "/run"))
    record.apply(JobStarted(NOW - 500, 3, 0, 1, (), "/run"))
    assert seconds_left(record.by_state(), record.at_once, NOW) == (4 * 100.0 + 40.0) / 2
    for number in range(2, 7):
        record.apply(JobEnded(NOW, number, True, 1, "1", "", 100.0))
    record.apply(JobStarted(NOW, 7, 0, 1, (), "/run"))
    assert seconds_left(record.by_state(), record.at_once, NOW) == 100.0


def test_jobs_on_a_cluster() -> None:
    """Those that run have their id and nodes in the row; those that wait there are counted apart, as in the bar."""
    record = SweepRecord()
    record.apply(JobsAdded(0, 0, tuple((f"x={number}",) for number in range(4)), 4))
    for number in range(3):
        record.apply(JobSubmitted(NOW - 90, number, f"7_{number}", "/meet", "abc", "slurm", "/run"))
    assert drawn(record)[-1].endswith("0/4 done, 3 pending, 1 waiting")
    record.apply(JobStarted(NOW - 60, 0, 0, 4, (), "/run", "id", "abc", ("node1", "node2")))
    header, row, summary = drawn(record)
    assert header.split()[:6] == ["job", "overrides", "id", "nodes", "ranks", "time"]
    assert row.split() == ["0", "x=0", "7_0", "node1,node2", "4", "1:00", "epoch", "0"]
    bar, text = summary.split(" ", 1)
    assert text == "0/4 done, 1 running, 2 pending, 1 waiting"
    assert len(bar) == 30 and [bar.count(mark) for mark in ">:·"] in ([8, 15, 7], [8, 14, 8], [7, 15, 8])
    assert drawn(record, 60)[0].split() == ["#0", "x=0", "1:00"]
    record.apply(JobSubmitted(NOW, 0, "7_0", "/meet", "abc", "slurm", "/run"))
    assert drawn(record)[-1].endswith("0/4 done, 3 pending, 1 waiting"), "it is queued again"
