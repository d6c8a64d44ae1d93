"""The launching process's watch over jobs on a cluster, with answers of a cluster that is not there."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import OnInterrupt
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, make_job_folder, write_outcome
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Outcome
from hydra_plugins.hydra_ddp_subprocess_launcher.groups import rendezvous
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobEnd, JobFolder, StartFile
from hydra_plugins.hydra_ddp_subprocess_launcher.job.results import JobResult
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm import submitit_api
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.batch import SubmittedBatch
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.jobs import ClusterJob, SlurmPoller
from support.starts import launch_spec


class Batch(SubmittedBatch):
    """A batch of jobs that were submitted; what the cluster says is set in `state`."""

    def __init__(self, folder: Path, jobs: int = 1) -> None:
        self.asked: list[bool] = []
        self.state = "RUNNING"
        self.ended: dict[int, JobResult] = {}
        self.submitted: list[int] = []
        self._cluster: Any = SimpleNamespace(executor="slurm")
        self._poller = SlurmPoller(self._cluster)
        self._context: Any = SimpleNamespace(settings=SimpleNamespace(check_config=None))
        progress = SimpleNamespace(submitted=lambda plan, *_: self.submitted.append(plan.number))
        self._progress: Any = progress
        paths = SimpleNamespace(stderr=str(folder / "log.err"))
        self._jobs = {
            number: ClusterJob(
                SimpleNamespace(number=number),  # type: ignore[arg-type]
                JobFolder(str(folder / str(number))),
                SimpleNamespace(job_id=f"7_{number}", paths=paths),
                since=1000.0,
            )
            for number in range(jobs)
        }

    def state_of(self, job: Any, *, ask: bool = False) -> str:
        self.asked.append(ask)
        return self.state

    def _end(self, job: ClusterJob, verdict: JobResult) -> None:
        self.ended[job.plan.number] = verdict
        del self._jobs[job.plan.number]


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    batch = Batch(tmp_path)
    monkeypatch.setattr(submitit_api, "state_of", batch.state_of)
    monkeypatch.setattr(submitit_api, "is_gone", lambda _job: True)
    monkeypatch.setattr(submitit_api, "is_queued", lambda _job: False)
    return batch


def test_old_answers_are_not_taken_for_long(batch: Batch) -> None:
    """Submitit has them for up to ten minutes; here the cluster itself is asked about once a minute."""
    for second in range(1000, 1200):
        batch._ask(float(second))
    assert 3 <= batch.asked.count(True) <= 4
    assert batch.asked[0] is True


def test_one_question_for_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(tmp_path, jobs=3)
    monkeypatch.setattr(submitit_api, "state_of", batch.state_of)
    batch._ask(1000.0)
    assert batch.asked == [True, False, False]


def test_after_a_cancellation_the_cluster_is_asked_each_time(batch: Batch) -> None:
    batch._ask(1000.0)
    batch._jobs[0].why = "cancelled after SIGINT"
    for second in range(1001, 1004):
        batch._ask(float(second))
    assert batch.asked == [True] * 4
    batch.state = "CANCELLED by 0"
    batch._ask(1004.0)
    assert batch.ended[0].skipped and batch.ended[0].cause == "cancelled after SIGINT"


def test_a_job_that_cannot_be_cancelled_is_not_waited_for_for_ever(batch: Batch) -> None:
    batch._jobs[0].why, batch._jobs[0].gone_by = "cancelled after SIGINT", 1090.0
    batch._ask(1080.0)
    assert batch.ended == {}
    batch._ask(1091.0)
    # Nothing is noted, so that a resumed sweep looks for it.
    assert batch.ended == {} and batch._jobs == {}


def test_a_cancellation_is_repeated(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scancel` may come when SLURM does not answer."""
    cancelled: list[int] = []
    monkeypatch.setattr(submitit_api, "cancel", lambda handles: cancelled.append(len(handles)))
    batch._poller.cancel(batch._jobs.values(), "cancelled after SIGINT", now=1000.0)
    for second in range(1000, 1040):
        batch._ask(float(second))
    assert 3 <= len(cancelled) <= 5 and set(cancelled) == {1}


@pytest.mark.parametrize(
    ("error", "choice", "cancels"),
    [
        (KeyboardInterrupt(), OnInterrupt.cancel, True),
        (SystemExit(143), OnInterrupt.cancel, True),
        (KeyboardInterrupt(), OnInterrupt.leave, False),
        (RuntimeError("a defect"), OnInterrupt.cancel, False),
    ],
)
def test_an_error_of_the_launching_process(
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    choice: OnInterrupt,
    cancels: bool,
) -> None:
    """A signal cancels the jobs unless they are to be left; a defect of ours is no reason to lose them."""
    cancelled: list[str] = []
    monkeypatch.setattr(submitit_api, "cancel", lambda handles: cancelled.extend(one.job_id for one in handles))
    batch._cluster.on_interrupt = choice
    batch._poller.leave_for(error, [])
    assert caplog.text == ""
    batch._poller.leave_for(error, batch._jobs.values())
    assert cancelled == (["7_0"] if cancels else [])
    assert ("Left on the cluster: 7_[0]" in caplog.text) != cancels


def test_a_cancelled_job_is_waited_for_until_its_last_process_is_gone(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accounting has it as cancelled while its ranks have until KillWait."""
    monkeypatch.setattr(submitit_api, "is_queued", lambda _job: True)
    batch._jobs[0].why, batch.state = "cancelled after SIGINT", "CANCELLED by 0"
    for second in range(1000, 1030):
        batch._ask(float(second))
    assert batch.ended == {}
    monkeypatch.setattr(submitit_api, "is_queued", lambda _job: False)
    batch._ask(1031.0)
    assert list(batch.ended) == [0]


def test_words_that_submitit_does_not_understand(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end no sweep: the state is not known then."""

    def misread(_job: object, *, ask: bool = False) -> str:
        raise KeyError("JobID")

    monkeypatch.setattr(submitit_api, "state_of", misread)
    monkeypatch.setattr(submitit_api, "is_gone", lambda _job: False)
    batch._ask(1000.0)
    batch._ask(2000.0)
    assert batch.ended == {} and batch._jobs[0].state == "UNKNOWN"


@pytest.mark.parametrize(
    ("state", "within_s", "after_s"), [("FAILED", 10, 20), ("CANCELLED by 0", 2, 5), ("PREEMPTED", 100, 200)]
)
def test_patience(batch: Batch, tmp_path: Path, state: str, within_s: float, after_s: float) -> None:
    """The file that tells of a job's end may be late; one that was cut off has none, and one preempted may go on."""
    batch.state = state
    (tmp_path / "log.err").write_text("Traceback\nlast words\n")
    batch._ask(1000.0)
    batch._ask(1000.0 + within_s)
    assert batch.ended == {}
    batch._ask(1000.0 + after_s)
    verdict = batch.ended[0]
    assert verdict.cause == f"SLURM ended job 7_0: {state}"
    assert "last words" in verdict.block
    # Should the cluster run it again, it does nothing.
    assert JobFolder(str(tmp_path / "0")).read_end() == JobEnd(False, f"SLURM ended job 7_0: {state}.")


def test_a_late_file_counts(batch: Batch, tmp_path: Path) -> None:
    """What the nodes tell has the last word; it is read with the other files."""
    batch.state = "FAILED"
    batch._ask(1000.0)
    JobFolder(str(tmp_path / "0")).publish_end(JobEnd(True))
    batch._ask(1030.0)
    assert batch.ended == {}


def test_all_ranks_had_completed(batch: Batch, tmp_path: Path) -> None:
    """A job whose way out alone was cut off has completed, with its value."""
    spec = launch_spec(str(tmp_path / "run"), 2)
    paths = JobPaths(spec.run_dir)
    make_job_folder(paths)
    for rank in range(2):
        write_outcome(paths, rank, Outcome(completed=True, run_id="run"))
    batch._jobs[0].spec = spec
    batch.state = "TIMEOUT"
    batch._ask(1000.0)
    batch._ask(1010.0)
    assert batch.ended[0].completed


def test_a_start_is_read_once(batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of jobs each round would read all of them."""
    plan = dataclasses.make_dataclass("Plan", ["number", "frozen"], frozen=True)
    frozen = dataclasses.make_dataclass("Frozen", ["run_dir"], frozen=True)
    job = dataclasses.replace(batch._jobs[0], plan=plan(0, frozen("/planned")))
    read: list[str] = []
    monkeypatch.setattr(StartFile, "read", lambda told: read.append(told.path) or rendezvous._read_start(told.path))
    assert not job.take_last_start()
    job.folder.publish_start("0.0", launch_spec("/of_7", 1, "first"))
    assert [job.take_last_start() for _ in range(3)] == [True, False, False]
    assert job.plan.frozen.run_dir == "/of_7"
    os.utime(read[0], ns=(1, 1))
    assert not job.take_last_start(), "the same one"
    job.folder.publish_start("0.1", launch_spec("/of_7", 1, "second"))
    assert [job.take_last_start() for _ in range(3)] == [True, False, False]
    assert [Path(path).name for path in read] == ["start_0.0.pkl", "start_0.0.pkl", "start_0.1.pkl"]


def test_queued_again(batch: Batch) -> None:
    """It is pending again, and not over; what accounting said before it had run is not taken for that."""
    for state in ("PENDING", "RUNNING", "PENDING", "RUNNING"):
        batch.state = state
        batch._ask(1000.0)
    assert batch.submitted == [0] and batch.ended == {}


def test_without_accounting(batch: Batch) -> None:
    """A job of which nothing is known has ended if the queue does not have it, and not before a while."""
    batch._jobs[0] = dataclasses.replace(batch._jobs[0], since=1000.0)
    batch.state = "UNKNOWN"
    for second in range(1000, 1050):
        batch._ask(float(second))
    assert batch.ended == {}
    for second in range(1050, 1200):
        if batch._jobs:
            batch._ask(float(second))
    assert batch.ended[0].cause == "SLURM ended job 7_0: GONE"
    assert "sacct" in batch.ended[0].block
