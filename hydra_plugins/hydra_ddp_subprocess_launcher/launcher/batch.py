"""The event loop over one batch of jobs, in the launching process's main thread."""

from __future__ import annotations

import logging
import selectors
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hydra.core.utils import JobReturn

from ..common import protocol, signals
from ..common.choices import OnConfigDifference
from ..common.errors import JobFailedError, LauncherError, StartError
from ..common.protocol import GroupReport, GroupSpec, StopReason
from ..common.signals import leave
from ..common.text import encodable, pluralize
from ..display.logs import LOOK_INTERVAL_S
from ..groups.rendezvous import JobEnd, tell_for_keeper
from ..groups.running_job import LEFT, JobMonitor, RunningJob, who_is_left
from ..groups.spawners import SpawnerLink
from ..job import environment, outcome, results
from ..job.frozen_config import sweep_env_set
from ..job.plan import Allocation, Attempt, JobStart, PlannedJob, start_error, write_job
from ..job.results import JobResult, make_job_return
from ..job.settings import Sweep
from ..resources.devices import DeviceAllocator
from ..supervisor.heartbeat import refresh_names
from .debug import DebugSession
from .job_queue import JobQueue
from .progress import Progress
from .resume import ResumeDecision

_log = logging.getLogger(__name__)
# Seconds between two looks at keepers that may have stopped answering.
_INSIST_INTERVAL_S = 1.0
# Seconds between two questions for devices that others have.
_ASK_INTERVAL_S = 0.5


class Batch:
    """Run the jobs of one `launch()` call.

    Args:
        sweep: What is the same for all of them.
        job_overrides: One list of override strings a job.
        first: Number of the first job.
        debugging: What is different when rank 0 has the terminal.
    """

    def __init__(self, sweep: Sweep, job_overrides: list[list[str]], first: int, debugging: DebugSession) -> None:
        self._sweep = sweep
        self._debugging = debugging
        self._overrides = {first + place: overrides for place, overrides in enumerate(job_overrides)}
        self._returns: dict[int, JobReturn] = {}
        self._plans: dict[int, PlannedJob] = {}
        self._restarts = PendingRestarts(sweep.gate)
        self._line = JobQueue(sweep, self._overrides, self._fail, self._settle)
        self._base = self._line.base_environment()
        self._progress = Progress(sweep, self._overrides, self._line.most_jobs)

    def run(self) -> list[JobReturn]:
        """Run all jobs and return one JobReturn a job, in order.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when every rank is gone.
            SystemExit: after SIGTERM or SIGHUP, likewise, unless a handler that was there before decides otherwise.
        """
        heard = (*HEARD, *self._debugging.signals)
        with self._progress.shown():
            with signals.recorded_signals(heard, impatient=True) as arrived:
                with selectors.DefaultSelector() as selector:
                    self._hub = JobMonitor(selector)
                    self._ending = ShutdownController(
                        self._sweep, self._debugging, self._line, self._hub.running, self._progress
                    )
                    selector.register(arrived.wakeup, selectors.EVENT_READ)
                    try:
                        self._run_all(arrived)
                    finally:
                        self._hub.close()
                        self._sweep.gate.close()
                        if self._sweep.preload is not None and self._sweep.has_one_batch:
                            self._sweep.preload.close()
                # What came while the last job was looked at, or its spawner ended, counts as well.
                self._ending.act_on(arrived.take())
            # Nothing runs any more: from here on a signal does what it would do without us, however slow the reader is.
            self._progress.finish()
        self._ending.leave_if_stopped()
        return [self._returns[number] for number in self._overrides]

    def _run_all(self, arrived: signals.RecordedSignals) -> None:
        _log.info("Launching %s, OMP_NUM_THREADS=%s", self._line.summary, self._base["OMP_NUM_THREADS"])
        if self._sweep.preload is not None:
            self._sweep.preload.begin(environment.common_environment(self._base, sweep_env_set(self._sweep.config)))
        while self._line.waiting or self._hub.running or self._restarts:
            self._ending.act_on(arrived.take())
            for number in self._ending.give_up():
                self._finish(number, None, None, self._ending.too_many_failures())
            self._start_again()
            started = self._start_next()
            self._wait(ready=started or self._line.has_work)
            self._look_at_running()
            self._line.work()
        self._wait_for_devices(arrived)

    # Starting

    def _start_next(self) -> bool:
        """Start the job whose turn it is; return whether there was one."""
        following = self._line.take_next()
        if following is None:
            return False
        plan, devices = following
        error = self._start(plan, devices, plan.first_attempt)
        if error is not None:
            self._line.job_ended(plan.number)
            self._finish(plan.number, plan, None, results.failed_before_start(error))
        return True

    def _start_again(self) -> None:
        """Start jobs once more whose devices have let go of the last start."""
        for pause in self._restarts.take_ready(all_of_them=self._ending.starts_none):
            error = None if self._ending.starts_none else self._start(pause.plan, pause.devices, pause.following)
            if error is not None:
                # What it failed of before says more than that.
                _log.error("#%d : cannot be started again: %s", pause.plan.number, encodable(str(error)))
            if error is not None or self._ending.starts_none:
                self._end_for_good(pause.plan, pause.following, pause.verdict)

    def _settle(self, plan: PlannedJob, decision: ResumeDecision | None) -> bool:
        """Deal with a job that is not to be run; return whether it is one."""
        verdict = None
        if decision is not None:
            self._progress.decided(plan, decision)
            verdict = decision.verdict
        if verdict is None and self._ending.gave_up:
            verdict = self._ending.too_many_failures()
        if verdict is not None:
            self._finish(plan.number, plan, None, verdict)
        return verdict is not None

    def _fail(self, number: int, error: Exception) -> None:
        self._finish(number, None, None, results.failed_before_start(error))

    def _start(self, plan: PlannedJob, devices: tuple[str, ...], attempt: Attempt) -> Exception | None:
        """Start a job on its devices; return why it could not be."""
        port = start = None
        try:
            self._hub.refuse_shared_directory(plan.run_dir, self._restarts)
            self._sweep.sources.check(self._sweep.settings.code_changed, bool(self._sweep.settings.preload))
            port = self._sweep.reserve_port()
            place = Allocation(devices, port)
            start, spec = write_job(self._sweep, plan, attempt, place, self._line.environment_of(plan))
            self._tell_nodes(start)
            held = (*self._sweep.held, *self._sweep.gate.descriptors(devices), *self._debugging.descriptors)
            spec, preloader = self._preloader(plan.number, spec)
            link, channel = self._hub.ask_for_keeper(plan.number, held, preloader)
        except (LauncherError, OSError, ValueError) as error:
            if port is not None:
                port.release()
            if start is not None:
                why = f"on the first node no keeper could be started: {error}"
                tell_for_keeper(start, 0, GroupReport((), StopReason.START_FAILED, None, why))
            return start_error(error, plan)
        channel.send(spec)
        self._plans[plan.number] = plan
        self._hub.add(RunningJob(start, place, attempt, link, channel, self._progress.tees(plan, start.paths)))
        self._progress.started(plan, attempt, place, start.run_id)
        return None

    def _preloader(self, number: int, spec: GroupSpec) -> tuple[GroupSpec, SpawnerLink | None]:
        """Return what a job's keeper needs, and the preloader that shall fork it."""
        preload = self._sweep.preload
        if preload is None:
            return spec, None
        spec = preload.admit(number, spec)
        return spec, None if spec.program_at is None else preload.link()

    def _tell_nodes(self, start: JobStart) -> None:
        """Let the other nodes of the job start it, too."""
        gathering = self._sweep.gathering
        if gathering is None:
            return
        if gone := gathering.look():
            raise StartError(f"It runs on {pluralize(start.group.nnodes, 'node')}, but {gone}.")
        gathering.publish_start(start)

    # Watching

    def _wait(self, *, ready: bool) -> None:
        """Wait for something to happen, if nothing can be done now."""
        timeout = 0.0
        if not ready and self._looks_are_due():
            timeout = LOOK_INTERVAL_S
        elif not ready and (self._line.blocked or self._restarts):
            timeout = _ASK_INTERVAL_S
        elif not ready and self._hub.running:
            timeout = _INSIST_INTERVAL_S
        self._hub.wait(self._progress.due_s(timeout))

    def _looks_are_due(self) -> bool:
        comparing = self._sweep.settings.check_config is not None
        return any(job.tees or (comparing and not job.compared) for job in self._hub.running.values())

    def _look_at_running(self) -> None:
        self._progress.begin_round()
        gone = self._sweep.gathering.look() if self._sweep.gathering is not None else ""
        for job in list(self._hub.running.values()):
            over = job.over
            self._progress.show(job.tees, last=over)
            self._compare_configs(job)
            if gone and job.end_by is None:
                job.stop(gone)
            if not over:
                job.check_stuck(time.monotonic())
            if over:
                self._end(job)

    def _compare_configs(self, job: RunningJob) -> None:
        rule = self._sweep.settings.check_config
        if rule is None or not job.compare_configs():
            return
        _log.warning("#%d : %s", job.start.number, job.difference)
        if rule is OnConfigDifference.error:
            job.stop(f"{job.difference} (check_config=error)")

    def _wait_for_devices(self, arrived: signals.RecordedSignals) -> None:
        """Leave no device to others that still holds what a job of ours left on it."""
        if not self._sweep.gate.settled and not self._ending.stopped:
            _log.info("Waiting until the processes of the last jobs are off their devices")
        while not self._sweep.gate.settled and not self._ending.stopped:
            self._hub.wait(LOOK_INTERVAL_S)
            self._ending.act_on(arrived.take())

    # Ending

    def _end(self, job: RunningJob) -> None:
        self._debugging.restore_terminal()
        left = job.end_leftovers()
        if job.left:
            _log.warning(LEFT, job.start.number, who_is_left(left))
        self._hub.remove(job)
        tell_for_keeper(job.start, 0, job.report)
        if self._sweep.gathering is not None:
            self._sweep.gathering.learn(job.report)
        if job.start.meeting:
            # What the ranks on other nodes wrote.
            refresh_names(job.start.paths.folder)
        self._compare_configs(job)
        plan = self._plans.pop(job.start.number)
        if job.begun:
            verdict = results.resolve_result_safely(job.report, job.start, job.keeper_code)
        else:
            verdict = results.not_begun(job.link.ending)
        again = None
        if not self._ending.starts_none:
            again = job.next_attempt(verdict.completed, own_port=self._sweep.settings.master_port is None)
        if job.difference and self._sweep.settings.check_config is OnConfigDifference.error:
            # The ranks may have been done before the difference was seen. To start again would not mend it.
            verdict = results.failed_before_start(JobFailedError(f"{job.difference} (check_config=error)"))
            again = None
        if again is None:
            self._end_for_good(plan, job.attempt, verdict)
            return
        self._progress.paused(plan, again.why, verdict)
        self._line.pause(plan.number)
        if self._restarts.add(PendingRestart(plan, job.place.devices, again, verdict)):
            _log.info("#%d : waits until its devices are free for its next start", plan.number)

    def _end_for_good(self, plan: PlannedJob, attempt: Attempt, verdict: JobResult) -> None:
        self._line.job_ended(plan.number)
        self._finish(plan.number, plan, time.monotonic() - attempt.since, verdict)

    def _finish(self, number: int, plan: PlannedJob | None, seconds: float | None, verdict: JobResult) -> None:
        if plan is None:
            self._returns[number] = make_job_return(self._overrides[number], None, "", verdict)
        else:
            self._returns[number] = make_job_return(plan.overrides, plan.config, plan.run_dir, verdict, plan.kept)
        if self._sweep.gathering is not None:
            self._sweep.gathering.publish_end(number, JobEnd(verdict.completed, verdict.cause))
        self._progress.ended(number, verdict, seconds)
        if plan is not None and seconds is not None:
            outcome.end_job(self._sweep.context.callbacks, plan.run_dir, plan.config, self._returns[number])


@dataclass(frozen=True)
class PendingRestart:
    """A job that is to be started once more.

    Attributes:
        plan: The job.
        devices: Which it keeps.
        following: The start that follows.
        verdict: How the last one ended.
    """

    plan: PlannedJob
    devices: tuple[str, ...]
    following: Attempt
    verdict: JobResult


class PendingRestarts:
    """The jobs of a batch that are between two starts.

    Args:
        gate: Tells when their devices are free of the last start.
    """

    def __init__(self, gate: DeviceAllocator) -> None:
        self._gate = gate
        self._pauses: list[PendingRestart] = []

    def __bool__(self) -> bool:
        return bool(self._pauses)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter([(pause.plan.number, pause.plan.run_dir) for pause in self._pauses])

    def add(self, pause: PendingRestart) -> bool:
        """Let a job wait; return whether it has to, as its devices are not free yet."""
        self._pauses.append(pause)
        return not self._gate.ready(pause.devices)

    def take_ready(self, *, all_of_them: bool) -> list[PendingRestart]:
        """Return, and let go of, the jobs that can be started.

        Args:
            all_of_them: Also those that cannot, as no job shall start any more.
        """
        ready = [pause for pause in self._pauses if all_of_them or self._gate.ready(pause.devices)]
        self._pauses = [pause for pause in self._pauses if pause not in ready]
        return ready


# What a batch listens to; to SIGCONT, as a shell may have written onto the board while this process was stopped.
HEARD = (*signals.STOP_SIGNALS, *signals.FORWARDED_SIGNALS, *signals.CONTINUED)


class ShutdownController:
    """Decide whether a batch ends early, and end its jobs.

    Args:
        sweep: The sweep.
        debugging: Knows which signals are for rank 0 alone.
        line: Jobs that wait.
        running: Jobs that have a keeper, by number.
        progress: Shows the batch.

    Attributes:
        gave_up: Whether too many jobs have failed.
    """

    def __init__(
        self,
        sweep: Sweep,
        debugging: DebugSession,
        line: JobQueue,
        running: Mapping[int, RunningJob],
        progress: Progress,
    ) -> None:
        self._sweep = sweep
        self._debugging = debugging
        self._line = line
        self._running = running
        self._progress = progress
        self._stopped_by: int | None = None
        self._stopped_at = 0.0
        self.gave_up = False

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the batch."""
        return self._stopped_by is not None

    @property
    def starts_none(self) -> bool:
        """Whether no job shall be started any more, not even once more."""
        return self.stopped or (self.gave_up and self._sweep.settings.stop_running)

    # Signals

    def act_on(self, arrived: list[int]) -> None:
        """Do what signals ask for, in order."""
        for number in arrived:
            rank = self._debugging.receiver(number, time.monotonic()) if self._running else None
            if rank is not None or number in signals.FORWARDED_SIGNALS:
                for job in self._running.values():
                    job.channel.send(protocol.Forward(number, rank))
            elif number in signals.STOP_SIGNALS:
                self._stop(number)
            else:
                self._progress.resumed()

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        again = self._stopped_by is not None
        if self._stopped_by is None:
            self._stopped_by, self._stopped_at = number, now
            self._progress.stopped(signal.Signals(number).name)
        elif now - self._stopped_at < signals.ONE_ORDER_S:
            return
        self._line.clear()
        if self._running:
            how = "killing" if again else "stopping"
            hint = "" if again else " (once more: kill at once)"
            running = pluralize(len(self._running), "running job")
            _log.warning("%s: %s %s%s", signal.Signals(number).name, how, running, hint)
        for job in self._running.values():
            job.stop(signal.Signals(number).name, at_once=again)

    def leave_if_stopped(self) -> None:
        """End this process as the signal asks that has stopped the batch, if one has.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM or SIGHUP, unless a handler that was there before decides otherwise.
        """
        if self._stopped_by is not None:
            leave(self._stopped_by)

    # Failures

    def give_up(self) -> list[int]:
        """End the batch once too many jobs have failed (`max_failures`); return who is sent out of the line by that."""
        settings, failures = self._sweep.settings, self._sweep.ledger.failures
        if settings.max_failures is None or failures < settings.max_failures or self.gave_up:
            return []
        self.gave_up = True
        count, most = pluralize(failures, "job"), settings.max_failures
        _log.error("%s failed (max_failures=%d): no more jobs are started", count, most)
        if settings.stop_running:
            for job in self._running.values():
                job.stop(f"max_failures={settings.max_failures} was reached")
        # Of a sweep that is resumed, those that wait may be done: that shows when they are composed.
        return self._line.clear() if self._sweep.earlier is None else self._line.discard_ready()

    def too_many_failures(self) -> JobResult:
        """Return how a job ends that was not started any more."""
        said = pluralize(self._sweep.ledger.failures, "job")
        return results.skipped(f"{said} failed before it (max_failures={self._sweep.settings.max_failures})")
