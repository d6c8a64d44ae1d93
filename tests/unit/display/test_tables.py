"""What the user reads about jobs: overrides, durations, and the table at the end."""

from __future__ import annotations

from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.text import duration
from hydra_plugins.hydra_ddp_subprocess_launcher.display.tables import override_line, results_table
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobRecord, JobState, short_text


def result(number: int, value: Any = None, **changes: Any) -> JobRecord:
    """Return a job that completed with a value, or, with a `cause`, one that failed."""
    facts = {"overrides": (f"lr={number}",), "seconds": 1.0, "attempts": 1, **changes}
    if "cause" in changes:
        return JobRecord(number, state=JobState.FAILED, **facts)
    return JobRecord(number, state=JobState.COMPLETED, text=short_text(value), **facts)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as the terminal."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0.0 s"),
        (0.84, "0.8 s"),
        (59.9, "59.9 s"),
        (60, "1:00"),
        (185.4, "3:05"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (3723, "1:02:03"),
        (100 * 3600 + 61, "100:01:01"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    """A duration has the unit that people would use."""
    assert duration(seconds) == text


def test_overrides_as_the_basic_launcher_shows_them() -> None:
    """Hydra's own options are left out of a job's line."""
    assert override_line(["lr=0.1", "hydra.sweep.dir=x", "m=[1,2]"]) == "lr=0.1 m=[1,2]"
    assert override_line([]) == ""


def test_the_table() -> None:
    """One row a job, in the order given, with what it returned or why it failed, and the sum of both."""
    table = results_table(
        [
            result(7, 0.9665738, overrides=("lr=0.1", "model=mlp"), seconds=4.1, devices=("0", "1")),
            result(8, cause="rank 1: ValueError: broken", seconds=75.0, devices=("2", "3")),
            result(9, None, seconds=None, overrides=()),
        ]
    )
    assert table.splitlines() == [
        "job  overrides         status     value      time  devices  cause",
        "  7  lr=0.1 model=mlp  completed  0.966574  4.1 s  0,1",
        "  8  lr=8              FAILED                1:15  2,3      rank 1: ValueError: broken",
        "  9                    completed  None          -",
        "3 jobs: 2 completed, 1 failed",
    ]


def test_columns_with_nothing_in_them_are_left_out() -> None:
    """Without devices and failures there are no columns for them; without values none for these."""
    assert results_table([result(0, 1)]).splitlines()[0] == "job  overrides  status     value   time"
    assert results_table([result(0, cause="bad")]).splitlines()[0] == "job  overrides  status   time  cause"


class BadRepr:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1 + 0.2, "0.3"),
        (1e-9, "1e-09"),
        (float("nan"), "nan"),
        ({"loss": 1, "n": [1, 2]}, "{'loss': 1, 'n': [1, 2]}"),
        ("two\nlines", repr("two\nlines")),
        ("x" * 100, "'" + "x" * 58 + "…"),
        (BadRepr(), "BadRepr"),
        ("[bold]no markup[/bold]", "'[bold]no markup[/bold]'"),
        ("https://example.org :smile:", "'https://example.org :smile:'"),
    ],
)
def test_a_value_in_one_short_line(value: Any, shown: str) -> None:
    """Any value is shown in at most 60 characters of one line, and never as markup."""
    assert results_table([result(0, value)]).splitlines()[1] == f"  0  lr=0       completed  {shown:<5}  1.0 s"


def test_long_overrides_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off: what does not fit goes on in the next line, on a narrow terminal, too."""
    monkeypatch.setenv("COLUMNS", "20")
    overrides = tuple(f"key{number}={'v' * 20}" for number in range(5))
    cause = "rank 0: " + "reason " * 20
    table = results_table([result(0, overrides=overrides, cause=cause)])
    assert all(len(line) <= 60 for line in table.splitlines())
    for number in range(5):
        assert f"key{number}=" in table
    assert table.count("reason") == 20
    assert "…" not in table


def test_no_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table goes into a log file, too: no colours, whatever the environment asks for."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in results_table([result(0, 1.5), result(1, cause="bad")])


def test_an_empty_batch() -> None:
    """A batch without jobs has a table without rows."""
    assert results_table([]).splitlines()[-1] == "0 jobs: 0 completed, 0 failed"


def test_jobs_whose_ranks_formed_no_group() -> None:
    """The table names them, and what to set, before the sum."""
    table = results_table([result(0), result(1, ungrouped=True), result(2, ungrouped=True)])
    *_, warning, last = table.splitlines()
    assert warning.startswith("Warning: jobs 1, 2: ")
    assert "'hydra.launcher.nproc_per_node=${trainer.devices}'" in warning
    assert last == "3 jobs: 3 completed, 0 failed"
    assert "Warning" not in results_table([result(0)])
