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

from . import _callbacks, _freeze, _results, _signals, _submitit
from ._choices import OnInterrupt
from ._cluster_job import ClusterJob
from ._cluster_link import ClusterLink, listed
from ._ending import HEARD, leave
from ._errors import LauncherError, StartError
from ._files import JobPaths
from ._job_return import make_job_return
from ._logs import LOOK_INTERVAL_S
from ._peers import refresh_names
from ._plan import PlannedJob, compose_and_plan
from ._port import ReservedPort
from ._progress import Progress
from ._results import Verdict
from ._setup import Sweep
from ._specs import JOB_ID_TOKEN
from ._start import Place
from ._submitting import adopt, name_left_out, submit
from ._words import counted

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
        self._link = ClusterLink(self._cluster)
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
            with _signals.recorded_signals(HEARD, impatient=True) as arrived, selectors.DefaultSelector() as selector:
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

    def _run_all(self, arrived: _signals.RecordedSignals, selector: selectors.BaseSelector) -> None:
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
            self._finish(number, None, "", None, _results.failed_before_start(error))
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
        said = f"{counted(len(jobs), 'job')} of {counted(ranks, 'rank')}"
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
            place = Place((), ReservedPort("", 0, None))
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
            if number not in _signals.STOP_SIGNALS:
                self._progress.resumed()
            elif self._stopped_by is None:
                self._stop(number)
            elif time.monotonic() - self._stopped_at >= _signals.ONE_ORDER_S:
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
                counted(len(handles), "job"),
                listed(handles),
            )
            return
        said = f"{counted(len(handles), 'job')}: {listed(handles)}"
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
        count, most = counted(failures, "job"), settings.max_failures
        _log.error("%s failed (max_failures=%d): no more jobs are started", count, most)
        why = f"{count} failed before it (max_failures={settings.max_failures})"
        for plan in self._waiting:
            self._finish(plan.number, plan.config, plan.run_dir, None, _results.skipped(why))
        self._waiting.clear()
        self._cancel([job for job in self._jobs.values() if job.start is None or settings.stop_running], why)

    def _end(self, job: ClusterJob, verdict: Verdict) -> None:
        self._progress.show(job.tees, last=True)
        del self._jobs[job.plan.number]
        _submitit.bury(job.handle)
        plan, job_id = job.plan, str(job.handle.job_id)
        # Of one that was never started nobody has told it.
        run_dir = plan.run_dir.replace(JOB_ID_TOKEN, job_id)
        if JOB_ID_TOKEN in str(plan.config.hydra.job.id):
            _freeze.set_job_id(plan.config, JOB_ID_TOKEN, job_id, run_dir)
        seconds = None if job.began_at is None else time.time() - job.began_at
        self._finish(plan.number, plan.config, run_dir, seconds, verdict)

    def _finish(
        self, number: int, config: DictConfig | None, run_dir: str, seconds: float | None, verdict: Verdict
    ) -> None:
        self._returns[number] = make_job_return(self._overrides[number], config, run_dir, verdict)
        self._progress.ended(number, verdict, seconds)
        if config is not None and seconds is not None:
            refresh_names(JobPaths(run_dir).folder)
            _callbacks.end_job(self._sweep.context.callbacks, run_dir, config, self._returns[number])


def _not_submitted(error: Exception) -> Verdict:
    if isinstance(error, LauncherError):
        return _results.failed_before_start(error)
    return _results.failed_before_start(StartError(f"The job could not be submitted: {type(error).__name__}: {error}"))
