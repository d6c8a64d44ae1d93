"""What is known about a sweep after each of its events, in memory and read back from the journal."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import Resume
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobEnd, JobFolder
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.resume import PreviousRuns
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import (
    Event,
    JobEnded,
    JobPaused,
    JobRecord,
    JobsAdded,
    JobSkipped,
    JobStarted,
    JobState,
    JobSubmitted,
    SweepBegan,
    SweepRecord,
    SweepStopped,
    json_value,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import (
    Journal,
    SweepRecorder,
    read_events,
    read_journal,
)

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


ON_CLUSTER: list[Event] = [
    SweepBegan(1.0, 42, "here", ("python",), "/work", "0.1", 15.0, "/sweep"),
    JobsAdded(2.0, 0, (("x=1",), ("x=2",)), 2),
    JobSubmitted(3.0, 0, "7_0", "/sweep/.ddp/nodes/a/0", "abc", "slurm", "/sweep/7_0"),
    JobSubmitted(3.0, 1, "7_1", "/sweep/.ddp/nodes/a/1", "def", "slurm", "/sweep/7_1"),
    JobStarted(4.0, 0, 0, 4, (), "/sweep/7_0", "id-0", "abc", ("n1", "n2")),
    JobSubmitted(5.0, 0, "7_0", "/sweep/.ddp/nodes/a/0", "abc", "slurm", "/sweep/7_0"),
    JobStarted(9.0, 0, 1, 4, (), "/sweep/7_0", "id-1", "abc", ("n3", "n4")),
    JobEnded(11.0, 0, True, 1, "1", "", 7.0, True),
    JobSkipped(12.0, 1, "cancelled after SIGINT"),
]


def test_jobs_on_a_cluster(tmp_path: Path) -> None:
    """A job is pending with its id until it runs on its nodes, and again when it is queued again; so it reads back."""
    record, seen = SweepRecord(), []
    for event in ON_CLUSTER:
        record.apply(event)
        seen.append([(job.state.name, job.job_id, job.nodes, job.attempts) for job in record.jobs.values()][:1])
    assert [one for (one,) in seen[1:]] == [
        ("WAITING", "", (), 0),
        ("PENDING", "7_0", (), 0),
        ("PENDING", "7_0", (), 0),
        ("RUNNING", "7_0", ("n1", "n2"), 1),
        ("PENDING", "7_0", (), 1),
        ("RUNNING", "7_0", ("n3", "n4"), 2),
        ("COMPLETED", "7_0", ("n3", "n4"), 2),
        ("COMPLETED", "7_0", ("n3", "n4"), 2),
    ]
    assert record.jobs[0].began_at == 4.0, "the first start"
    assert (record.jobs[1].state, record.jobs[1].job_id) == (JobState.NEVER_STARTED, "7_1")
    began = dataclasses.replace(ON_CLUSTER[0], sweep_dir="")
    path = written(tmp_path, [began, *ON_CLUSTER[1:]])
    assert list(read_events(str(path)))[1:] == ON_CLUSTER[1:]
    assert read_journal(str(path)).jobs == record.jobs


def test_a_sweep_that_was_moved_finds_where_its_jobs_meet(tmp_path: Path) -> None:
    """Folders below the sweep directory are where that is now."""
    path = tmp_path / ".ddp" / "journal.jsonl"
    path.parent.mkdir()
    journal = Journal(str(path))
    for event in ON_CLUSTER:
        journal.append(event)
    jobs = read_journal(str(path)).jobs
    assert jobs[1].folder == str(tmp_path / ".ddp/nodes/a/1") and jobs[0].run_dir == str(tmp_path / "7_0")
    assert jobs[1].planned_dir == str(tmp_path / "7_1")


def test_every_run_that_was_left_is_known() -> None:
    """A later run of the sweep that could not start a job does not hide one that is still on the cluster."""
    record = SweepRecord()
    refused = JobEnded(22.0, 0, False, None, "", "It is on the cluster with another config", None)
    again = [SweepBegan(20.0, 43, "here", ("python",), "/work", "0.1"), JobsAdded(21.0, 0, (("x=1",), ("x=2",)), 2)]
    for event in [*ON_CLUSTER[:5], *again, refused]:
        record.apply(event)
    earlier = PreviousRuns(record, Resume.unfinished)
    known = earlier.find(0, ("x=1",), "", "abc")
    assert known is not None and known.state is JobState.FAILED
    assert [job.job_id for job in earlier.lost(0, ("x=1",), "")] == ["7_0"]
    assert earlier.find(1, ("x=2",), "", "def") is not None
    assert [job.job_id for job in earlier.lost(1, ("x=2",), "")] == ["7_1"]
    assert earlier.find(2, ("x=3",), "", "abc") is None and earlier.lost(2, ("x=3",), "") == []


def test_what_is_left_on_the_cluster_and_not_asked_for() -> None:
    """It is known, and its run directory is no other job's, also before it has started there."""
    record = SweepRecord()
    for event in ON_CLUSTER[:4]:
        record.apply(event)
    earlier = PreviousRuns(record, Resume.unfinished)
    assert [job.job_id for job in earlier.left_out()] == ["7_0", "7_1"]
    known = earlier.find(0, ("x=1",), "", "abc")
    assert [job.job_id for job in earlier.left_out()] == ["7_1"]
    assert earlier.directory("/sweep/7_0", known) == "/sweep/7_0"
    assert earlier.directory("/sweep/7_1", None) == "/sweep/7_1-2"


def test_a_run_that_was_left_and_has_ended(tmp_path: Path) -> None:
    """What its nodes have written of its end counts."""
    record = SweepRecord()
    for event in (*ON_CLUSTER[:2], JobSubmitted(3.0, 0, "7_0", str(tmp_path), "abc", "slurm", "/sweep/7_0")):
        record.apply(event)
    JobFolder(str(tmp_path)).publish_end(JobEnd(False, "timed-out too many times"))
    earlier = PreviousRuns(record, Resume.unfinished)
    known = earlier.find(0, ("x=1",), "", "abc")
    assert known is not None and (known.state, known.cause) == (JobState.FAILED, "timed-out too many times")
    assert earlier.lost(0, ("x=1",), "") == []


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
    recorder = SweepRecorder(paths)
    for event in EVENTS:
        recorder.record(event)
    assert recorder.sweep.jobs == FINAL
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "journal.jsonl cannot be written: No such file" in caplog.text
    assert "results.csv cannot be written: No such file" in caplog.text


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk it is said once, and nothing is raised."""
    journal = Journal("/dev/full")
    journal.append(EVENTS[0])
    journal.append(EVENTS[1])
    assert caplog.text.count("No space left on device") == 1


class Odd:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class OddMapping(dict[str, int]):
    """A value that raises where it is looked into."""

    def items(self) -> NoReturn:
        raise KeyError("missing")


class OddFloat(float):
    """A value that is no number when it is asked."""

    def __float__(self) -> NoReturn:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("value", "stored", "exact"),
    [
        (None, None, True),
        (True, True, True),
        (3, 3, True),
        (0.5, 0.5, True),
        ("text", "text", True),
        ("NaN", "NaN", False),
        (math.nan, "NaN", True),
        (math.inf, "Infinity", True),
        (-math.inf, "-Infinity", True),
        ([1, 2.5], [1, 2.5], True),
        ((1, 2.5), [1, 2.5], False),
        ({"a": [1, {"b": math.nan}]}, {"a": [1, {"b": "NaN"}]}, True),
        ({1: 2}, {"1": 2}, False),
        (object, "<class 'object'>", False),
        ({"loss": 0.5, "best": object}, {"loss": 0.5, "best": "<class 'object'>"}, False),
        (b"bytes", "b'bytes'", False),
        (1 + 2j, "(1+2j)", False),
        pytest.param(10**5000, "int", False, id="a long number"),
        ({"loss": 10**5000, "n": 1}, {"loss": "int", "n": 1}, False),
        (Odd(), "Odd", False),
        ([Odd(), 1], ["Odd", 1], False),
        (OddMapping(a=1), "{'a': 1}", False),
        ({"a": OddFloat(1)}, {"a": "1"}, False),
    ],
)
def test_values_in_json(value: Any, stored: Any, exact: bool) -> None:
    """Numbers, text, lists and dicts keep their types, what JSON lacks is said in words, and nothing raises."""
    assert json_value(value) == (stored, exact)
    assert type(json_value(value)[0]) is type(stored)
    json.loads(json.dumps(json_value(value)[0]), parse_constant=pytest.fail)


def test_values_without_an_end() -> None:
    """A value that contains itself, or is very deep, is cut off."""
    value: list[Any] = []
    value.append(value)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for one in (value, deep):
        stored, exact = json_value(one)
        assert not exact and len(json.dumps(stored)) < 200


def test_scalars_of_numpy() -> None:
    """NumPy's scalars are the numbers that they hold, though not the same again."""
    numpy = pytest.importorskip("numpy")
    assert json_value({"a": numpy.float32(0.5), "b": numpy.int64(3)}) == ({"a": 0.5, "b": 3}, False)
    assert json_value(numpy.float64("nan")) == ("NaN", False)


@pytest.mark.parametrize(
    "change",
    [
        '"overrides": 5',
        '"first": "a"',
        '"first": true',
        '"at": "x"',
        '"at": 1e300',
        '"overrides": [[1]]',
        '"at_once": 1.5',
    ],
)
def test_fields_of_a_wrong_type(tmp_path: Path, change: str) -> None:
    """A line whose fields cannot be what they should is passed over, and counted."""
    path = written(tmp_path, EVENTS)
    key = change.partition(":")[0]
    lines = path.read_text().splitlines()
    lines[1] = re.sub(rf"{key}: (\[\[.*\]\]|[^,}}]*)", change, lines[1])
    json.loads(lines[1])
    path.write_text("\n".join(lines) + "\n" + "[" * 100_000 + "\n")
    assert list(read_events(str(path))) == [EVENTS[0], *EVENTS[2:]]
    assert read_journal(str(path)).unreadable == 2


def test_a_directory_that_was_moved(tmp_path: Path) -> None:
    """Run directories are found below the journal's sweep directory, wherever it has been moved; others stay."""
    (tmp_path / "old" / ".ddp").mkdir(parents=True)
    began = SweepBegan(1.0, 1, "here", (), "/", "0.1", None, str(tmp_path / "old"))
    starts = [JobStarted(2.0, 0, 0, 1, (), str(tmp_path / "old" / "0")), JobStarted(3.0, 1, 0, 1, (), "/elsewhere/1")]
    written(tmp_path / "old" / ".ddp", [began, JobsAdded(1.5, 0, ((), ()), 1), *starts])
    (tmp_path / "old").rename(tmp_path / "new")
    record = read_journal(str(tmp_path / "new" / ".ddp" / "journal.jsonl"))
    assert [job.run_dir for job in record.jobs.values()] == [str(tmp_path / "new" / "0"), "/elsewhere/1"]


def test_a_disk_that_was_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is written with the next event, from where it stopped."""
    journal = Journal(str(tmp_path / "journal.jsonl"))
    journal.append(EVENTS[0])
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        journal.append(EVENTS[1])
        full.setattr(os, "write", lambda _descriptor, _data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        journal.append(EVENTS[2])
    journal.append(EVENTS[3])
    assert list(read_events(str(tmp_path / "journal.jsonl"))) == EVENTS[:4]


def test_a_journal_that_was_torn(tmp_path: Path) -> None:
    """Another process begins a line of its own."""
    path = written(tmp_path, EVENTS[:3])
    path.write_bytes(path.read_bytes()[:-9])
    Journal(str(path)).append(EVENTS[3])
    assert list(read_events(str(path))) == [*EVENTS[:2], EVENTS[3]]
