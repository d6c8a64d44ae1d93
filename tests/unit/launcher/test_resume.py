"""What earlier runs of a sweep have left to do, from the records and files that they have left."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import Resume
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import LauncherError, StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import (
    FORMAT,
    JobPaths,
    SweepPaths,
    make_job_folder,
    write_outcome,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import JobEnd, Outcome
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobFolder
from hydra_plugins.hydra_ddp_subprocess_launcher.job.frozen_config import dumps
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.resume import PreviousRuns, open_sweep_dir, read_sweep_dir
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobRecord, JobState, SweepRecord
from support.scripted import settings

OVERRIDES, TASK, HASH = ("x=1",), "app.main", "abc"
COMPLETED, FAILED, LOST, PENDING = JobState.COMPLETED, JobState.FAILED, JobState.LOST, JobState.PENDING
UNFINISHED, ONLY_FAILED = Resume.unfinished, Resume.failed


def job(state: JobState = COMPLETED, number: int = 0, **changes: Any) -> JobRecord:
    facts: dict[str, Any] = {"attempts": 1, "config_hash": HASH, "task": TASK, "value": 1.5, "exact": True}
    return JobRecord(number, changes.pop("overrides", OVERRIDES), state, **{**facts, **changes})


def previous(*jobs: JobRecord, choice: Resume | None = UNFINISHED) -> PreviousRuns:
    return PreviousRuns(SweepRecord(past=list(jobs)), choice)


# --- which record is a job's


def test_a_sweep_that_begins_anew() -> None:
    """Nothing is known, nothing is decided; the choice to resume counts only where there is something."""
    for runs in (PreviousRuns(), PreviousRuns(None, UNFINISHED)):
        assert not runs.resumes
        assert runs.find(0, OVERRIDES, TASK, HASH) is None
        assert runs.decide(None, "", HASH) is None


def test_a_record_is_found_by_number_first() -> None:
    """Else by overrides and task, so that a grid that grew finds its jobs; each record once."""
    runs = previous(job(number=0), job(number=1, value=2.5), job(number=2, overrides=("x=2",)))
    found = [runs.find(number, OVERRIDES, TASK, HASH) for number in (1, 7, 8)]
    assert [None if one is None else one.number for one in found] == [1, 0, None]
    moved = runs.find(0, ("x=2",), TASK, HASH)
    assert moved is not None and moved.number == 2


@pytest.mark.parametrize(
    ("overrides", "task"), [(("x=2",), TASK), (("x=1", "y=1"), TASK), (("y=1", "x=1"), TASK), (OVERRIDES, "app.other")]
)
def test_another_job(overrides: tuple[str, ...], task: str) -> None:
    """Other overrides, or another function of the program, make another job, whatever its number."""
    assert previous(job()).find(0, overrides, task, HASH) is None


def test_the_run_that_counts() -> None:
    """The last one, unless an earlier one has completed with the config of today; starts are those of all runs."""
    runs = [job(COMPLETED, attempts=1, run_dir="/first"), job(FAILED, attempts=4, run_dir="/second")]
    found = previous(*runs).find(0, OVERRIDES, TASK, HASH)
    assert found is not None and (found.state, found.run_dir, found.attempts) == (COMPLETED, "/first", 4)
    found = previous(*runs).find(0, OVERRIDES, TASK, "another config")
    assert found is not None and (found.state, found.run_dir, found.attempts) == (FAILED, "/second", 4)


def test_a_run_that_never_started() -> None:
    """It does not hide an earlier one that did, which has the checkpoints."""
    runs = [job(LOST, run_dir="/started"), job(LOST, attempts=0, run_dir="")]
    found = previous(*runs).find(0, OVERRIDES, TASK, HASH)
    assert found is not None and found.run_dir == "/started"


# --- what nobody has recorded


def store(run_dir: Path, *outcomes: Outcome) -> str:
    paths = JobPaths(str(run_dir))
    make_job_folder(paths)
    for rank, outcome in enumerate(outcomes):
        write_outcome(paths, rank, outcome)
    return str(run_dir)


GOOD = Outcome(completed=True, value=dumps(0.25, None), run_id="run")
GOOD_ELSEWHERE = Outcome(completed=True, run_id="run")


def test_a_job_whose_end_was_not_recorded(tmp_path: Path) -> None:
    """The launching process was killed, but every rank had stored that it completed: it is done, with its value."""
    run_dir = store(tmp_path, GOOD, GOOD_ELSEWHERE)
    lost = job(LOST, run_dir=run_dir, run_id="run", nproc=2, value=None, exact=False)
    found = previous(lost).find(0, OVERRIDES, TASK, HASH)
    assert found is not None and (found.state, found.value, found.exact) == (COMPLETED, 0.25, True)


@pytest.mark.parametrize(
    ("outcomes", "nproc", "run_id"),
    [
        pytest.param((GOOD,), 2, "run", id="one rank has not"),
        pytest.param((GOOD, Outcome(completed=False, run_id="run")), 2, "run", id="one rank has failed"),
        pytest.param((GOOD, GOOD_ELSEWHERE), 2, "another", id="of another start"),
        pytest.param((GOOD, GOOD_ELSEWHERE), 2, "", id="never started"),
    ],
)
def test_a_job_that_was_not_done(tmp_path: Path, outcomes: tuple[Outcome, ...], nproc: int, run_id: str) -> None:
    """It is run again."""
    lost = job(LOST, run_dir=store(tmp_path, *outcomes), run_id=run_id, nproc=nproc)
    runs = previous(lost)
    found = runs.find(0, OVERRIDES, TASK, HASH)
    assert found is not None and found.state is LOST
    decision = runs.decide(found, "", HASH)
    assert decision is not None and decision.result is None


# --- jobs on a cluster


def test_jobs_that_may_be_on_a_cluster(tmp_path: Path) -> None:
    """Runs with an id whose end is not known; their nodes may have told of it since."""
    ended = JobFolder(str(tmp_path / "ended"))
    ended.publish_end(JobEnd(False, "rank 0 failed"))
    runs = [
        job(PENDING, job_id="7", folder=str(tmp_path / "waits")),
        job(PENDING, job_id="8", folder=ended.path),
        job(LOST),
        job(COMPLETED, job_id="9"),
    ]
    known = previous(*runs)
    assert [one.job_id for one in known.left_out()] == ["7"]
    known.find(0, OVERRIDES, TASK, HASH)
    assert [one.job_id for one in known.lost(0, OVERRIDES, TASK)] == ["7"]
    assert known.left_out() == []
    assert known.lost(1, OVERRIDES, TASK) == []


# --- run directories


def test_run_directories() -> None:
    """A new job gets none that a known one has, or another new one; a known one has its own back."""
    first = job(run_dir="/s/0")
    runs = previous(first, job(number=1, overrides=("x=2",), planned_dir="/s/1"))
    assert runs.directory("/s/0", first) == "/s/0"
    assert [runs.directory("/s/0", None) for _ in range(2)] == ["/s/0-2", "/s/0-3"]
    assert runs.directory("/s/1", None) == "/s/1-2"
    assert runs.directory("/s/5", None) == "/s/5"


# --- decisions


@pytest.mark.parametrize(
    ("known", "choice", "runs", "why"),
    [
        pytest.param(None, UNFINISHED, True, "new", id="new"),
        pytest.param(None, ONLY_FAILED, False, "new", id="new, only failed"),
        pytest.param(job(LOST), UNFINISHED, True, "not finished before", id="lost"),
        pytest.param(job(LOST), ONLY_FAILED, False, "not finished before", id="lost, only failed"),
        pytest.param(job(FAILED, cause="ValueError: x"), UNFINISHED, True, "ValueError: x", id="failed"),
        pytest.param(job(FAILED, cause="ValueError: x"), ONLY_FAILED, True, "ValueError: x", id="failed, only failed"),
        pytest.param(job(config_hash="old"), UNFINISHED, True, "config changed", id="another config"),
        pytest.param(job(config_hash="old"), ONLY_FAILED, False, "config changed", id="another config, only failed"),
        pytest.param(job(exact=False), UNFINISHED, True, "value cannot be read", id="value lost"),
        pytest.param(job(exact=False), ONLY_FAILED, True, "value cannot be read", id="value lost, only failed"),
    ],
)
def test_decisions(known: JobRecord | None, choice: Resume, runs: bool, why: str) -> None:
    """A job is run, or skipped with the reason."""
    decision = previous(job(), choice=choice).decide(known, "", HASH)
    assert decision is not None and why in decision.why
    assert (decision.result is None) == runs
    assert decision.result is None or decision.result.skipped


@pytest.mark.parametrize("choice", list(Resume))
def test_a_completed_job_is_not_run_again(tmp_path: Path, choice: Resume) -> None:
    """It has the value that its rank 0 stored, else what the journal has, if that is all of it."""
    stored = job(run_dir=store(tmp_path, GOOD), run_id="run", nproc=1, value="0.25 or so", exact=False)
    for known, value in ((stored, 0.25), (job(value={"a": ["NaN", 1]}), None)):
        decision = previous(known, choice=choice).decide(known, "", HASH)
        assert decision is not None and decision.result is not None and decision.result.completed
        assert decision.result.kept is known
        if value is None:
            assert str(decision.result.value) == "{'a': [nan, 1]}"
        else:
            assert decision.result.value == value


def test_which_keys_have_changed(tmp_path: Path) -> None:
    """Three of them are named, with values as Python writes them, and no secret's."""
    make_job_folder(JobPaths(str(tmp_path)))
    Path(JobPaths(str(tmp_path)).config).write_text("a: {b: 1}\nc: 1\napi_key: old\nsame: 0\nz: 1\n")
    known = job(config_hash="old", run_dir=str(tmp_path))
    decision = previous(known).decide(known, "a: {b: 2}\nc: '1'\napi_key: new\nsame: 0\nnew: 1\n", HASH)
    assert decision is not None
    assert "a.b: 1 → 2" in decision.why and "c: 1 → '1'" in decision.why and "2 more" in decision.why
    assert "api_key" in decision.why and "old" not in decision.why


# --- the sweep directory


class NoCluster:
    """No job is on a cluster."""

    executor = ""

    def find_orphans(self, record: SweepRecord, *, fence: bool) -> None:
        pass

    def state_of(self, job: JobRecord) -> str:
        return ""

    def how_to_cancel(self, job: JobRecord) -> str:
        return ""


class OnCluster(NoCluster):
    """Every job that has an id is on a cluster."""

    def state_of(self, job: JobRecord) -> str:
        return "RUNNING" if job.job_id else ""

    def how_to_cancel(self, job: JobRecord) -> str:
        return f"To cancel it: scancel {job.job_id}"


def began(**changes: Any) -> dict[str, Any]:
    facts = {"at": 1.0, "pid": 1, "host": "here", "argv": ["python"], "cwd": "/", "launcher": "0.1", "format": FORMAT}
    return {"event": "SweepBegan", **facts, **changes}


def write_journal(paths: SweepPaths, *began_lines: dict[str, Any]) -> bytes:
    """Write the journal of runs of a sweep, in the last of which a job has completed."""
    added = {"event": "JobsAdded", "at": 1.0, "first": 0, "overrides": [["x=1"]], "at_once": 1, "task": TASK}
    started = {"event": "JobStarted", "at": 1.0, "job": 0, "attempt": 0, "nproc": 1, "devices": []}
    started |= {"run_dir": f"{paths.sweep_dir}/0", "run_id": "run", "config_hash": HASH}
    ended = {"event": "JobEnded", "at": 1.0, "job": 0, "completed": True, "value": 1.5, "text": "1.5", "cause": ""}
    ended |= {"seconds": 1.0, "exact": True}
    Path(paths.folder).mkdir(parents=True)
    lines = "".join(json.dumps(line) + "\n" for line in (*began_lines, added, started, ended))
    Path(paths.journal).write_text(lines)
    return lines.encode()


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    return SweepPaths(str(tmp_path / "sweep"))


RESUMED = settings(resume="unfinished")


def test_a_journal_of_this_format(paths: SweepPaths) -> None:
    """A completed job of it is known, and its journal goes on."""
    before = write_journal(paths, began())
    state = open_sweep_dir(paths, RESUMED, NoCluster())
    assert state.lock is not None
    found = state.previous.find(0, OVERRIDES, TASK, HASH)
    decision = state.previous.decide(found, "", HASH)
    assert decision is not None and decision.result is not None and decision.result.value == 1.5
    written = Path(paths.journal).read_bytes()
    assert written.startswith(before) and json.loads(written.splitlines()[-1])["format"] == FORMAT
    state.lock.release()


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([began(format=FORMAT + 1)], id="a later format"),
        pytest.param([began(format=1)], id="an earlier format"),
        pytest.param([{name: value for name, value in began().items() if name != "format"}], id="before formats"),
        pytest.param([began(format=1), began()], id="one of several runs"),
    ],
)
def test_a_journal_of_another_format(paths: SweepPaths, lines: list[dict[str, Any]]) -> None:
    """It is refused with what to do: no completed job is taken for one that is to be run, and nothing is written."""
    before = write_journal(paths, *lines)
    for read in (open_sweep_dir, read_sweep_dir):
        with pytest.raises(StartError) as raised:
            read(paths, RESUMED, NoCluster())
        assert all(word in str(raised.value) for word in (paths.sweep_dir, "that version", "hydra.sweep.dir"))
    assert Path(paths.journal).read_bytes() == before


def test_an_outcome_of_another_format(paths: SweepPaths) -> None:
    """A value that another version has stored is not taken for one that is gone: the job would be run again."""
    write_journal(paths, began())
    run_dir = JobPaths(f"{paths.sweep_dir}/0")
    make_job_folder(run_dir)
    Path(run_dir.outcome(0)).write_bytes(pickle.dumps({"format": FORMAT + 1, "content": None}))
    previous_runs = read_sweep_dir(paths, RESUMED, NoCluster()).previous
    found = previous_runs.find(0, OVERRIDES, TASK, HASH)
    with pytest.raises(LauncherError, match="another version"):
        previous_runs.decide(found, "", HASH)


def test_without_resume(paths: SweepPaths) -> None:
    """What an earlier sweep has recorded moves aside, of whatever format it is, and all jobs are new."""
    before = write_journal(paths, began(format=1))
    state = open_sweep_dir(paths, settings(), NoCluster())
    assert state.lock is not None
    assert not state.previous.resumes and state.previous.find(0, OVERRIDES, TASK, HASH) is None
    assert (Path(paths.folder) / "earlier_0" / "journal.jsonl").read_bytes() == before
    assert len(Path(paths.journal).read_text().splitlines()) == 1
    state.lock.release()


def test_nothing_to_resume(paths: SweepPaths, caplog: pytest.LogCaptureFixture) -> None:
    """All jobs are new, and a line says so."""
    caplog.set_level(logging.INFO)
    state = open_sweep_dir(paths, RESUMED, NoCluster())
    assert state.lock is not None and not state.previous.resumes
    assert "all jobs are new" in caplog.text
    state.lock.release()


def test_a_dry_run_writes_nothing(paths: SweepPaths) -> None:
    before = write_journal(paths, began())
    state = read_sweep_dir(paths, RESUMED, NoCluster())
    assert state.lock is None and state.held == () and state.previous.resumes
    assert [path.name for path in Path(paths.folder).iterdir()] == ["journal.jsonl"]
    assert Path(paths.journal).read_bytes() == before


@pytest.mark.parametrize("resume", ["unfinished", None])
def test_beside_jobs_on_a_cluster(paths: SweepPaths, resume: str | None) -> None:
    """A run that cannot wait for them is refused: it would share their run directories."""
    write_journal(paths, began())
    submitted = {"event": "JobSubmitted", "at": 1.0, "job": 0, "job_id": "7", "folder": "/f", "config_hash": HASH}
    with Path(paths.journal).open("a") as journal:
        journal.write(json.dumps({**submitted, "executor": "slurm", "planned_dir": ""}) + "\n")
    with pytest.raises(StartError, match=r"7, RUNNING.*ddp_submitit_slurm.*scancel 7"):
        open_sweep_dir(paths, settings(resume=resume), OnCluster())
