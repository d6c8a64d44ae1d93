"""The event loop that runs one batch of jobs, in the main thread of the launching process."""

from __future__ import annotations

import logging
import selectors
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.utils import JobReturn

from ..common.choices import OnConfigDifference
from ..common.errors import JobFailedError, LauncherError
from ..common.files import JobPaths
from ..common.protocol import Forward, GroupReport, JobEnd, LaunchSpec, StopReason
from ..common.signals import (
    CONTINUED,
    FORWARDED_SIGNALS,
    STOP_SIGNALS,
    RecordedSignals,
    Shutdown,
    ShutdownController,
    recorded_signals,
)
from ..common.text import encodable, pluralize
from ..display.logs import LOOK_INTERVAL_S
from ..groups.rendezvous import Rendezvous, report_for_keeper
from ..groups.running_job import LEFTOVERS_MESSAGE, JobMonitor, RunningJob, name_leftovers
from ..groups.spawners import ForkServer
from ..job.environment import common_environment
from ..job.frozen_config import sweep_env_set
from ..job.outcome import end_job
from ..job.plan import (
    Allocation,
    Attempt,
    PlannedJob,
    build_group_spec,
    build_launch_spec,
    refuse_shared_run_dir,
    start_error,
    write_job_files,
)
from ..job.program import SourceWatch
from ..job.results import JobResult, failed_before_start, make_job_return, not_begun, resolve_result_safely, skipped
from ..job.settings import LaunchSettings, SweepContext
from ..resources.devices import DeviceAllocator
from ..resources.port import ReservedPort, reserve_port, reserve_port_for_nodes
from ..supervisor.heartbeat import refresh_names
from .debug import DebugSession
from .job_queue import JobQueue
from .progress import Progress
from .resume import PreviousRuns

_log = logging.getLogger(__name__)
# Seconds between two checks for keepers that no longer answer.
_CHECK_INTERVAL_S = 1.0
# Seconds between two attempts to get devices that other processes use.
_ASK_INTERVAL_S = 0.5
# Signals that a batch handles. SIGCONT is one, as a shell may have written over the board while this process was
# stopped.
HEARD_SIGNALS = (*STOP_SIGNALS, *FORWARDED_SIGNALS, *CONTINUED)


def reserve_job_port(settings: LaunchSettings) -> ReservedPort:
    """Reserve a port on this machine for one start of a job.

    Raises:
        StartError: if no port can be used.
    """
    if settings.nnodes == 1:
        return reserve_port(settings.master_addr, settings.master_port)
    assert settings.master_addr is not None
    return reserve_port_for_nodes(settings.master_addr, settings.master_port)


class FailureLimit:
    """Apply the option `max_failures`.

    Args:
        settings: Options of the sweep.

    Attributes:
        is_reached: Whether so many jobs have failed that no more are started.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._most = settings.max_failures
        self.is_reached = False
        self.stops_running = settings.stop_running

    def check(self, failures: int) -> bool:
        """Return whether the limit has just been reached; True only once.

        Args:
            failures: Number of failed jobs in this run of the sweep.
        """
        if self.is_reached or self._most is None or failures < self._most:
            return False
        self.is_reached = True
        _log.error("%s failed (max_failures=%d): no more jobs are started", pluralize(failures, "job"), self._most)
        return True

    @property
    def reason(self) -> str:
        """Why running jobs are stopped."""
        return f"max_failures={self._most} was reached"

    def skip(self, failures: int) -> JobResult:
        """Return the result of a job that is not started because of the limit."""
        return skipped(f"{pluralize(failures, 'job')} failed before it (max_failures={self._most})")


@dataclass(frozen=True)
class PendingRestart:
    """A job between two starts. It keeps its devices and waits until the last start has released them.

    Attributes:
        plan: The job.
        devices: Ids of the devices that it keeps.
        following: The next start.
        result: Result of the last start.
    """

    plan: PlannedJob
    devices: tuple[str, ...]
    following: Attempt
    result: JobResult


class PendingRestarts:
    """Hold the jobs of a batch that are between two starts.

    Args:
        allocator: Reports when their devices are free of the last start.
    """

    def __init__(self, allocator: DeviceAllocator) -> None:
        self._allocator = allocator
        self._pending: list[PendingRestart] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __iter__(self) -> Iterator[PendingRestart]:
        return iter(self._pending)

    def add(self, restart: PendingRestart) -> bool:
        """Add a job, and return whether it must wait because its devices are not free yet."""
        self._pending.append(restart)
        return not self._allocator.ready(restart.devices)

    def take_ready(self) -> list[PendingRestart]:
        """Remove and return the jobs that can be started."""
        ready = [restart for restart in self._pending if self._allocator.ready(restart.devices)]
        self._pending = [restart for restart in self._pending if restart not in ready]
        return ready

    def clear(self) -> list[PendingRestart]:
        """Remove and return all jobs."""
        pending, self._pending = self._pending, []
        return pending


class JobStarter:
    """Start jobs on this machine.

    Args:
        allocator: Holds the locks on the devices.
        rendezvous: The other nodes of the sweep.
        held: Descriptors that keepers hold until their job is over, in addition to the device locks.
        terminal: Stdin, stdout and stderr for rank 0. If empty, rank 0 uses its log.
    """

    def __init__(
        self,
        context: SweepContext,
        allocator: DeviceAllocator,
        rendezvous: Rendezvous,
        sources: SourceWatch,
        held: Sequence[int],
        terminal: Sequence[int],
    ) -> None:
        self._context = context
        self._allocator = allocator
        self._rendezvous = rendezvous
        self._sources = sources
        self._held = held
        self._terminal = terminal

    def start(
        self,
        plan: PlannedJob,
        attempt: Attempt,
        devices: tuple[str, ...],
        base: Mapping[str, str],
        monitor: JobMonitor,
        progress: Progress,
    ) -> RunningJob | Exception:
        """Start a job on its devices. Return the error if it cannot be started.

        Args:
            attempt: Which start of the job this is.
            devices: Ids of its devices.
            base: Environment that its ranks start from.
            progress: Records and shows the start.
        """
        settings = self._context.settings
        port = spec = None
        try:
            self._sources.check(settings.code_changed, bool(settings.preload))
            port = reserve_job_port(settings)
            allocation = Allocation(devices, port, self._allocator.lock_names(devices))
            meeting = self._rendezvous.job_dir(plan.number)
            spec = build_launch_spec(plan, attempt, allocation, settings, rendezvous_dir=meeting)
            group = build_group_spec(spec, base)
            write_job_files(spec, group, plan.payload, plan.config_yaml)
            self._rendezvous.publish_start(spec)
            held = (*self._held, *self._allocator.descriptors(devices), *self._terminal)
            tees = progress.tees(plan, JobPaths(spec.run_dir))
            job = monitor.start(spec, group, allocation, attempt, held, tees)
        except (LauncherError, OSError, ValueError) as error:
            if port is not None:
                port.release()
            if spec is not None:
                self._report_start_failed(spec, error)
            return start_error(error, plan)
        progress.started(plan, attempt, allocation, spec.run_id)
        return job

    def _report_start_failed(self, spec: LaunchSpec, error: Exception) -> None:
        why = f"on the first node no keeper could be started: {error}"
        report_for_keeper(spec, 0, GroupReport((), StopReason.START_FAILED, None, why))


class Batch:
    """Run the jobs of one `launch()` call.

    Args:
        overrides: Override strings of each job, by its number, in order.
        progress: Records and shows what happens.
        previous: Jobs of earlier runs of the sweep.
        rendezvous: The other nodes of the sweep.
        fork_server: Forks ranks. If None, each rank is a new interpreter.
        debugging: The debug session, which is inactive unless rank 0 has the terminal.
    """

    def __init__(
        self,
        context: SweepContext,
        overrides: Mapping[int, Sequence[str]],
        queue: JobQueue,
        starter: JobStarter,
        allocator: DeviceAllocator,
        progress: Progress,
        previous: PreviousRuns,
        rendezvous: Rendezvous,
        fork_server: ForkServer | None,
        debugging: DebugSession,
    ) -> None:
        self._settings = context.settings
        self._callbacks = context.hydra_context.callbacks
        self._overrides = overrides
        self._queue = queue
        self._starter = starter
        self._allocator = allocator
        self._progress = progress
        self._previous = previous
        self._rendezvous = rendezvous
        self._debugging = debugging
        self._shutdown = ShutdownController()
        self._limit = FailureLimit(context.settings)
        self._restarts = PendingRestarts(allocator)
        self._plans: dict[int, PlannedJob] = {}
        self._returns: dict[int, JobReturn] = {}
        self._selector = selectors.DefaultSelector()
        self._monitor = JobMonitor(self._selector, fork_server)

    def run(self) -> list[JobReturn]:
        """Run all jobs and return one JobReturn per job, in order.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after every rank has exited.
            SystemExit: likewise on SIGTERM or SIGHUP, unless a handler installed earlier decides otherwise.
        """
        heard = (*HEARD_SIGNALS, *self._debugging.signals)
        with self._progress.shown():
            with recorded_signals(heard, impatient=True) as arrived, self._selector:
                self._selector.register(arrived.wakeup, selectors.EVENT_READ)
                try:
                    self._run_all(arrived)
                finally:
                    self._monitor.close()
                    self._allocator.close()
                # Handle signals that arrived while the last job or its spawner ended.
                self._obey(arrived.take())
            # Nothing runs any more: signals have their previous handlers, so a slow reader cannot block Ctrl-C.
            self._progress.finish()
        self._shutdown.leave_if_stopped()
        return [self._returns[number] for number in self._overrides]

    def _run_all(self, arrived: RecordedSignals) -> None:
        while self._queue.waiting or self._monitor.running or self._restarts:
            self._obey(arrived.take())
            self._check_failures()
            self._start_again()
            started = self._start_next()
            self._wait(ready=started or self._queue.can_prepare)
            self._look_at_running()
            self._prepare_next()
        self._wait_for_devices(arrived)

    @property
    def _starts_none(self) -> bool:
        """Whether no more jobs are started or restarted."""
        return self._shutdown.stopped or (self._limit.is_reached and self._limit.stops_running)

    # Before a start

    def _prepare_next(self) -> None:
        prepared = self._queue.prepare_next()
        if prepared is None:
            return
        if prepared.plan is None:
            assert prepared.error is not None
            self._finish(prepared.number, None, None, failed_before_start(prepared.error))
            return
        result = self._result_without_a_start(prepared.plan)
        if result is not None:
            self._queue.discard(prepared.number)
            self._finish(prepared.number, prepared.plan, None, result)

    def _result_without_a_start(self, plan: PlannedJob) -> JobResult | None:
        """Return the result of a job that need not be started, or None if it must be."""
        decision = self._previous.decide(plan.known, plan.config_yaml, plan.config_hash)
        if decision is not None:
            self._progress.decided(plan, decision)
            if decision.result is not None:
                return decision.result
        return self._limit.skip(self._progress.failures) if self._limit.is_reached else None

    def _check_failures(self) -> None:
        if not self._limit.check(self._progress.failures):
            return
        if self._limit.stops_running:
            for job in self._monitor.running.values():
                job.stop(self._limit.reason)
        # In a resumed sweep, waiting jobs may be done already, which is known only once they are composed.
        dropped = self._queue.discard_ready() if self._previous.resumes else self._queue.clear()
        for number in dropped:
            self._finish(number, None, None, self._limit.skip(self._progress.failures))

    # Starting

    def _start_next(self) -> bool:
        """Start the next job, and return whether there was one."""
        following = self._queue.take_next()
        if following is None:
            return False
        plan, devices = following
        error = self._start(plan, devices, plan.first_attempt)
        if error is not None:
            self._queue.job_ended(plan.number)
            self._finish(plan.number, plan, None, failed_before_start(error))
        return True

    def _start_again(self) -> None:
        """Restart the jobs whose devices are free of the last start."""
        if self._starts_none:
            for restart in self._restarts.clear():
                self._end_for_good(restart.plan, restart.following, restart.result)
        for restart in self._restarts.take_ready():
            error = self._start(restart.plan, restart.devices, restart.following)
            if error is not None:
                # Keep the result of the last start, which says more than this error.
                _log.error("#%d : cannot be started again: %s", restart.plan.number, encodable(str(error)))
                self._end_for_good(restart.plan, restart.following, restart.result)

    def _start(self, plan: PlannedJob, devices: tuple[str, ...], attempt: Attempt) -> Exception | None:
        try:
            refuse_shared_run_dir(plan.run_dir, self._run_dirs_in_use())
        except LauncherError as error:
            return error
        started = self._starter.start(
            plan, attempt, devices, self._queue.environment_of(plan), self._monitor, self._progress
        )
        if isinstance(started, Exception):
            return started
        self._plans[plan.number] = plan
        return None

    def _run_dirs_in_use(self) -> Iterable[tuple[int, str]]:
        running = ((number, job.spec.run_dir) for number, job in self._monitor.running.items())
        return (*running, *((restart.plan.number, restart.plan.run_dir) for restart in self._restarts))

    # Signals

    def _obey(self, arrived: Sequence[int]) -> None:
        """Act on signals, in order of arrival."""
        for number in arrived:
            rank = self._debugging.receiver(number, time.monotonic()) if self._monitor.running else None
            if rank is not None or number in FORWARDED_SIGNALS:
                for job in self._monitor.running.values():
                    job.channel.send(Forward(number, rank))
            elif number in STOP_SIGNALS:
                self._stop(number)
            else:
                self._progress.resumed()

    def _stop(self, number: int) -> None:
        order = self._shutdown.receive(number, time.monotonic())
        if order is Shutdown.IGNORE:
            return
        if order is Shutdown.STOP:
            self._progress.stopped(self._shutdown.name)
        self._queue.clear()
        kill = order is Shutdown.KILL
        name = signal.Signals(number).name
        if self._monitor.running:
            how, hint = ("killing", "") if kill else ("stopping", " (once more: kill at once)")
            _log.warning("%s: %s %s%s", name, how, pluralize(len(self._monitor.running), "running job"), hint)
        for job in self._monitor.running.values():
            job.stop(name, at_once=kill)

    # Watching

    def _wait(self, *, ready: bool) -> None:
        """Wait for an event, unless there is work to do now."""
        timeout = 0.0
        if not ready and self._looks_are_due():
            timeout = LOOK_INTERVAL_S
        elif not ready and (self._queue.blocked or self._restarts):
            timeout = _ASK_INTERVAL_S
        elif not ready and self._monitor.running:
            timeout = _CHECK_INTERVAL_S
        self._monitor.wait(self._progress.due_s(timeout))

    def _looks_are_due(self) -> bool:
        comparing = self._settings.check_config is not None
        return any(job.tees or (comparing and not job.compared) for job in self._monitor.running.values())

    def _look_at_running(self) -> None:
        self._progress.begin_round()
        departed = self._rendezvous.check()
        for job in list(self._monitor.running.values()):
            finished = job.finished
            self._progress.show(job.tees, last=finished)
            self._compare_configs(job)
            if departed and job.end_by is None:
                job.stop(departed)
            if finished:
                self._end(job)
            else:
                job.check_stuck(time.monotonic())

    def _compare_configs(self, job: RunningJob) -> None:
        rule = self._settings.check_config
        if rule is None or not job.compare_configs():
            return
        _log.warning("#%d : %s", job.spec.number, job.difference)
        if rule is OnConfigDifference.error:
            job.stop(f"{job.difference} (check_config=error)")

    def _wait_for_devices(self, arrived: RecordedSignals) -> None:
        """Keep the device locks until no process of the last jobs is left on the devices."""
        if not self._allocator.is_idle and not self._shutdown.stopped:
            _log.info("Waiting until the processes of the last jobs are off their devices")
        while not self._allocator.is_idle and not self._shutdown.stopped:
            self._monitor.wait(LOOK_INTERVAL_S)
            self._obey(arrived.take())

    # Ending

    def _end(self, job: RunningJob) -> None:
        self._debugging.restore_terminal()
        leftovers = job.end_leftovers()
        if job.has_leftovers:
            _log.warning(LEFTOVERS_MESSAGE, job.spec.number, name_leftovers(leftovers))
        self._monitor.remove(job)
        report_for_keeper(job.spec, 0, job.report)
        self._rendezvous.observe(job.report)
        if job.spec.rendezvous_dir:
            # Ranks on other nodes wrote files there.
            refresh_names(JobPaths(job.spec.run_dir).folder)
        self._compare_configs(job)
        plan = self._plans.pop(job.spec.number)
        if job.started:
            result = resolve_result_safely(job.report, job.spec, job.keeper_code)
        else:
            result = not_begun(job.link.ending)
        again = None
        if not self._starts_none:
            again = job.next_attempt(result.completed, own_port=self._settings.master_port is None)
        if job.difference and self._settings.check_config is OnConfigDifference.error:
            # The ranks may have finished before the difference was seen. A restart would not fix it.
            result = failed_before_start(JobFailedError(f"{job.difference} (check_config=error)"))
            again = None
        if again is None:
            self._end_for_good(plan, job.attempt, result)
            return
        self._progress.paused(plan, again.why, result)
        self._queue.pause(plan.number)
        if self._restarts.add(PendingRestart(plan, job.allocation.devices, again, result)):
            _log.info("#%d : waits until its devices are free for its next start", plan.number)

    def _end_for_good(self, plan: PlannedJob, attempt: Attempt, result: JobResult) -> None:
        self._queue.job_ended(plan.number)
        self._finish(plan.number, plan, time.monotonic() - attempt.since, result)

    def _finish(self, number: int, plan: PlannedJob | None, seconds: float | None, result: JobResult) -> None:
        if plan is None:
            self._returns[number] = make_job_return(self._overrides[number], None, "", result)
        else:
            self._returns[number] = make_job_return(plan.overrides, plan.config, plan.run_dir, result, plan.cached)
        self._rendezvous.publish_end(number, JobEnd(result.completed, result.cause))
        self._progress.ended(number, result, seconds)
        if plan is not None and seconds is not None:
            end_job(self._callbacks, plan.run_dir, plan.config, self._returns[number])


def begin_fork_server(server: ForkServer | None, context: SweepContext, base: Mapping[str, str]) -> None:
    """Start the fork server early, so that it imports while the first job is composed."""
    if server is not None:
        server.begin(common_environment(base, sweep_env_set(context.config)))
