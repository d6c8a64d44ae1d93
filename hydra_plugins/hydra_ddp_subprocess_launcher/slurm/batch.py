"""The jobs of one batch on a cluster: submitted, watched through the files that their nodes write, and collected."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import time
import uuid
from dataclasses import replace

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from ..common import signals
from ..common.choices import OnInterrupt
from ..common.errors import LauncherError, StartError
from ..common.files import JobPaths
from ..common.protocol import JOB_ID_TOKEN
from ..common.quoting import shell_comment, shell_words
from ..common.signals import leave
from ..common.text import pluralize
from ..display.logs import LOOK_INTERVAL_S
from ..display.tables import override_line
from ..job import frozen_config, outcome, results
from ..job.plan import Allocation, PlannedJob, compose_and_plan, describe_start
from ..job.results import JobResult, make_job_return
from ..job.settings import Sweep
from ..launcher.batch import HEARD
from ..launcher.dry_run import DirSnapshot, print_dry_run
from ..launcher.progress import Progress
from ..resources.port import ReservedPort
from ..supervisor.heartbeat import refresh_names
from . import submitit_api
from .jobs import ClusterJob, SlurmPoller, adopt, listed, name_left_out, submit

_log = logging.getLogger(__name__)
# Seconds between two looks at the files of all jobs, at least and for each of them, as a file server has other users.
_FILES_INTERVAL_S = 0.5
_FILES_INTERVAL_PER_JOB_S = 0.02
# Seconds for jobs to end that a signal has cancelled: SLURM's KillWait is 30, where nobody has changed it.
_CANCELLED_S = 90.0


class SubmittedBatch:
    """Run the jobs of one `launch()` call on a cluster.

    Args:
        sweep: What is the same for all of them.
        job_overrides: One list of override strings a job.
        first: Number of the first job.
    """

    def __init__(self, sweep: Sweep, job_overrides: list[list[str]], first: int) -> None:
        assert sweep.cluster is not None
        self._sweep = sweep
        self._cluster = sweep.cluster
        self._overrides = dict(enumerate(job_overrides, start=first))
        self._returns: dict[int, JobReturn] = {}
        self._waiting: list[PlannedJob] = []
        self._jobs: dict[int, ClusterJob] = {}
        self._folder = os.path.join(sweep.paths.meetings, uuid.uuid4().hex[:12])
        self._stopped_by: int | None = None
        self._stopped_at = 0.0
        self._gave_up = False
        self._link = SlurmPoller(self._cluster)
        self._looked_at = 0.0
        at_once = self._cluster.max_parallel_jobs or self._cluster.queue.get("array_parallelism") or len(job_overrides)
        self._progress = Progress(sweep, self._overrides, min(int(at_once), len(job_overrides)))

    def run(self) -> list[JobReturn]:
        """Run all jobs and return one JobReturn a job, in order.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the jobs are cancelled or left (`on_interrupt`).
            SystemExit: after SIGTERM or SIGHUP, likewise, unless a handler that was there before decides otherwise.
        """
        with self._progress.shown():
            with signals.recorded_signals(HEARD, impatient=True) as arrived, selectors.DefaultSelector() as selector:
                selector.register(arrived.wakeup, selectors.EVENT_READ)
                try:
                    self._run_all(arrived, selector)
                except BaseException as error:
                    self._link.leave_for(error, self._jobs.values())
                    raise
            self._progress.finish()
        if self._stopped_by is not None:
            leave(self._stopped_by)
        return [self._returns[number] for number in self._overrides]

    def _run_all(self, arrived: signals.RecordedSignals, selector: selectors.BaseSelector) -> None:
        for number in self._overrides:
            self._plan(number)
            if self._obey(arrived.take()):
                break
        if self._sweep.has_one_batch:
            name_left_out(self._sweep)
        while self._waiting or self._jobs:
            self._submit()
            self._look()
            selector.select(self._progress.due_s(LOOK_INTERVAL_S if self._tees else _FILES_INTERVAL_S))
            self._obey(arrived.take())
            if self._stopped_by is not None and self._cluster.on_interrupt is OnInterrupt.leave:
                break

    @property
    def _tees(self) -> bool:
        return any(job.tees for job in self._jobs.values())

    # Submitting

    def _plan(self, number: int) -> None:
        overrides = self._overrides[number]
        try:
            plan = compose_and_plan(self._sweep, number, overrides)
            self._refuse_shared_directory(plan)
            waits = not self._adopt(plan) and not self._settle(plan)
        except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
            self._finish(number, None, "", None, results.failed_before_start(error))
            return
        if waits:
            self._waiting.append(plan)

    def _refuse_shared_directory(self, plan: PlannedJob) -> None:
        others = (*self._waiting, *(job.plan for job in self._jobs.values()))
        shared = [other.number for other in others if other.run_dir == plan.run_dir]
        # Of one that depends on the id each job has its own.
        if shared and JOB_ID_TOKEN not in plan.run_dir:
            raise StartError(
                f"Its run directory {plan.run_dir} is in use by job {shared[0]}. Give each job one of its own "
                "(hydra.sweep.subdir), as jobs on a cluster may run at the same time."
            )

    def _settle(self, plan: PlannedJob) -> bool:
        """Deal with a job that an earlier run of the sweep has settled; return whether it is one."""
        if self._sweep.earlier is None:
            return False
        decision = self._sweep.earlier.decide(plan.known, plan.config_yaml, plan.config_hash)
        self._progress.decided(plan, decision)
        if decision.verdict is not None:
            self._finish(plan.number, plan.config, plan.run_dir, None, decision.verdict)
        return decision.verdict is not None

    def _adopt(self, plan: PlannedJob) -> bool:
        """Wait for a job that an earlier launching process has left on the cluster; return whether it is one."""
        job = adopt(self._sweep, plan)
        if job is not None:
            self._jobs[plan.number] = job
            self._progress.submitted(plan, job.handle.job_id, job.folder.path)
        return job is not None

    def _submit(self) -> None:
        """Submit what waits, as far as more may be submitted."""
        room = len(self._waiting)
        if self._cluster.max_parallel_jobs is not None:
            room = min(room, self._cluster.max_parallel_jobs - len(self._jobs))
        if room <= 0 or self._stopped_by is not None:
            return
        plans, self._waiting = self._waiting[:room], self._waiting[room:]
        try:
            jobs = submit(self._sweep, plans, self._folder)
        except Exception as error:  # noqa: BLE001  (submitit, and what it calls, raise many things)
            for plan in plans:
                self._finish(plan.number, plan.config, plan.run_dir, None, _not_submitted(error))
            return
        for job in jobs:
            self._jobs[job.plan.number] = job
            self._progress.submitted(job.plan, job.handle.job_id, job.folder.path)
        ranks = " or ".join(map(str, sorted({plan.world_size for plan in plans})))
        ids = listed([job.handle for job in jobs])
        said = f"{pluralize(len(jobs), 'job')} of {pluralize(ranks, 'rank')}"
        _log.info("Submitted %s to %s: %s", said, self._cluster.executor, ids)

    # Watching

    def _look(self) -> None:
        self._progress.begin_round()
        now = time.monotonic()
        if now - self._looked_at >= max(_FILES_INTERVAL_S, _FILES_INTERVAL_PER_JOB_S * len(self._jobs)):
            self._looked_at = now
            for job in list(self._jobs.values()):
                self._look_at_files(job)
        for job in self._jobs.values():
            self._progress.show(job.tees, last=False)
        if self._jobs and self._link.is_due(now):
            self._ask(now)
        self._give_up()

    def _look_at_files(self, job: ClusterJob) -> None:
        if job.take_last_start():
            assert job.start is not None
            self._progress.show(job.tees, last=True)
            attempt = replace(job.plan.first_attempt, number=job.start.group.attempt)
            place = Allocation((), ReservedPort("", 0, None))
            self._progress.started(job.plan, attempt, place, job.start.run_id, job.start.hosts)
            job.tees = self._progress.tees(job.plan, job.start.paths)
        end = job.folder.read_end()
        if end is not None:
            self._end(job, job.told_end(end, self._sweep.settings.check_config))

    def _ask(self, now: float) -> None:
        """Ask the cluster for the states of all jobs, and end those that it has ended without a word of their nodes."""
        news = self._link.ask(list(self._jobs.values()), now)
        for job in news.waiting_again:
            _log.info("#%d : waits to run again (%s)", job.plan.number, job.state)
            self._progress.submitted(job.plan, job.handle.job_id, job.folder.path)
        for job in news.lost:
            self._end(job, job.ended_from_outside(self._cluster.executor, self._sweep.settings.check_config))
        for job in news.given_up:
            # Nothing is noted of its end, so that a resumed sweep looks for it.
            number, job_id = job.plan.number, job.handle.job_id
            _log.error("#%d : may still be on the cluster. Cancel it: scancel %s", number, job_id)
            del self._jobs[number]

    # Ending

    def _obey(self, arrived: list[int]) -> bool:
        """Do what signals ask for; return whether the batch is stopped."""
        for number in arrived:
            if number not in signals.STOP_SIGNALS:
                self._progress.resumed()
            elif self._stopped_by is None:
                self._stop(number)
            elif time.monotonic() - self._stopped_at >= signals.ONE_ORDER_S:
                # Once more: nobody is waited for.
                self._jobs.clear()
        return self._stopped_by is not None

    def _stop(self, number: int) -> None:
        self._stopped_by, self._stopped_at = number, time.monotonic()
        name = signal.Signals(number).name
        self._progress.stopped(name)
        self._waiting.clear()
        handles = [job.handle for job in self._jobs.values()]
        if not handles:
            return
        if self._cluster.on_interrupt is OnInterrupt.leave:
            _log.warning(
                "%s: left on the cluster (on_interrupt=leave): %s, %s. hydra.launcher.resume=unfinished finds them",
                name,
                pluralize(len(handles), "job"),
                listed(handles),
            )
            return
        said = f"{pluralize(len(handles), 'job')}: {listed(handles)}"
        _log.warning("%s: cancelling %s (once more: do not wait)", name, said)
        self._cancel(list(self._jobs.values()), f"cancelled after {name}")

    def _cancel(self, jobs: list[ClusterJob], why: str) -> None:
        now = time.monotonic()
        # Whoever has stopped the sweep does not wait for ever.
        self._link.cancel(jobs, why, now, math.inf if self._stopped_by is None else now + _CANCELLED_S)

    def _give_up(self) -> None:
        """Start no more jobs when too many have failed (`max_failures`)."""
        settings, failures = self._sweep.settings, self._sweep.ledger.failures
        if settings.max_failures is None or failures < settings.max_failures or self._gave_up:
            return
        self._gave_up = True
        count, most = pluralize(failures, "job"), settings.max_failures
        _log.error("%s failed (max_failures=%d): no more jobs are started", count, most)
        why = f"{count} failed before it (max_failures={settings.max_failures})"
        for plan in self._waiting:
            self._finish(plan.number, plan.config, plan.run_dir, None, results.skipped(why))
        self._waiting.clear()
        self._cancel([job for job in self._jobs.values() if job.start is None or settings.stop_running], why)

    def _end(self, job: ClusterJob, verdict: JobResult) -> None:
        self._progress.show(job.tees, last=True)
        del self._jobs[job.plan.number]
        submitit_api.bury(job.handle)
        plan, job_id = job.plan, str(job.handle.job_id)
        # Of one that was never started nobody has told it.
        run_dir = plan.run_dir.replace(JOB_ID_TOKEN, job_id)
        if JOB_ID_TOKEN in str(plan.config.hydra.job.id):
            frozen_config.set_job_id(plan.config, JOB_ID_TOKEN, job_id, run_dir)
        seconds = None if job.began_at is None else time.time() - job.began_at
        self._finish(plan.number, plan.config, run_dir, seconds, verdict)

    def _finish(
        self, number: int, config: DictConfig | None, run_dir: str, seconds: float | None, verdict: JobResult
    ) -> None:
        self._returns[number] = make_job_return(self._overrides[number], config, run_dir, verdict)
        self._progress.ended(number, verdict, seconds)
        if config is not None and seconds is not None:
            refresh_names(JobPaths(run_dir).folder)
            outcome.end_job(self._sweep.context.callbacks, run_dir, config, self._returns[number])


def _not_submitted(error: Exception) -> JobResult:
    if isinstance(error, LauncherError):
        return results.failed_before_start(error)
    return results.failed_before_start(StartError(f"The job could not be submitted: {type(error).__name__}: {error}"))


_JOB_ID = "<job id>"


def show_submission(
    sweep: Sweep, footprint: DirSnapshot, job_overrides: list[list[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Print what would be submitted of one batch of jobs, and take back what the sweeper has written.

    Args:
        sweep: What `prepare_sweep` returned.
        footprint: What was there before.
        job_overrides: One list of override strings a job.
        initial_job_idx: Number of the first job.

    Returns:
        One JobReturn a job, in order: completed with None, or failed where the job could not be submitted.

    Raises:
        SystemExit: with 0, where the sweeper would go on from values that there are not.
    """
    cluster = sweep.cluster
    assert cluster is not None
    lines, returns, submitted, text = [], [], 0, ""
    try:
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            shown_lines, job_return, is_submitted = _show(sweep, number, overrides)
            lines += shown_lines
            returns.append(job_return)
            submitted += is_submitted
        if submitted and cluster.executor == "slurm":
            text = submitit_api.sbatch_text(cluster, submitted)
    finally:
        footprint.restore()
    head = f"dry run: {pluralize(submitted, 'job')} for {cluster.executor}. Nothing is submitted."
    lines.insert(0, shell_comment(head))
    if text:
        lines += [shell_comment("The file that submitit would hand to sbatch:"), *text.splitlines()]
    print_dry_run(sweep, lines)
    return returns


def _show(sweep: Sweep, number: int, overrides: list[str]) -> tuple[list[str], JobReturn, bool]:
    """Return the lines about one job, its JobReturn, and whether it would be submitted."""
    name = f"job {number}: {override_line(overrides)}"
    try:
        plan = compose_and_plan(sweep, number, overrides)
        if sweep.earlier is not None:
            decision = sweep.earlier.decide(plan.known, plan.config_yaml, plan.config_hash)
            if decision.verdict is not None:
                line = shell_comment(f"{name}: is not run: {decision.why}")
                return [line], make_job_return(plan.overrides, plan.config, plan.run_dir, decision.verdict), False
        lines = _job_lines(sweep, plan)
    except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
        verdict = results.failed_before_start(error)
        line = shell_comment(f"{name}: cannot start: {verdict.cause}")
        return [line], make_job_return(overrides, None, "", verdict), False
    verdict = results.JobResult(completed=True, value=None)
    return [shell_comment(name), *lines], make_job_return(plan.overrides, plan.config, plan.run_dir, verdict), True


def _job_lines(sweep: Sweep, plan: PlannedJob) -> list[str]:
    start = describe_start(sweep, plan, plan.first_attempt, Allocation((), ReservedPort("", 0, None)), "")
    where = f" on each of {pluralize(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
    devices = f", {plan.size.devices_per_rank} devices each" if plan.size.devices_per_rank > 1 else ""
    lines = [
        f"  run directory: {plan.run_dir}",
        f"  ranks: {plan.size.nproc}{where}{devices}",
        f"  each of them runs, in {start.cwd}: {shell_words(start.argv)}",
    ]
    return [shell_comment(line.replace(JOB_ID_TOKEN, _JOB_ID)) for line in lines]
