"""The event loop over a batch of jobs, on scripts of what happens to them, without processes."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobStatus

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import Resume
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import JobFailedError, StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Forward, Stop
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.batch import FailureLimit
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.resume import PreviousRuns
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobRecord, JobState, SweepRecord, SweepStopped
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.schedule import DevicePool
from support.scripted import arrives, ends, is_lost, make_context, obeys, scripted_sweep

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
ERROR = ValueError("broken")
COMPLETED, FAILED = JobStatus.COMPLETED, JobStatus.FAILED


@pytest.fixture(autouse=True)
def _hydra(task_name: None) -> None:
    """Let Hydra have begun."""


def statuses(sweep: Any) -> list[JobStatus]:
    return [one.status for one in sweep.returns]


# --- order and results


def test_one_after_the_other(tmp_path: Path) -> None:
    """Jobs start in order, the next one when the last one has ended, and each has its value."""
    sweep = scripted_sweep(tmp_path, 3, ends(0, "a"), ends(1, "b"), ends(2, "c")).run()
    assert sweep.starts == [0, 1, 2]
    assert sweep.monitor.most_at_once == 1
    assert sweep.returns is not None
    assert [one.return_value for one in sweep.returns] == ["a", "b", "c"]
    assert [one.overrides for one in sweep.returns] == [["x=0"], ["x=1"], ["x=2"]]
    assert [one.cfg.x for one in sweep.returns] == [0, 1, 2]
    kinds = [("JobStarted", 0), ("JobEnded", 0), ("JobStarted", 1), ("JobEnded", 1), ("JobStarted", 2), ("JobEnded", 2)]
    assert sweep.what_happened == kinds


def test_results_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    """However they end."""
    sweep = scripted_sweep(tmp_path, 3, ends(2, "c"), ends(0, "a"), ends(1, "b"), max_parallel_jobs=3).run()
    assert sweep.monitor.most_at_once == 3
    assert sweep.returns is not None
    assert [one.return_value for one in sweep.returns] == ["a", "b", "c"]


def test_devices_that_come_back(tmp_path: Path) -> None:
    """A large job waits for enough devices; jobs after it that fit start before it, and on no device twice."""
    pool = DevicePool(("0", "1"))
    script = (ends(0), ends(2), ends(1))
    sweep = scripted_sweep(tmp_path, 3, *script, pool=pool, sizes={1: 2}, devices=["0", "1"]).run()
    assert sweep.starts == [0, 2, 1]
    devices = {job.spec.number: job.spec.devices for job in sweep.monitor.started}
    assert devices[1] == ("0", "1")
    assert devices[0] != devices[2]


def test_failures_are_of_one_job_alone(tmp_path: Path) -> None:
    """One that fails, one that does not compose and one that cannot be started end no other job."""
    script = (ends(0, error=ERROR), ends(2, "c"))
    sweep = scripted_sweep(tmp_path, 3, *script, errors={1: KeyError("y")}).run()
    assert sweep.starts == [0, 2]
    assert sweep.returns is not None
    assert statuses(sweep) == [FAILED, FAILED, COMPLETED]
    with pytest.raises(ValueError, match="broken"):
        _ = sweep.returns[0].return_value
    assert isinstance(sweep.returns[1]._return_value, KeyError)


def test_a_job_that_cannot_be_started(tmp_path: Path) -> None:
    """Its run directory cannot be made: the job fails, with its devices free for the next one."""
    (tmp_path / "0").write_text("in the way")
    sweep = scripted_sweep(tmp_path, 2, ends(1), pool=DevicePool(("0",)), devices=["0"]).run()
    assert sweep.starts == [1]
    assert statuses(sweep) == [FAILED, COMPLETED]
    assert sweep.returns is not None
    assert isinstance(sweep.returns[0]._return_value, StartError)


def test_no_job_at_all(tmp_path: Path) -> None:
    assert scripted_sweep(tmp_path, 0).run().returns == []


# --- max_failures


def test_the_failure_limit(tmp_path: Path) -> None:
    """It is reached once, at the number that was asked for, and never without a number."""
    limit = FailureLimit(make_context(tmp_path, max_failures=2).settings)
    assert [limit.check(failures) for failures in (0, 1, 2, 3)] == [False, False, True, False]
    assert limit.is_reached
    skipped = limit.skip(2)
    assert skipped.skipped and not skipped.completed
    never = FailureLimit(make_context(tmp_path).settings)
    assert not never.check(1000) and not never.is_reached


def test_max_failures_lets_running_jobs_end(tmp_path: Path) -> None:
    """No more are started, those that wait are not run, and those that run have their results."""
    script = (ends(0, error=ERROR), ends(1, "b"))
    sweep = scripted_sweep(tmp_path, 4, *script, max_parallel_jobs=2, max_failures=1).run()
    assert sweep.starts == [0, 1]
    assert sweep.monitor.sent == [[], []]
    assert statuses(sweep) == [FAILED, COMPLETED, FAILED, FAILED]
    assert [one for one in sweep.what_happened if one[0] == "JobSkipped"] == [("JobSkipped", 2), ("JobSkipped", 3)]


def test_max_failures_that_stops_running_jobs(tmp_path: Path) -> None:
    """They are ordered to end, and not started once more."""
    script = (ends(0, error=ERROR), obeys(1))
    options: dict[str, Any] = {"max_parallel_jobs": 2, "max_failures": 1, "stop_running": True, "max_restarts": 0}
    sweep = scripted_sweep(tmp_path, 3, *script, **options).run()
    assert sweep.starts == [0, 1]
    (order,) = sweep.monitor.sent[1]
    assert isinstance(order, Stop) and not order.at_once
    assert statuses(sweep) == [FAILED] * 3


# --- restarts


def test_a_restart(tmp_path: Path) -> None:
    """A job that fails is started once more, in a start with a name and a count of its own, before the next job."""
    script = (ends(0, error=ERROR), ends(0, "second"), ends(1))
    sweep = scripted_sweep(tmp_path, 2, *script, max_restarts=1).run()
    assert sweep.starts == [0, 0, 1]
    first, second, _ = (job.spec for job in sweep.monitor.started)
    assert first.run_id != second.run_id
    assert [(spec.attempt, spec.restart_count) for spec in (first, second)] == [(0, 0), (1, 1)]
    kinds = [kind for kind, job in sweep.what_happened if job == 0]
    assert kinds == ["JobStarted", "JobPaused", "JobStarted", "JobEnded"]
    assert statuses(sweep) == [COMPLETED, COMPLETED]


def test_restarts_that_are_used_up(tmp_path: Path) -> None:
    """Then the last failure stands; what failed in between does not count as a failed job."""
    script = (ends(0, error=ERROR), ends(0, error=ERROR), ends(1))
    sweep = scripted_sweep(tmp_path, 2, *script, max_restarts=1, max_failures=2).run()
    assert sweep.starts == [0, 0, 1]
    assert statuses(sweep) == [FAILED, COMPLETED]


def test_a_job_that_no_spawner_took_up(tmp_path: Path) -> None:
    """It is handed out again, three times at most, whatever `max_restarts` is."""
    sweep = scripted_sweep(tmp_path, 1, is_lost(0), ends(0, "a")).run()
    assert [job.spec.restart_count for job in sweep.monitor.started] == [0, 0]
    assert statuses(sweep) == [COMPLETED]
    sweep = scripted_sweep(tmp_path / "again", 1, *[is_lost(0)] * 4).run()
    assert sweep.starts == [0] * 4
    assert sweep.returns is not None and isinstance(sweep.returns[0]._return_value, JobFailedError)


def test_a_restart_that_cannot_be_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The job has failed of what it failed of before, which says more."""
    tried = []

    def refuses() -> None:
        tried.append(1)
        if len(tried) > 1:
            raise StartError("The program has changed.")

    script = (ends(0, error=ERROR),)
    sweep = scripted_sweep(tmp_path, 1, *script, refuses=refuses, max_restarts=3).run()
    assert sweep.starts == [0]
    assert sweep.returns is not None and isinstance(sweep.returns[0]._return_value, ValueError)
    assert "The program has changed." in caplog.text


# --- signals


@pytest.mark.parametrize(("number", "error"), [(INT, KeyboardInterrupt), (TERM, SystemExit)])
def test_a_signal_stops_the_batch(tmp_path: Path, number: int, error: type[BaseException]) -> None:
    """What runs is ordered to end, nothing more is started, not even once more, and the process ends as told."""
    sweep = scripted_sweep(tmp_path, 3, arrives(number), obeys(0), obeys(1), max_parallel_jobs=2, max_restarts=3).run()
    assert sweep.starts == [0, 1]
    assert [[(one.at_once, one.detail) for one in sent] for sent in sweep.monitor.sent] == [
        [(False, signal.Signals(number).name)]
    ] * 2
    assert type(sweep.error) is error
    assert [event.signal for event in sweep.events if isinstance(event, SweepStopped)] == [signal.Signals(number).name]
    # What waits has no end: a resumed sweep runs it.
    assert ("JobEnded", 2) not in sweep.what_happened and ("JobSkipped", 2) not in sweep.what_happened


def test_a_second_signal_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once; two that come together are one order."""
    monkeypatch.setattr("hydra_plugins.hydra_ddp_subprocess_launcher.common.signals.ONE_ORDER_S", 0.0)
    sweep = scripted_sweep(tmp_path, 1, arrives(INT), arrives(TERM), obeys(0)).run()
    assert [one.at_once for one in sweep.monitor.sent[0]] == [False, True]
    assert isinstance(sweep.error, KeyboardInterrupt)
    monkeypatch.setattr("hydra_plugins.hydra_ddp_subprocess_launcher.common.signals.ONE_ORDER_S", 60.0)
    sweep = scripted_sweep(tmp_path / "again", 1, arrives(INT), arrives(TERM), obeys(0)).run()
    assert [one.at_once for one in sweep.monitor.sent[0]] == [False]


def test_a_job_that_completes_while_it_is_stopped(tmp_path: Path) -> None:
    """Its value counts, and is recorded."""
    sweep = scripted_sweep(tmp_path, 1, arrives(TERM), ends(0, 0.5)).run()
    (ended,) = [event for event in sweep.events if type(event).__name__ == "JobEnded"]
    assert ended.completed and ended.value == 0.5  # type: ignore[union-attr]
    assert isinstance(sweep.error, SystemExit) and sweep.error.code == 128 + TERM


def test_a_signal_for_the_ranks(tmp_path: Path) -> None:
    """It goes to all of them, and stops nothing."""
    sweep = scripted_sweep(tmp_path, 2, arrives(USR1), ends(0), ends(1), max_parallel_jobs=2).run()
    assert sweep.monitor.sent == [[Forward(USR1, None)]] * 2
    assert statuses(sweep) == [COMPLETED] * 2


# --- resume


def known_jobs(*jobs: JobRecord) -> SweepRecord:
    return SweepRecord(past=list(jobs))


def known(number: int, state: JobState, **changes: Any) -> JobRecord:
    facts: dict[str, Any] = {"attempts": 1, "config_hash": f"hash of x={number}", "task": "app.main", "exact": True}
    return JobRecord(number, (f"x={number}",), state, **{**facts, **changes})


@pytest.mark.parametrize(("choice", "starts"), [(Resume.unfinished, [1, 2, 3]), (Resume.failed, [1])], ids=str)
def test_resume(tmp_path: Path, choice: Resume, starts: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """A job that has completed is not run again, and has its value; one that has failed is; others as was asked for."""
    caplog.set_level(logging.INFO)
    record = known_jobs(known(0, JobState.COMPLETED, value=0.25), known(1, JobState.FAILED), known(2, JobState.LOST))
    script = [ends(number, number) for number in starts]
    sweep = scripted_sweep(tmp_path, 4, *script, previous=PreviousRuns(record, choice), record=record).run()
    assert sweep.starts == starts
    assert sweep.returns is not None and sweep.returns[0].return_value == 0.25
    assert sweep.what_happened[0] == ("JobKept", 0)
    assert [one for kind, one in sweep.what_happened if kind == "JobSkipped"] == [
        number for number in (2, 3) if number not in starts
    ]
    # Starts are counted over all runs of the sweep.
    assert sweep.monitor.started[0].spec.attempt == 1


def test_resume_and_max_failures(tmp_path: Path) -> None:
    """Jobs that an earlier run has completed have their values, although no more jobs are started."""
    record = known_jobs(known(2, JobState.COMPLETED, value=2.5))
    sweep = scripted_sweep(
        tmp_path,
        3,
        ends(0, error=ERROR),
        previous=PreviousRuns(record, Resume.unfinished),
        record=record,
        max_failures=1,
    ).run()
    assert sweep.starts == [0]
    assert statuses(sweep) == [FAILED, FAILED, COMPLETED]
    assert sweep.returns is not None and sweep.returns[2].return_value == 2.5


# --- run directories


def test_two_jobs_in_one_run_directory(tmp_path: Path) -> None:
    """The second one is refused while the first one runs, naming it."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").symlink_to(tmp_path / "0")
    sweep = scripted_sweep(tmp_path, 2, ends(0), max_parallel_jobs=2).run()
    assert sweep.starts == [0]
    assert sweep.returns is not None
    with pytest.raises(StartError, match="in use by job 0"):
        _ = sweep.returns[1].return_value
