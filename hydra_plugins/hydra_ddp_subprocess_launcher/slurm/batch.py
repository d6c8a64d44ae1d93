"""The jobs of one batch on a cluster: submitted, watched through the files that their nodes write, and collected."""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ..common.choices import OnInterrupt
from ..common.errors import LauncherError, StartError
from ..common.files import JobPaths
from ..common.protocol import JOB_ID_TOKEN
from ..common.quoting import shell_comment, shell_words
from ..common.signals import STOP_SIGNALS, RecordedSignals, Shutdown, ShutdownController, recorded_signals
from ..common.text import pluralize
from ..display.logs import LOOK_INTERVAL_S
from ..display.tables import Summary, override_line
from ..job.frozen_config import ConfigCache, set_job_id
from ..job.outcome import end_job
from ..job.plan import JobPlanner, PlannedJob, refuse_shared_run_dir
from ..job.results import JobResult, failed_before_start, make_job_return
from ..job.settings import SweepContext
from ..launcher.batch import HEARD_SIGNALS, FailureLimit
from ..launcher.dry_run import DirSnapshot, ShownJob, print_dry_run, shown_decision, shown_failure, shown_job
from ..launcher.progress import Progress
from ..launcher.resume import PreviousRuns, SweepState, open_sweep_dir, read_sweep_dir
from ..launcher.sweep import (
    Sweep,
    launcher_options,
    make_context,
    make_summary,
    make_sweep_dir,
    show_at_the_end,
    take_snapshot,
    watch_sources,
)
from ..supervisor.heartbeat import refresh_names
from . import submitit_api
from .jobs import NO_ALLOCATION, ClusterJob, ClusterSubmissions, JobSubmitter, SlurmPoller, adopt, listed, name_left_out
from .submitit_api import Cluster, read_cluster

_log = logging.getLogger(__name__)
# Seconds between two looks at the files of all jobs, at least and for each of them, as a file server has other users.
_FILES_INTERVAL_S = 0.5
_FILES_INTERVAL_PER_JOB_S = 0.02
# Seconds for jobs to end that a signal has cancelled: SLURM's KillWait is 30, where nobody has changed it.
_CANCELLED_S = 90.0


class SubmittedBatch:
    """Run the jobs of one `launch()` call on a cluster.

    Args:
        cluster: What jobs ask of submitit.
        overrides: Override strings of each job, by its number, in order.
        progress: Records and shows what happens.
        previous: What earlier runs of the sweep have done.
    """

    def __init__(
        self,
        context: SweepContext,
        cluster: Cluster,
        overrides: Mapping[int, Sequence[str]],
        planner: JobPlanner,
        submitter: JobSubmitter,
        progress: Progress,
        previous: PreviousRuns,
    ) -> None:
        self._context = context
        self._cluster = cluster
        self._overrides = overrides
        self._planner = planner
        self._submitter = submitter
        self._progress = progress
        self._previous = previous
        self._returns: dict[int, JobReturn] = {}
        self._waiting: list[PlannedJob] = []
        self._jobs: dict[int, ClusterJob] = {}
        self._shutdown = ShutdownController()
        self._limit = FailureLimit(context.settings)
        self._poller = SlurmPoller(cluster)
        self._looked_at = 0.0

    def run(self) -> list[JobReturn]:
        """Run all jobs and return one JobReturn a job, in order.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the jobs are cancelled or left (`on_interrupt`).
            SystemExit: after SIGTERM or SIGHUP, likewise, unless a handler that was there before decides otherwise.
        """
        with self._progress.shown():
            with recorded_signals(HEARD_SIGNALS, impatient=True) as arrived, selectors.DefaultSelector() as selector:
                selector.register(arrived.wakeup, selectors.EVENT_READ)
                try:
                    self._run_all(arrived, selector)
                except BaseException as error:
                    self._poller.leave_for(error, self._jobs.values())
                    raise
            self._progress.finish()
        self._shutdown.leave_if_stopped()
        return [self._returns[number] for number in self._overrides]

    def _run_all(self, arrived: RecordedSignals, selector: selectors.BaseSelector) -> None:
        for number in self._overrides:
            self._plan(number)
            if self._obey(arrived.take()):
                break
        if self._context.has_one_batch:
            name_left_out(self._previous)
        while self._waiting or self._jobs:
            self._submit()
            self._look()
            selector.select(self._progress.due_s(LOOK_INTERVAL_S if self._tees else _FILES_INTERVAL_S))
            self._obey(arrived.take())
            if self._shutdown.stopped and self._cluster.on_interrupt is OnInterrupt.leave:
                break

    @property
    def _tees(self) -> bool:
        return any(job.tees for job in self._jobs.values())

    # Submitting

    def _plan(self, number: int) -> None:
        overrides = self._overrides[number]
        try:
            plan = self._planner.compose_and_plan(number, overrides)
            self._refuse_shared_directory(plan)
            waits = not self._adopt(plan) and not self._settle(plan)
        except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
            self._finish(number, None, "", None, failed_before_start(error))
            return
        if waits:
            self._waiting.append(plan)

    def _refuse_shared_directory(self, plan: PlannedJob) -> None:
        # If it depends on the id of the job, each job has its own.
        if JOB_ID_TOKEN not in plan.run_dir:
            others = (*self._waiting, *(job.plan for job in self._jobs.values()))
            refuse_shared_run_dir(plan.run_dir, ((other.number, other.run_dir) for other in others))

    def _settle(self, plan: PlannedJob) -> bool:
        """Deal with a job that an earlier run of the sweep has done; return whether it is one."""
        decision = self._previous.decide(plan.known, plan.config_yaml, plan.config_hash)
        if decision is None:
            return False
        self._progress.decided(plan, decision)
        if decision.result is not None:
            self._finish(plan.number, plan.config, plan.run_dir, None, decision.result)
        return decision.result is not None

    def _adopt(self, plan: PlannedJob) -> bool:
        """Wait for a job that an earlier launching process has left on the cluster; return whether it is one."""
        lost = self._previous.lost(plan.number, plan.overrides, self._context.task)
        job = adopt(self._cluster, plan, lost)
        if job is not None:
            self._track(job)
        return job is not None

    def _track(self, job: ClusterJob) -> None:
        self._jobs[job.plan.number] = job
        self._progress.submitted(job.plan, job.handle.job_id, job.folder.path, self._cluster.executor)

    def _submit(self) -> None:
        """Submit what waits, as far as more may be submitted."""
        room = len(self._waiting)
        if self._cluster.max_parallel_jobs is not None:
            room = min(room, self._cluster.max_parallel_jobs - len(self._jobs))
        if room <= 0 or self._shutdown.stopped:
            return
        plans, self._waiting = self._waiting[:room], self._waiting[room:]
        try:
            jobs = self._submitter.submit(plans)
        except Exception as error:  # noqa: BLE001  (submitit, and what it calls, raise many things)
            for plan in plans:
                self._finish(plan.number, plan.config, plan.run_dir, None, _not_submitted(error))
            return
        for job in jobs:
            self._track(job)
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
        if self._jobs and self._poller.is_due(now):
            self._ask(now)
        self._check_failures()

    def _look_at_files(self, job: ClusterJob) -> None:
        if job.take_last_start():
            assert job.spec is not None
            self._progress.show(job.tees, last=True)
            attempt = replace(job.plan.first_attempt, number=job.spec.attempt)
            self._progress.started(job.plan, attempt, NO_ALLOCATION, job.spec.run_id, job.spec.hosts)
            job.tees = self._progress.tees(job.plan, JobPaths(job.spec.run_dir))
        end = job.folder.read_end()
        if end is not None:
            self._end(job, job.told_end(end, self._context.settings.check_config))

    def _ask(self, now: float) -> None:
        """Ask the cluster for the states of all jobs, and end those that it has ended without a word of their nodes."""
        news = self._poller.ask(list(self._jobs.values()), now)
        for job in news.waiting_again:
            _log.info("#%d : waits to run again (%s)", job.plan.number, job.state)
            self._track(job)
        for job in news.lost:
            self._end(job, job.ended_from_outside(self._cluster.executor, self._context.settings.check_config))
        for job in news.given_up:
            # Nothing is noted of its end, so that a resumed sweep looks for it.
            number, job_id = job.plan.number, job.handle.job_id
            _log.error("#%d : may still be on the cluster. Cancel it: scancel %s", number, job_id)
            del self._jobs[number]

    # Ending

    def _obey(self, arrived: list[int]) -> bool:
        """Do what signals ask for; return whether the batch is stopped."""
        for number in arrived:
            if number not in STOP_SIGNALS:
                self._progress.resumed()
                continue
            order = self._shutdown.receive(number, time.monotonic())
            if order is Shutdown.STOP:
                self._stop()
            elif order is Shutdown.KILL:
                # Once more: no job is waited for.
                self._jobs.clear()
        return self._shutdown.stopped

    def _stop(self) -> None:
        name = self._shutdown.name
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
        self._poller.cancel(jobs, why, now, now + _CANCELLED_S if self._shutdown.stopped else math.inf)

    def _check_failures(self) -> None:
        failures = self._progress.failures
        if not self._limit.check(failures):
            return
        skipped = self._limit.skip(failures)
        for plan in self._waiting:
            self._finish(plan.number, plan.config, plan.run_dir, None, skipped)
        self._waiting.clear()
        stopped = [job for job in self._jobs.values() if job.spec is None or self._limit.stops_running]
        self._cancel(stopped, skipped.cause)

    def _end(self, job: ClusterJob, result: JobResult) -> None:
        self._progress.show(job.tees, last=True)
        del self._jobs[job.plan.number]
        submitit_api.reap_controller(job.handle)
        plan, job_id = job.plan, str(job.handle.job_id)
        # Of one that was never started nobody has told it.
        run_dir = plan.run_dir.replace(JOB_ID_TOKEN, job_id)
        if JOB_ID_TOKEN in str(plan.config.hydra.job.id):
            set_job_id(plan.config, JOB_ID_TOKEN, job_id, run_dir)
        seconds = None if job.began_at is None else time.time() - job.began_at
        self._finish(plan.number, plan.config, run_dir, seconds, result)

    def _finish(
        self, number: int, config: DictConfig | None, run_dir: str, seconds: float | None, result: JobResult
    ) -> None:
        self._returns[number] = make_job_return(self._overrides[number], config, run_dir, result)
        self._progress.ended(number, result, seconds)
        if config is not None and seconds is not None:
            refresh_names(JobPaths(run_dir).folder)
            end_job(self._context.hydra_context.callbacks, run_dir, config, self._returns[number])


def _not_submitted(error: Exception) -> JobResult:
    if isinstance(error, LauncherError):
        return failed_before_start(error)
    return failed_before_start(StartError(f"The job could not be submitted: {type(error).__name__}: {error}"))


_JOB_ID = "<job id>"


class DrySubmission:
    """Show what would be submitted of a sweep, without submitting or leaving anything.

    Args:
        cluster: What jobs ask of submitit.
        previous: What earlier runs of the sweep have done.
        snapshot: What was there before the sweeper wrote.
    """

    def __init__(
        self,
        context: SweepContext,
        cluster: Cluster,
        planner: JobPlanner,
        previous: PreviousRuns,
        snapshot: DirSnapshot,
    ) -> None:
        self._context = context
        self._cluster = cluster
        self._planner = planner
        self._previous = previous
        self._snapshot = snapshot

    def run_batch(self, overrides: Mapping[int, Sequence[str]]) -> list[JobReturn]:
        """Print what would be submitted of one batch of jobs, and take back what the sweeper has written.

        Returns:
            One JobReturn a job, in order: completed with None, or failed if the job could not be submitted.

        Raises:
            SystemExit: with 0, if the sweeper would go on from values that there are not.
        """
        cluster = self._cluster
        jobs, submitted, text = [], 0, ""
        try:
            for number, own in overrides.items():
                job, is_submitted = self._show(number, own)
                jobs.append(job)
                submitted += is_submitted
            if submitted and cluster.executor == "slurm":
                text = submitit_api.sbatch_text(cluster, submitted)
        finally:
            self._snapshot.restore()
        head = f"dry run: {pluralize(submitted, 'job')} for {cluster.executor}. Nothing is submitted."
        lines = [shell_comment(head), *(line for job in jobs for line in job.lines)]
        if text:
            lines += [shell_comment("The file that submitit would hand to sbatch:"), *text.splitlines()]
        print_dry_run(self._context, lines)
        return [job.job_return for job in jobs]

    def _show(self, number: int, overrides: Sequence[str]) -> tuple[ShownJob, bool]:
        """Return what is shown of one job, and whether it would be submitted."""
        try:
            plan = self._planner.compose_and_plan(number, overrides)
            decided = shown_decision(plan, self._previous)
            if decided is not None:
                return decided, False
            name = f"job {number}: {override_line(overrides)}"
            return shown_job(plan, [shell_comment(name), *self._job_lines(plan)]), True
        except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
            return shown_failure(number, overrides, error), False

    def _job_lines(self, plan: PlannedJob) -> list[str]:
        where = f" on each of {pluralize(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
        devices = f", {plan.size.devices_per_rank} devices each" if plan.size.devices_per_rank > 1 else ""
        lines = [
            f"  run directory: {plan.run_dir}",
            f"  ranks: {plan.size.nproc}{where}{devices}",
            f"  each of them runs, in {plan.cwd}: {shell_words(plan.argv)}",
        ]
        return [shell_comment(line.replace(JOB_ID_TOKEN, _JOB_ID)) for line in lines]


class SubmittingRunner:
    """Run the jobs of a sweep on a cluster.

    Args:
        cluster: What jobs ask of submitit.
        state: Record of the sweep.
        summary: What is shown at the end of the sweep.
    """

    def __init__(
        self,
        context: SweepContext,
        cluster: Cluster,
        executor: Any,
        state: SweepState,
        planner: JobPlanner,
        summary: Summary,
    ) -> None:
        self._context = context
        self._cluster = cluster
        self._executor = executor
        self._state = state
        self._planner = planner
        self._summary = summary
        self._sources = watch_sources(context)
        show_at_the_end(self, context, summary, state.recorder)

    def run_batch(self, overrides: Mapping[int, Sequence[str]]) -> list[JobReturn]:
        """Run jobs and return one JobReturn a job, in order, whatever failed.

        Args:
            overrides: Override strings of each job, by its number, in order.
        """
        make_sweep_dir(self._context.config)
        cluster, recorder = self._cluster, self._state.recorder
        at_once = cluster.max_parallel_jobs or cluster.queue.get("array_parallelism") or len(overrides)
        progress = Progress(self._context, recorder, self._summary, overrides, min(int(at_once), len(overrides)))
        submitter = JobSubmitter(self._context, cluster, self._executor, recorder, self._sources)
        return SubmittedBatch(
            self._context, cluster, overrides, self._planner, submitter, progress, self._state.previous
        ).run()


def open_submitted_sweep(
    hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig, executor: str
) -> Sweep:
    """Check all that can be checked before a job is known, and choose how the jobs of a sweep are submitted.

    Args:
        executor: Submitit's name of the cluster: `slurm` or `local`.

    Raises:
        LauncherError: for what the user can fix.
    """
    settings, cluster = read_cluster(launcher_options(config), executor)
    context = make_context(hydra_context, task_function, config, settings)
    submissions = ClusterSubmissions(executor)
    loader = hydra_context.config_loader

    def planner(cache: ConfigCache, previous: PreviousRuns) -> JobPlanner:
        return JobPlanner(context, cache, cluster, previous, JOB_ID_TOKEN, keep_configs=False)

    if settings.dry_run:
        snapshot = take_snapshot(context)
        previous = read_sweep_dir(context.paths, settings, submissions).previous
        cache = ConfigCache(loader, snapshot.restore)
        return Sweep(context, cache, DrySubmission(context, cluster, planner(cache, previous), previous, snapshot))
    # What submitit refuses, it refuses for all jobs.
    submitits = submitit_api.make_executor(cluster)
    state = open_sweep_dir(context.paths, settings, submissions)
    cache = ConfigCache(loader)
    summary = make_summary(context, nnodes=1)
    runner = SubmittingRunner(context, cluster, submitits, state, planner(cache, state.previous), summary)
    return Sweep(context, cache, runner)
