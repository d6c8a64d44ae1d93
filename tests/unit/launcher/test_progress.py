"""What is recorded of each transition of a job, and what is said of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import JOB_ID_TOKEN
from hydra_plugins.hydra_ddp_subprocess_launcher.job.plan import Allocation, Attempt
from hydra_plugins.hydra_ddp_subprocess_launcher.job.results import JobResult, failed_before_start, skipped
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.progress import Progress
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.resume import ResumeDecision
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobRecord, JobsAdded, JobState, SweepRecord
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import SweepRecorder, read_journal
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.port import ReservedPort
from support.scripted import make_context, make_plan

ALLOCATION = Allocation(("4",), ReservedPort("127.0.0.1", 1, None))


class Batch:
    """A batch of two jobs.

    Attributes:
        shown: How often the table was shown.
    """

    def __init__(self, sweep_dir: Path, **options: Any) -> None:
        self.paths = SweepPaths(str(sweep_dir))
        Path(self.paths.folder).mkdir(parents=True)
        self.context = make_context(sweep_dir, **{"progress": "plain", **options})
        self.recorder = SweepRecorder(self.paths)
        self.shown: list[object] = []
        summary: Any = SimpleNamespace(show=lambda *_: self.shown.append(1))
        overrides = {3: ["x=3"], 4: ["x=4"]}
        self.progress = Progress(self.context, self.recorder, summary, overrides, 2)
        self.plan = make_plan(sweep_dir, 3, ["x=3"])

    def start(self, attempt: Attempt | None = None) -> None:
        self.progress.started(self.plan, attempt or Attempt(), ALLOCATION, "run-1")

    @property
    def job(self) -> JobRecord:
        """What is known of the first job, which the journal tells as well."""
        known = self.recorder.sweep.jobs[3]
        assert read_journal(self.paths.journal).jobs[3] == known
        return known


@pytest.fixture
def batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Batch:
    caplog.set_level(logging.INFO)
    return Batch(tmp_path)


def test_a_batch_begins(batch: Batch) -> None:
    """All of its jobs are known from then on, and wait."""
    assert [(job.number, job.overrides, job.state) for job in batch.recorder.sweep.jobs.values()] == [
        (3, ("x=3",), JobState.WAITING),
        (4, ("x=4",), JobState.WAITING),
    ]
    assert (batch.recorder.sweep.at_once, batch.job.task) == (2, "app.main")


def test_no_jobs(tmp_path: Path) -> None:
    """A sweeper may hand over an empty batch."""
    events: list[Any] = []
    recorder: Any = SimpleNamespace(record=events.append)
    nothing: Any = None
    Progress(make_context(tmp_path), recorder, nothing, {}, 0)
    (added,) = events
    assert isinstance(added, JobsAdded) and added.overrides == ()


def test_a_start(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """Where it runs, on what, and under which name; a restart is counted, but not shown as another job."""
    batch.start()
    job = batch.job
    assert (job.state, job.attempts, job.devices, job.nproc) == (JobState.RUNNING, 1, ("4",), 1)
    assert (job.run_dir, job.run_id, job.config_hash) == (batch.plan.run_dir, "run-1", "hash of x=3")
    assert caplog.text.count("x=3") == 1
    batch.start(Attempt(number=1, restarts=1, why="failed"))
    assert batch.job.attempts == 2
    assert caplog.text.count("x=3") == 1


def test_a_submission(batch: Batch) -> None:
    """It waits on the cluster, with the run directory that it has there."""
    plan = make_plan(Path(f"/sweep/{JOB_ID_TOKEN}"), 3)
    batch.progress.submitted(plan, "7_1", "/nodes/3", "slurm")
    job = batch.job
    assert (job.state, job.job_id, job.folder, job.executor) == (JobState.PENDING, "7_1", "/nodes/3", "slurm")
    assert job.planned_dir == "/sweep/7_1/3"


def test_between_two_starts(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """It is no failed job yet, and its failure is shown."""
    batch.start()
    batch.progress.paused(batch.plan, "failed, restart 1 of 2", failed_before_start(ValueError("broken")))
    assert (batch.job.state, batch.job.cause, batch.progress.failures) == (JobState.PAUSED, "broken", 0)
    assert "failed, restart 1 of 2" in caplog.text and "ValueError: broken" in caplog.text


def test_completed(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """With its value and how long it took; its warnings are shown."""
    batch.start()
    batch.progress.ended(3, JobResult(True, {"loss": 0.5}, warnings=("mind the gap",)), 2.5)
    job = batch.job
    assert (job.state, job.value, job.exact, job.seconds) == (JobState.COMPLETED, {"loss": 0.5}, True, 2.5)
    assert batch.progress.failures == 0
    assert "mind the gap" in caplog.text and "completed" in caplog.text


def test_failed(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """It counts, its cause is recorded, and how to repeat it is shown: not of one that was never started."""
    batch.start()
    batch.progress.ended(3, failed_before_start(ValueError("broken")), 2.5)
    assert (batch.job.state, batch.job.cause, batch.progress.failures) == (JobState.FAILED, "broken", 1)
    assert caplog.text.count("Repeat rank 0") == 1
    batch.progress.ended(4, failed_before_start(KeyError("y")), None)
    assert batch.progress.failures == 2
    assert caplog.text.count("Repeat rank 0") == 1


def test_skipped(batch: Batch) -> None:
    """It is no failure: nothing of it was run."""
    batch.progress.ended(3, skipped("1 job failed before it"), None)
    assert (batch.job.state, batch.job.cause) == (JobState.NEVER_STARTED, "1 job failed before it")
    assert batch.progress.failures == 0


def test_kept(batch: Batch) -> None:
    """What an earlier run has recorded of it is recorded again, all of it."""
    known = JobRecord(
        3,
        ("x=3",),
        JobState.COMPLETED,
        attempts=2,
        nproc=4,
        devices=("0", "1"),
        run_dir="/run",
        run_id="run-0",
        config_hash="abc",
        began_at=1.0,
        ended_at=9.0,
        seconds=8.0,
        value=0.5,
        exact=True,
        text="0.5",
        task="app.main",
    )
    batch.progress.ended(3, JobResult(True, 0.5, kept=known), None)
    assert batch.job == known


@pytest.mark.parametrize(("result", "said"), [(None, "is run: new"), (skipped("no"), "is not run: new")])
def test_decided(batch: Batch, caplog: pytest.LogCaptureFixture, result: JobResult | None, said: str) -> None:
    """What becomes of a job of a sweep that is resumed is said, job by job."""
    batch.progress.decided(batch.plan, ResumeDecision("new", result))
    assert said in caplog.text


def test_stopped(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """The signal is recorded, and at the end how many jobs did not complete."""
    batch.start()
    batch.progress.ended(3, JobResult(True, 1), 1.0)
    batch.progress.stopped("SIGINT")
    batch.progress.finish()
    assert batch.recorder.sweep.stopped_by == read_journal(batch.paths.journal).stopped_by == "SIGINT"
    assert "Stopped by SIGINT: 1 of 2 jobs did not complete" in caplog.text


def test_the_end_of_the_only_batch(batch: Batch) -> None:
    """The table is shown, and results.csv has every job that is over."""
    batch.start()
    batch.progress.ended(3, JobResult(True, 1), 1.0)
    batch.progress.ended(4, failed_before_start(ValueError("broken")), None)
    batch.progress.finish()
    assert batch.shown == [1]
    rows = Path(batch.paths.results).read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["job", "3", "4"]


def test_nothing_is_shown_of_quiet_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`progress=none` shows failures alone."""
    caplog.set_level(logging.INFO)
    batch = Batch(tmp_path, progress="none")
    batch.start()
    batch.progress.ended(3, JobResult(True, 1), 1.0)
    assert caplog.text == ""
    batch.progress.ended(4, failed_before_start(ValueError("broken")), None)
    assert "broken" in caplog.text


def test_logs_of_jobs_side_by_side(tmp_path: Path) -> None:
    """Their lines are told apart."""
    batch = Batch(tmp_path)
    (tee,) = batch.progress.tees(batch.plan, JobPaths(batch.plan.run_dir))
    assert tee._prefix == "[job 3 rank 0] "


def test_a_record_from_before(tmp_path: Path) -> None:
    """Failures are those of this run of the sweep."""
    record = SweepRecord(past=[JobRecord(3, ("x=3",), JobState.FAILED)])
    recorder = SweepRecorder(None, record)
    nothing: Any = None
    assert Progress(make_context(tmp_path), recorder, nothing, {3: ["x=3"]}, 1).failures == 0
