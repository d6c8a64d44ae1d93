"""Jobs that were submitted by a launching process that was killed before it could note their ids."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import JOB_ID_TOKEN
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobEnd, JobFolder
from hydra_plugins.hydra_ddp_subprocess_launcher.job.plan import Attempt
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobsAdded, JobSubmitted, SweepBegan, SweepRecord
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import SweepRecorder, read_journal
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm import jobs as jobs_module
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.jobs import JobSubmitter, find_orphans
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.node_task import NodeTask, SubmittedJob
from support.starts import submitted

submitit = pytest.importorskip("submitit")


class Sweep:
    """A sweep of two jobs that were about to be submitted when their launching process was killed."""

    def __init__(self, folder: Path, submitits: str = ".submitit/%j") -> None:
        self.folder = folder
        self.submitits = str(folder / submitits)
        self.record = SweepRecord()
        self.record.apply(SweepBegan(1.0, 42, "here", ("python",), "/work", "0.1", 15.0, str(folder)))
        self.record.apply(JobsAdded(2.0, 0, (("x=1",), ("x=2",)), 2))
        for job in range(2):
            self.record.apply(self.intent(job))

    def intent(self, job: int) -> JobSubmitted:
        return JobSubmitted(3.0, job, "", str(self.meeting(job)), "abc", "slurm", "", self.submitits)

    def meeting(self, job: int) -> Path:
        return self.folder / ".ddp" / "nodes" / "a1b2" / str(job)

    def submit(self, job: int, job_id: str, run_dir: str = "/run") -> None:
        """Leave submitit's file of a job, as it is renamed when the id is known."""
        sent = replace(submitted(self.folder, run_dir), folder=str(self.meeting(job)))
        path = Path(self.submitits.replace("%j", job_id).replace("%A", job_id.partition("_")[0]))
        path.mkdir(parents=True, exist_ok=True)
        submitit.core.utils.DelayedSubmission(NodeTask(), sent).dump(path / f"{job_id}_submitted.pkl")

    @property
    def ids(self) -> list[str]:
        return [job.job_id for job in self.record.jobs.values()]


@pytest.mark.parametrize("submitits", [".submitit/%j", "logs", "logs/of_%A", "lo[g]s/%j"])
def test_ids_that_nobody_had_noted(tmp_path: Path, submitits: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are in the names of submitit's files, wherever its folder is."""
    caplog.set_level(logging.INFO)
    sweep = Sweep(tmp_path, submitits)
    sweep.submit(1, "7_0", f"/of_{JOB_ID_TOKEN}")
    sweep.submit(0, "7_1")
    (tmp_path / "logs" / "7").mkdir(parents=True, exist_ok=True)
    (tmp_path / "logs" / "7" / "8_submitted.pkl").write_text("no pickle")
    find_orphans(sweep.record, fence=True)
    assert sweep.ids == ["7_1", "7_0"]
    assert [job.planned_dir for job in sweep.record.jobs.values()] == ["/run", "/of_7_0"]
    assert "Job 1 of an earlier run was submitted as 7_0, which nobody had noted" in caplog.text
    assert not list(tmp_path.rglob("end.pkl"))


def test_what_an_earlier_run_has_left(tmp_path: Path) -> None:
    """Not only the last one."""
    sweep = Sweep(tmp_path)
    sweep.record.apply(SweepBegan(9.0, 43, "here", ("python",), "/work", "0.1"))
    sweep.submit(0, "7_0")
    find_orphans(sweep.record, fence=False)
    assert [job.job_id for job in sweep.record.past] == ["7_0", ""]


@pytest.mark.parametrize("fence", [True, False])
def test_what_is_not_found(tmp_path: Path, fence: bool) -> None:
    """Should it be on the cluster all the same, it does nothing, as its place is another one's by then."""
    sweep = Sweep(tmp_path)
    sweep.submit(0, "7_0")
    find_orphans(sweep.record, fence=fence)
    assert sweep.ids == ["7_0", ""]
    end = JobFolder(str(sweep.meeting(1))).read_end()
    assert end == (JobEnd(False, "its launching process was killed while it was being submitted") if fence else None)
    # It is not taken for one that has failed.
    assert sweep.record.jobs[1].folder == ""


def test_a_job_whose_end_is_known(tmp_path: Path) -> None:
    """Nobody need find it."""
    sweep = Sweep(tmp_path)
    for job in range(2):
        JobFolder(str(sweep.meeting(job))).publish_end(JobEnd(True))
    find_orphans(sweep.record, fence=True)
    assert sweep.ids == ["", ""] and sweep.record.jobs[0].folder == str(sweep.meeting(0))


def test_a_sweep_that_was_moved(tmp_path: Path) -> None:
    """Submitit's files are found where they are now, although they name the folder of before."""
    sweep = Sweep(tmp_path / "before")
    recorder = SweepRecorder(SweepPaths(str(tmp_path / "before")))
    (tmp_path / "before/.ddp").mkdir(parents=True)
    assert sweep.record.began is not None
    for event in (sweep.record.began, JobsAdded(2.0, 0, (("x=1",),), 1), sweep.intent(0)):
        recorder.record(event)
    sweep.submit(0, "7")
    (tmp_path / "before").rename(tmp_path / "after")
    record = read_journal(str(tmp_path / "after/.ddp/journal.jsonl"))
    find_orphans(record, fence=True)
    assert record.jobs[0].job_id == "7"


@pytest.mark.parametrize("run_dir", ["/run", f"/of_{JOB_ID_TOKEN}"])
def test_the_intent_is_recorded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str) -> None:
    """Before submitit is asked, which may be the last that the launching process does."""
    recorded: list[Any] = []

    class Killed(BaseException):
        """Stand in for SIGKILL."""

    def map_array(_function: object, jobs: list[SubmittedJob]) -> None:
        assert [job.folder for job in jobs] == [event.folder for event in recorded]
        assert [event.job for event in recorded] == [3]
        raise Killed

    monkeypatch.chdir(tmp_path)
    sent = submitted(tmp_path)
    monkeypatch.setattr(jobs_module, "build_launch_spec", lambda *_: sent.spec)
    context: Any = SimpleNamespace(
        settings=SimpleNamespace(code_changed=None, master_addr=None, master_port=None, omp_num_threads=None),
        paths=SweepPaths(str(tmp_path)),
    )
    cluster: Any = SimpleNamespace(executor="local", queue={"submitit_folder": "logs/%j"})
    sources: Any = SimpleNamespace(check=lambda _: None)
    recorder: Any = SimpleNamespace(record=recorded.append)
    submitter = JobSubmitter(context, cluster, SimpleNamespace(map_array=map_array), recorder, sources)
    plan: Any = SimpleNamespace(
        number=3, run_dir=run_dir, config_hash="abc", first_attempt=Attempt(), payload=sent.payload, config_yaml=""
    )
    with pytest.raises(Killed):
        submitter.submit([plan])
    (event,) = recorded
    assert isinstance(event, JobSubmitted)
    planned = "/run" if run_dir == "/run" else ""
    facts = (event.job_id, event.config_hash, event.executor, event.planned_dir)
    assert facts == ("", "abc", "local", planned)
    assert event.submitit_folder == os.path.join(os.getcwd(), "logs/%j")
