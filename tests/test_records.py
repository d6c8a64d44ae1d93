"""What is known about a sweep after each of its events, in memory and read back from the journal."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher._events import (
    Event,
    JobEnded,
    JobPaused,
    JobsAdded,
    JobSkipped,
    JobStarted,
    SweepBegan,
    SweepStopped,
    json_value,
    short_text,
)
from hydra_plugins.hydra_ddp_subprocess_launcher._files import SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher._journal import Journal, read_events, read_journal
from hydra_plugins.hydra_ddp_subprocess_launcher._ledger import Ledger
from hydra_plugins.hydra_ddp_subprocess_launcher._records import JobRecord, JobState, SweepRecord

EVENTS: list[Event] = [
    SweepBegan(1.0, 42, "here", ("python", "train.py"), "/work", "0.1"),
    JobsAdded(2.0, 0, (("lr=1", "seed=7"), ("lr=2", "seed=7"), ("lr=3", "seed=7")), 2),
    JobStarted(3.0, 0, 0, 2, ("0", "1"), "/sweep/0", "id-0", "abc"),
    JobStarted(3.5, 1, 0, 2, ("2", "3"), "/sweep/1"),
    JobPaused(4.0, 1, "rank 1: ValueError: bad"),
    JobStarted(5.0, 1, 1, 2, ("2", "3"), "/sweep/1"),
    JobEnded(6.0, 0, True, {"loss": 0.5}, "{'loss': 0.5}", "", 3.0),
    JobEnded(7.0, 1, False, None, "", "rank 1: ValueError: bad", 3.5),
    SweepStopped(8.0, "SIGINT"),
    JobSkipped(8.0, 2, "stopped"),
]
FINAL = {
    0: JobRecord(
        0,
        ("lr=1", "seed=7"),
        JobState.COMPLETED,
        attempts=1,
        nproc=2,
        devices=("0", "1"),
        run_dir="/sweep/0",
        run_id="id-0",
        config_hash="abc",
        began_at=3.0,
        ended_at=6.0,
        seconds=3.0,
        value={"loss": 0.5},
        text="{'loss': 0.5}",
    ),
    1: JobRecord(
        1,
        ("lr=2", "seed=7"),
        JobState.FAILED,
        attempts=2,
        nproc=2,
        devices=("2", "3"),
        run_dir="/sweep/1",
        began_at=3.5,
        ended_at=7.0,
        seconds=3.5,
        cause="rank 1: ValueError: bad",
    ),
    2: JobRecord(2, ("lr=3", "seed=7"), JobState.NEVER_STARTED, cause="stopped"),
}


def written(folder: Path, events: list[Event]) -> Path:
    path = folder / "journal.jsonl"
    journal = Journal(str(path))
    for event in events:
        journal.append(event)
    return path


def test_events_add_up() -> None:
    """A job is waiting, running, paused, running again, and over; what is known of it grows."""
    record = SweepRecord()
    states = []
    for event in EVENTS:
        record.apply(event)
        states.append([job.state.name for job in record.jobs.values()])
    assert states[1:] == [
        ["WAITING", "WAITING", "WAITING"],
        ["RUNNING", "WAITING", "WAITING"],
        ["RUNNING", "RUNNING", "WAITING"],
        ["RUNNING", "PAUSED", "WAITING"],
        ["RUNNING", "RUNNING", "WAITING"],
        ["COMPLETED", "RUNNING", "WAITING"],
        ["COMPLETED", "FAILED", "WAITING"],
        ["COMPLETED", "FAILED", "WAITING"],
        ["COMPLETED", "FAILED", "NEVER_STARTED"],
    ]
    assert record.jobs == FINAL
    assert record.stopped_by == "SIGINT" and record.at_once == 2 and record.began == EVENTS[0]
    assert record.shared == {"seed=7"}


def test_overrides_that_all_jobs_have() -> None:
    """Shared is what every job of several has, over all batches; a single job shares nothing."""
    record = SweepRecord()
    record.apply(JobsAdded(0, 0, (("a=1", "b=1"),), 1))
    assert record.shared == frozenset()
    record.apply(JobsAdded(0, 1, (("a=1", "b=2"),), 1))
    assert record.shared == {"a=1"}
    record.apply(JobsAdded(0, 2, (("a=1", "b=2"), ("a=2", "b=2")), 1))
    assert record.shared == frozenset()
    record.apply(JobsAdded(0, 4, (("a=1", "b=2"),), 1))
    assert record.shared == frozenset()


def test_the_journal_has_it_all(tmp_path: Path) -> None:
    """What is read back is what was written, and every line is JSON for other programs."""
    path = written(tmp_path, EVENTS)
    assert list(read_events(str(path))) == EVENTS
    record = read_journal(str(path))
    assert record.jobs == FINAL and record.stopped_by == "SIGINT"
    lines = path.read_text(encoding="ascii").splitlines()
    assert [json.loads(line)["event"] for line in lines] == [type(event).__name__ for event in EVENTS]


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_journal_cut_anywhere(tmp_path: Path, cut: int) -> None:
    """Whatever a crash left of the last line, the events before it are there."""
    path = written(tmp_path, EVENTS)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 1 - cut])
    events = list(read_events(str(path)))
    assert events == EVENTS[: len(events)]
    assert len(events) >= len(EVENTS) - 1 - data[len(data) - 1 - cut :].strip().count(b"\n")


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[1]", b"null", b'{"event": "Unheard"}', b'{"event": "JobEnded"}', b"\xff\xfe\x00", b'"JobEnded"'],
)
def test_lines_that_are_not_understood(tmp_path: Path, line: bytes) -> None:
    """A line of a later version, or a damaged one, is passed over; a field that is not known is, too."""
    path = written(tmp_path, EVENTS[:3])
    later = json.dumps({"event": "SweepStopped", "at": 9.0, "signal": "SIGTERM", "mood": "new"}).encode()
    with path.open("ab") as file:
        file.write(line + b"\n" + later + b"\n")
    assert list(read_events(str(path))) == [*EVENTS[:3], SweepStopped(9.0, "SIGTERM")]


def test_text_that_is_no_text(tmp_path: Path) -> None:
    """Bytes of a file name that are no UTF-8 come back, and do not harm the file's encoding."""
    event = JobStarted(1.0, 0, 0, 1, (), os.fsdecode(b"/sweep/\xff\xe4"))
    path = written(tmp_path, [event])
    assert list(read_events(str(path))) == [event]
    path.read_text(encoding="utf-8")


def test_a_journal_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and the sweep goes on with its records in memory."""
    paths = SweepPaths(str(tmp_path / "gone"))
    ledger = Ledger(paths)
    for event in EVENTS:
        ledger.note(event)
    assert ledger.record.jobs == FINAL
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "journal.jsonl cannot be written: No such file" in caplog.text
    assert "results.csv cannot be written: No such file" in caplog.text


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk it is said once, and nothing is raised."""
    journal = Journal("/dev/full")
    journal.append(EVENTS[0])
    journal.append(EVENTS[1])
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("text", "text"),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        ((1, 2.5), [1, 2.5]),
        ({"a": [1, {"b": math.nan}]}, {"a": [1, {"b": "NaN"}]}),
        ({1: 2}, None),
        (object(), None),
        ([object()], None),
        (b"bytes", None),
        (1 + 2j, None),
    ],
)
def test_values_in_json(value: Any, stored: Any) -> None:
    """Numbers, text, lists and dicts keep their types; what JSON lacks has a word or is left out."""
    assert json_value(value) == stored
    assert type(json_value(value)) is type(stored)
    json.loads(json.dumps(json_value(value)), parse_constant=pytest.fail)


def test_a_value_that_contains_itself() -> None:
    """Such a value is no JSON, and no error."""
    value: list[Any] = []
    value.append(value)
    assert json_value(value) is None
    assert short_text(value) == "[[...]]"


def test_scalars_of_numpy() -> None:
    """NumPy's scalars are the numbers that they hold."""
    numpy = pytest.importorskip("numpy")
    assert json_value({"a": numpy.float32(0.5), "b": numpy.int64(3)}) == {"a": 0.5, "b": 3}
    assert json_value(numpy.float64("nan")) == "NaN"
    assert json_value(numpy.zeros(3)) is None
