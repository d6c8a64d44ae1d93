"""Jobs on a cluster: submitted, found again, asked for their state, and cancelled."""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.choices import OnConfigDifference, OnInterrupt
from ..common.errors import JobFailedError, StartError
from ..common.files import JobPaths, read_own_pickle
from ..common.processes import start_environment
from ..common.protocol import JOB_ID_TOKEN, GroupReport, JobEnd, LaunchSpec
from ..display.logs import LogTee, last_lines
from ..display.tables import override_line
from ..groups.rendezvous import JobFolder, StartFile
from ..groups.running_job import config_difference
from ..job import results
from ..job.plan import Allocation, PlannedJob, build_launch_spec
from ..job.program import SourceWatch
from ..job.results import JobResult
from ..job.settings import SweepContext
from ..launcher.resume import PreviousRuns
from ..records.events import JobRecord, JobSubmitted, SweepRecord
from ..records.journal import SweepRecorder
from ..resources.port import ReservedPort
from ..supervisor.heartbeat import refresh_names
from . import submitit_api
from .node_task import NodeTask, SubmittedJob
from .submitit_api import (
    Cluster,
    find_job,
    folder_of,
    how_to_cancel,
    outside_allocation,
    still_there,
    undisturbed,
)

# A cluster gives out devices and ports itself, on the nodes.
NO_ALLOCATION = Allocation((), ReservedPort("", 0, None))
_log = logging.getLogger(__name__)
# Seconds for the file that tells of a job's end to become visible after the cluster says that the job has ended.
_LATE_FILE_S = 15.0
# States in which a job has been before it is queued again, and those in which its nodes had no say in its end.
_HAD_RUN = ("RUNNING", "COMPLETING", "PREEMPTED", "SUSPENDED")
_CUT_OFF = ("CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "BOOT_FAIL")
_CUT_OFF_S = 3.0
# Seconds after which a job that was preempted, and does not wait to run again, is given up.
_PREEMPTED_S = 180.0
_SHOWN_LINES = 20
# The report of a group that nobody could report: all its ranks had stored that they completed.
_FINISHED = GroupReport((), None, None, finished=True)


@dataclass
class ClusterJob:
    """One job on the cluster.

    Attributes:
        plan: The job.
        folder: Where its nodes tell how it fares.
        handle: Submitit's job.
        spec: Its last start; None: it waits for its turn.
        told_by: The file that told of that.
        tees: One a rank that is shown.
        state: The cluster's word for its state.
        since: When it had that state first, monotonic seconds.
        began_at: When it was first seen to run, Unix time in seconds; None: it was not.
        why: Why it was cancelled here; empty: it was not.
        gone_by: When it is given up after that, monotonic seconds.
    """

    plan: PlannedJob
    folder: JobFolder
    handle: Any
    spec: LaunchSpec | None = None
    told_by: StartFile | None = None
    tees: list[LogTee] = field(default_factory=list)
    state: str = "UNKNOWN"
    since: float = field(default_factory=time.monotonic)
    began_at: float | None = None
    why: str = ""
    gone_by: float = math.inf

    def take_last_start(self) -> bool:
        """Take note of the start that its first node told of last; return whether that is news."""
        told = self.folder.find_last_start()
        if told is None or told == self.told_by:
            return False
        spec = told.read()
        if spec is None:
            return False
        self.told_by = told
        if self.spec is not None and spec.run_id == self.spec.run_id:
            return False
        self.spec, self.began_at = spec, self.began_at or time.time()
        # It may depend on the id that it has there.
        self.plan = replace(self.plan, frozen=replace(self.plan.frozen, run_dir=spec.run_dir))
        return True

    def take_state(self, state: str, now: float) -> bool:
        """Take note of the cluster's word for its state; return whether it waits to run again.

        Args:
            state: The word; `GONE`: the cluster does not know it any more.
            now: Monotonic seconds.
        """
        if self.state in (state, "GONE"):
            return False
        # SLURM's accounting may say PENDING for some seconds after the job has begun to run.
        again = self.state.startswith(_HAD_RUN) and state.startswith(("PENDING", "REQUEUED"))
        self.state, self.since = state, now
        return again

    def is_lost(self, now: float, executor: str) -> bool:
        """Return whether the cluster has ended it, and its nodes have had the time to tell of an end and have not.

        Args:
            now: Monotonic seconds.
            executor: Submitit's name of the cluster.
        """
        preempted = self.state.startswith("PREEMPTED")
        patience_s = _PREEMPTED_S if preempted else _LATE_FILE_S
        # On this machine no file is late.
        if self.state.startswith(_CUT_OFF) or executor == "local":
            patience_s = _CUT_OFF_S
        over = submitit_api.has_ended(self.state) or preempted
        # What was cancelled is waited for until its last process is gone, as who stops a sweep may start it again.
        if not over or not (self._has_gone() if self.why else now - self.since > patience_s):
            return False
        self.folder.refresh()
        return self.folder.read_end() is None

    def _has_gone(self) -> bool:
        return not submitit_api.is_queued(self.handle)

    def told_end(self, end: JobEnd, check_config: OnConfigDifference | None) -> JobResult:
        """Return how it ended, as its first node has told it."""
        if end.spec is not None:
            return self._resolve(end.report, end.spec, check_config)
        if self.spec is not None and self._all_completed(self.spec):
            return self._resolve(_FINISHED, self.spec, check_config)
        return results.failed_before_start(JobFailedError(end.cause))

    def _resolve(
        self, report: GroupReport | None, spec: LaunchSpec, check_config: OnConfigDifference | None
    ) -> JobResult:
        difference = config_difference(spec) if check_config is not None else None
        if difference:
            _log.warning("#%d : %s", self.plan.number, difference)
        if difference and check_config is OnConfigDifference.error:
            return results.failed_before_start(JobFailedError(f"{difference} (check_config=error)"))
        return results.resolve_result_safely(report, spec)

    def _all_completed(self, spec: LaunchSpec) -> bool:
        outcomes = results.read_outcomes(spec)
        return bool(outcomes) and all(outcome is not None and outcome.completed for outcome in outcomes)

    def ended_from_outside(self, executor: str, check_config: OnConfigDifference | None) -> JobResult:
        """Return how it ended, of which the cluster alone tells.

        Args:
            executor: Submitit's name of the cluster.
        """
        if self.spec is not None and self._all_completed(self.spec):
            # Only the way out was cut off.
            return self._resolve(_FINISHED, self.spec, check_config)
        if self.why and self.spec is None:
            self._fence(self.why)
            return results.skipped(self.why)
        name = {"slurm": "SLURM"}.get(executor, "submitit")
        why = f" ({self.why})" if self.why else ""
        lines = [f"{name} ended job {self.handle.job_id}: {self.state}{why}."]
        errors = Path(str(self.handle.paths.stderr))
        if tail := last_lines(str(errors), _SHOWN_LINES):
            lines += ["", f"Last lines of {errors}:", *(f"  {line}" for line in tail), ""]
        self._fence(lines[0])
        if advice := submitit_api.hint(self.state):
            lines.append(advice)
        if self.spec is not None:
            lines.append(f"The log of each rank is in {JobPaths(self.spec.run_dir).folder}.")
        return replace(results.failed_before_start(JobFailedError("\n".join(lines))), cause=lines[0].rstrip("."))

    def _fence(self, why: str) -> None:
        """Mark the job as ended, so that a requeue exits immediately."""
        with contextlib.suppress(OSError):
            self.folder.publish_end(JobEnd(False, why))


# Seconds between two questions for the states of all jobs.
_STATE_INTERVAL_S = 1.0
# Seconds after which the cluster is asked although submitit would not do so yet: it waits for up to ten minutes.
_ASK_AGAIN_S = 60.0
# Seconds until jobs that were cancelled, and are still there, are cancelled once more.
_CANCEL_AGAIN_S = 10.0


@dataclass(frozen=True)
class StateNews:
    """What the cluster's answers change.

    Attributes:
        waiting_again: Jobs that have run, and are queued again.
        lost: Jobs that the cluster has ended without a word of their nodes.
        given_up: Cancelled jobs that have not gone in time.
    """

    waiting_again: list[ClusterJob] = field(default_factory=list)
    lost: list[ClusterJob] = field(default_factory=list)
    given_up: list[ClusterJob] = field(default_factory=list)


class SlurmPoller:
    """Ask one cluster, seldom enough, and have it cancel jobs, often enough.

    Args:
        cluster: What jobs ask of it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked_at = 0.0
        # Asked for what it knows now, and not for what submitit was told some minutes ago.
        self._insisted_at = 0.0
        self._cancel_at = math.inf
        self._said_wrong = False

    def is_due(self, now: float) -> bool:
        """Return whether it is time to ask.

        Args:
            now: Monotonic seconds.
        """
        return now - self._asked_at >= _STATE_INTERVAL_S

    def ask(self, jobs: Sequence[ClusterJob], now: float) -> StateNews:
        """Ask for the states of jobs, let them take note of these, and return what follows from them.

        Args:
            jobs: All jobs of the batch that are on the cluster.
            now: Monotonic seconds.
        """
        insisting = ask = now - self._insisted_at >= _ASK_AGAIN_S or any(job.why for job in jobs)
        self._asked_at = now
        if ask:
            self._insisted_at = now
        news = StateNews()
        left = []
        for job in jobs:
            state = self._state_of(job, ask=ask)
            # Accounting does not list elements of an array that were cancelled while they waited together.
            waited = bool(job.why) or now - job.since > _ASK_AGAIN_S
            if state == "UNKNOWN" and insisting and waited and submitit_api.is_gone(job.handle):
                state = "GONE"
            # One answer is for all of them.
            ask = False
            if job.take_state(state, now):
                news.waiting_again.append(job)
            if job.is_lost(now, self._cluster.executor):
                news.lost.append(job)
            elif now > job.gone_by:
                news.given_up.append(job)
            else:
                left.append(job)
        if now > self._cancel_at:
            self._cancel_at = now + _CANCEL_AGAIN_S
            submitit_api.cancel([job.handle for job in left if job.why])
        return news

    def _state_of(self, job: ClusterJob, *, ask: bool) -> str:
        try:
            return submitit_api.state_of(job.handle, ask=ask)
        except Exception as error:  # noqa: BLE001  (submitit reads what SLURM's commands print, and may not understand it)
            if not self._said_wrong:
                self._said_wrong = True
                _log.warning(
                    "The states of the jobs cannot be found out: %s: %s. Their files are watched",
                    type(error).__name__,
                    error,
                )
            return "UNKNOWN"

    def cancel(self, jobs: Iterable[ClusterJob], why: str, now: float, gone_by: float = math.inf) -> None:
        """Cancel jobs, again from time to time, until the cluster says that they have gone.

        Args:
            why: For what reason, in a few words.
            now: Monotonic seconds.
            gone_by: When those that are still there are given up, monotonic seconds; infinite: never.
        """
        handles = []
        for job in jobs:
            job.why, job.gone_by = why, gone_by
            handles.append(job.handle)
        self._cancel_at = now + _CANCEL_AGAIN_S if self._cluster.executor == "slurm" else math.inf
        if wrong := submitit_api.cancel(handles):
            _log.error("The jobs could not be cancelled: %s. See what is left: squeue --me", wrong)
        # The states are old now.
        self._asked_at = 0.0

    def leave_for(self, error: BaseException, jobs: Iterable[ClusterJob]) -> None:
        """Cancel jobs, or say that they are left, before this process ends for an error.

        Args:
            jobs: All jobs of the batch that are on the cluster.
        """
        handles = [job.handle for job in jobs]
        if not handles:
            return
        # Such as a signal that came while the cluster did not answer. A defect of ours is no reason to lose the jobs.
        if isinstance(error, KeyboardInterrupt | SystemExit) and self._cluster.on_interrupt is OnInterrupt.cancel:
            submitit_api.cancel(handles)
        else:
            _log.error("Left on the cluster: %s. hydra.launcher.resume=unfinished finds them", listed(handles))


def listed(handles: Iterable[Any]) -> str:
    """Return the ids of submitit's jobs, those of one array together."""
    arrays: dict[str, list[str]] = {}
    for handle in handles:
        array, _, index = str(handle.job_id).partition("_")
        arrays.setdefault(array, []).append(index)
    return ", ".join(array if parts == [""] else f"{array}_[{','.join(parts)}]" for array, parts in arrays.items())


class JobSubmitter:
    """Submit jobs, several of them as one array.

    Args:
        cluster: What jobs ask of submitit.
        recorder: Records what is about to be submitted.
    """

    def __init__(
        self,
        context: SweepContext,
        cluster: Cluster,
        executor: Any,
        recorder: SweepRecorder,
        sources: SourceWatch,
    ) -> None:
        self._context = context
        self._cluster = cluster
        self._executor = executor
        self._recorder = recorder
        self._sources = sources
        # In which each job gets a directory where its nodes meet.
        self._folder = os.path.join(context.paths.rendezvous_root, uuid.uuid4().hex[:12])

    def submit(self, plans: Sequence[PlannedJob]) -> list[ClusterJob]:
        """Submit jobs and return them in order.

        Raises:
            Exception: whatever submitit, and what it calls, raise.
        """
        self._sources.check(self._context.settings.code_changed)
        jobs = [self._submitted_job(plan) for plan in plans]
        for plan, job in zip(plans, jobs, strict=True):
            os.makedirs(job.folder, exist_ok=True)
            self._record_intent(plan, job.folder)
        try:
            with outside_allocation(), undisturbed(self._cluster):
                handles = self._executor.map_array(NodeTask(), jobs)
        except BaseException:
            # Some of them may be on the cluster all the same. They must not run, as no sweep knows of them.
            for job in jobs:
                with contextlib.suppress(OSError):
                    JobFolder(job.folder).publish_end(JobEnd(False, "its submission failed"))
            raise
        for handle in handles:
            # The payload is in it.
            with contextlib.suppress(OSError):
                os.chmod(handle.paths.submitted_pickle, 0o600)
        together = zip(plans, jobs, handles, strict=True)
        return [ClusterJob(plan, JobFolder(job.folder), handle) for plan, job, handle in together]

    def _record_intent(self, plan: PlannedJob, folder: str) -> None:
        """Record what is about to be submitted, in case this process is killed before it has the id."""
        planned_dir = "" if JOB_ID_TOKEN in plan.run_dir else plan.run_dir
        facts = (folder, plan.config_hash, self._cluster.executor, planned_dir, folder_of(self._cluster))
        self._recorder.record(JobSubmitted(time.time(), plan.number, "", *facts))

    def _submitted_job(self, plan: PlannedJob) -> SubmittedJob:
        settings = self._context.settings
        at_start = start_environment() or {}
        return SubmittedJob(
            spec=build_launch_spec(plan, plan.first_attempt, NO_ALLOCATION, settings),
            payload=plan.payload,
            config_yaml=plan.config_yaml,
            folder=os.path.join(self._folder, str(plan.number)),
            first_attempt=plan.first_attempt.number,
            master_addr=settings.master_addr,
            master_port=settings.master_port,
            omp_num_threads=settings.omp_num_threads,
            seed=at_start.get("PL_GLOBAL_SEED"),
        )


def adopt(cluster: Cluster, plan: PlannedJob, lost: Sequence[JobRecord]) -> ClusterJob | None:
    """Return a job that an earlier launching process has left on the cluster; None: it is not there.

    Args:
        cluster: What jobs ask of submitit.
        lost: Its earlier runs whose end was not recorded.

    Raises:
        StartError: when it is there with another config, or the cluster does not say.
    """
    found = (_adopt_run(cluster, plan, run) for run in reversed(lost))
    return next((job for job in found if job is not None), None)


def _adopt_run(cluster: Cluster, plan: PlannedJob, known: JobRecord) -> ClusterJob | None:
    state = still_there(known)
    if state and known.config_hash != plan.config_hash:
        raise StartError(
            f"It is on the cluster with another config ({known.job_id}, {state}), and would share its run "
            f"directory with that. {how_to_cancel(known)}, or wait for its end."
        )
    folder = JobFolder(known.folder)
    folder.refresh()
    # Its end may have come since the journal was read.
    if known.config_hash != plan.config_hash or (not state and folder.read_end() is None):
        return None
    state = state or "has just ended"
    _log.info("\t#%d : is on the cluster already (%s, %s): waiting for it", plan.number, known.job_id, state)
    return ClusterJob(plan, folder, find_job(cluster, known.job_id), began_at=known.began_at)


class ClusterSubmissions:
    """Jobs of earlier runs that may still be on a cluster.

    Args:
        executor: Submitit's name of the cluster whose jobs a sweep can wait for; empty: it can wait for none.
    """

    def __init__(self, executor: str = "") -> None:
        self.executor = executor

    def find_orphans(self, record: SweepRecord, *, fence: bool) -> None:
        """Put the ids of jobs into their records that were submitted, but not recorded as such.

        Args:
            record: What earlier runs of the sweep have recorded, which is changed.
            fence: Have those that are not found end as soon as they begin.
        """
        find_orphans(record, fence=fence)

    def state_of(self, job: JobRecord) -> str:
        """Return the state of a job that has not ended; empty: it has.

        Raises:
            StartError: if the cluster does not tell.
        """
        return still_there(job)

    def how_to_cancel(self, job: JobRecord) -> str:
        """Return a sentence, without its end, on how to cancel a job."""
        return how_to_cancel(job)


def name_left_out(previous: PreviousRuns) -> None:
    """Say which jobs of earlier runs are still on the cluster although this run has not asked for them."""
    for record in previous.left_out():
        if state := still_there(record):
            _log.warning(
                "Job %d of an earlier run (%s) is still on the cluster (%s, %s). This run has no such job, and does "
                "not wait for it. %s, if it is not wanted any more",
                record.number,
                override_line(record.overrides),
                record.job_id,
                state,
                how_to_cancel(record),
            )


_SUBMITTED = "_submitted.pkl"
_MARK = re.compile("%[jtAa]")
_NOBODY_WAITS = "its launching process was killed while it was being submitted"


def find_orphans(record: SweepRecord, *, fence: bool) -> None:
    """Put the ids into the records of such jobs, as far as they are found.

    Args:
        record: What earlier runs of the sweep have recorded, which is changed.
        fence: See to it that those that are not found would end as soon as they began.
    """
    unnoted = [job for job in [*record.past, *record.touched()] if _is_unnoted(job)]
    if not unnoted:
        return
    submitted = {}
    for folder in {job.submitit_folder for job in unnoted}:
        submitted.update({_place(job.folder): (job_id, job) for job_id, job in _submitted_jobs(folder)})

    def settled(job: JobRecord) -> JobRecord:
        if job not in unnoted:
            return job
        if _place(job.folder) not in submitted:
            if fence:
                with contextlib.suppress(OSError):
                    JobFolder(job.folder).publish_end(JobEnd(False, _NOBODY_WAITS))
            return replace(job, folder="")
        job_id, found = submitted[_place(job.folder)]
        _log.info("Job %d of an earlier run was submitted as %s, which nobody had noted", job.number, job_id)
        return replace(job, job_id=job_id, planned_dir=found.spec.run_dir.replace(JOB_ID_TOKEN, job_id))

    record.past = [settled(job) for job in record.past]
    record.jobs = {number: settled(job) for number, job in record.jobs.items()}


def _is_unnoted(job: JobRecord) -> bool:
    if not job.submitit_folder or job.job_id or job.state.over:
        return False
    return JobFolder(job.folder).read_end() is None


def _place(folder: str) -> str:
    """Return what a job's folder is called in its sweep, which may have been moved: no other batch has that name."""
    return os.path.join(*Path(folder).parts[-2:])


def _submitted_jobs(folder: str) -> Iterator[tuple[str, SubmittedJob]]:
    """Return the jobs of which submitit has files in a folder, with their ids."""
    # Its own layout: `submitit.core.utils.JobPaths`.
    refresh_names(os.path.dirname(_MARK.split(os.path.join(folder, ""))[0]))
    for path in glob.glob(_MARK.sub("*", os.path.join(glob.escape(folder), f"*{_SUBMITTED}"))):
        delayed = read_own_pickle(path)
        job = next(iter(getattr(delayed, "args", ())), None)
        if isinstance(job, SubmittedJob):
            yield os.path.basename(path).removesuffix(_SUBMITTED), job
