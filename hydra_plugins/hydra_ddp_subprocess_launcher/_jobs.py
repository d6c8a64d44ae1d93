"""The event loop over one batch of jobs, in the launching process's main thread."""

from __future__ import annotations

import logging
import selectors
import signal
import sys
import time
from dataclasses import dataclass

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from . import _keeper, _results, _signals
from ._choices import OnConfigDifference
from ._errors import JobFailedError, LauncherError
from ._hub import Hub
from ._line import Line
from ._logs import LOOK_INTERVAL_S, LogView
from ._plan import Attempt, Place, PlannedJob, start_error, write_job
from ._port import reserve_port
from ._report import JobResult, duration, override_line, results_table, shown
from ._results import Verdict
from ._running import RunningJob, make_tees
from ._setup import Sweep

_log = logging.getLogger(__name__)
# Seconds between two looks at keepers that may have stopped answering.
_INSIST_INTERVAL_S = 1.0
# Seconds between two questions for devices that others have.
_ASK_INTERVAL_S = 0.5
# Seconds within which signals are one order: service managers send SIGTERM and SIGHUP together, and a wrapper passes on
# the SIGINT that a terminal sends to all.
_ONE_ORDER_S = 0.3


@dataclass(frozen=True)
class _Again:
    """A job that is to be started once more.

    Attributes:
        plan: The job.
        devices: Which it keeps.
        attempt: The start that follows.
        verdict: How the last one ended.
    """

    plan: PlannedJob
    devices: tuple[str, ...]
    attempt: Attempt
    verdict: Verdict


class Batch:
    """Run the jobs of one `launch()` call.

    Args:
        sweep: What is the same for all of them.
        job_overrides: One list of override strings a job.
        first: Number of the first job.
    """

    def __init__(self, sweep: Sweep, job_overrides: list[list[str]], first: int) -> None:
        self._sweep = sweep
        self._overrides = {first + place: overrides for place, overrides in enumerate(job_overrides)}
        self._results: dict[int, JobResult] = {}
        self._stopped_by: int | None = None
        self._stopped_at = 0.0
        self._view = LogView(sys.stdout)
        self._again: dict[int, _Again] = {}
        self._line = Line(sweep, self._overrides, self._fail)
        self._at_once = self._line.most_jobs
        self._base = self._line.base_environment()
        _log.info("Launching %s, OMP_NUM_THREADS=%s", self._line.summary, self._base["OMP_NUM_THREADS"])

    def run(self) -> list[JobResult]:
        """Run all jobs and return one result a job, in order.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when every rank is gone.
            SystemExit: after SIGTERM or SIGHUP, likewise, unless a handler that was there before decides otherwise.
        """
        signals = (*_signals.STOP_SIGNALS, *_signals.FORWARDED_SIGNALS)
        with _signals.recorded_signals(signals, impatient=True) as arrived, selectors.DefaultSelector() as selector:
            self._hub = Hub(selector)
            selector.register(arrived.wakeup, selectors.EVENT_READ)
            try:
                while self._line.waiting or self._hub.running or self._again:
                    self._act_on(arrived.take())
                    self._start_again()
                    started = self._start_next()
                    self._wait(ready=started or self._line.has_work)
                    self._look_at_running()
                    self._line.work()
                self._wait_for_devices(arrived)
            finally:
                self._hub.close()
                self._sweep.gate.close()
            # What came while the last job was looked at, or its spawner ended, counts as well.
            self._act_on(arrived.take())
        if self._stopped_by is not None:
            self._leave(self._stopped_by)
        return [self._results[number] for number in self._overrides]

    # Signals

    def _act_on(self, arrived: list[int]) -> None:
        for number in arrived:
            if number in _signals.FORWARDED_SIGNALS:
                for job in self._hub.running.values():
                    job.channel.send(_keeper.Forward(number))
            elif number in _signals.STOP_SIGNALS:
                self._stop(number)

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        again = self._stopped_by is not None
        if self._stopped_by is None:
            self._stopped_by, self._stopped_at = number, now
        elif now - self._stopped_at < _ONE_ORDER_S:
            return
        self._line.clear()
        if self._hub.running:
            how = "killing" if again else "stopping"
            hint = "" if again else " (once more: kill at once)"
            _log.warning("%s: %s %d running jobs%s", signal.Signals(number).name, how, len(self._hub.running), hint)
        for job in self._hub.running.values():
            job.stop(signal.Signals(number).name, at_once=again)

    def _leave(self, number: int) -> None:
        unfinished = len(self._overrides) - sum(result.completed for result in self._results.values())
        name = signal.Signals(number).name
        _log.warning("Stopped by %s: %d of %d jobs did not complete", name, unfinished, len(self._overrides))
        if self._results:
            _log.info("\n%s", shown(results_table([self._results[number] for number in sorted(self._results)])))
        handler = signal.getsignal(number)
        if callable(handler):
            handler(number, None)
        raise SystemExit(128 + number)

    # Starting

    def _start_next(self) -> bool:
        """Start the job whose turn it is; return whether there was one."""
        following = self._line.take_next()
        if following is None:
            return False
        plan, devices = following
        _log.info("\t#%d : %s", plan.number, shown(override_line(plan.overrides)))
        error = self._start(plan, devices, Attempt())
        if error is not None:
            self._line.job_ended(plan.number)
            self._finish(plan.number, plan.config, plan.run_dir, None, _results.failed_before_start(error))
        return True

    def _start_again(self) -> None:
        """Start jobs once more whose devices have let go of the last start."""
        for number, again in list(self._again.items()):
            if self._stopped_by is None and not self._sweep.gate.ready(again.devices):
                continue
            del self._again[number]
            error = None if self._stopped_by is not None else self._start(again.plan, again.devices, again.attempt)
            if error is not None:
                # What it failed of before says more than that.
                _log.error("#%d : cannot be started again: %s", number, shown(str(error)))
            if error is not None or self._stopped_by is not None:
                self._end_for_good(again.plan, again.attempt, again.verdict)

    def _fail(self, number: int, error: Exception) -> None:
        self._finish(number, None, "", None, _results.failed_before_start(error))

    def _start(self, plan: PlannedJob, devices: tuple[str, ...], attempt: Attempt) -> Exception | None:
        """Start a job on its devices; return why it could not be."""
        port = None
        try:
            self._hub.refuse_shared_directory(plan.run_dir, (again.plan for again in self._again.values()))
            self._sweep.sources.check(self._sweep.settings.code_changed)
            port = reserve_port(self._sweep.settings.master_addr, self._sweep.settings.master_port)
            place = Place(devices, port)
            paths, spec = write_job(self._sweep, plan, attempt, place, self._base)
            link, channel = self._hub.ask_for_keeper(plan.number, self._sweep.gate.descriptors(devices))
        except (LauncherError, OSError, ValueError) as error:
            if port is not None:
                port.release()
            return start_error(error, plan)
        channel.send(spec)
        tees = make_tees(plan, paths, self._sweep.settings.tee_ranks, alone=self._at_once == 1)
        run_id = spec.environment["TORCHELASTIC_RUN_ID"]
        job = RunningJob(plan, paths, place, attempt, run_id, spec.limits, link, channel, tees)
        self._hub.add(job)
        if self._stopped_by is not None:
            job.stop("the sweep was stopped")
        return None

    # Watching

    def _wait(self, *, ready: bool) -> None:
        """Wait for something to happen, if nothing can be done now."""
        timeout = 0.0
        if not ready and self._looks_are_due():
            timeout = LOOK_INTERVAL_S
        elif not ready and (self._line.blocked or self._again):
            timeout = _ASK_INTERVAL_S
        elif not ready and self._hub.running:
            timeout = _INSIST_INTERVAL_S
        self._hub.wait(self._view.due_s(timeout))

    def _looks_are_due(self) -> bool:
        comparing = self._sweep.settings.check_config is not None
        return any(job.tees or (comparing and not job.compared) for job in self._hub.running.values())

    def _look_at_running(self) -> None:
        self._view.begin_round()
        for job in list(self._hub.running.values()):
            over = job.over
            all_shown = self._view.show(job.tees, last=over)
            self._compare_configs(job)
            if not over:
                job.insist(time.monotonic())
            if over and (all_shown or self._stopped_by is not None):
                self._end(job)

    def _compare_configs(self, job: RunningJob) -> None:
        rule = self._sweep.settings.check_config
        if rule is None or not job.compare_configs():
            return
        _log.warning("#%d : %s", job.plan.number, job.difference)
        if rule is OnConfigDifference.error:
            job.stop(f"{job.difference} (check_config=error)")

    def _wait_for_devices(self, arrived: _signals.RecordedSignals) -> None:
        """Leave no device to others that still holds what a job of ours left on it."""
        if not self._sweep.gate.settled and not self._stopped_by:
            _log.info("Waiting until the processes of the last jobs are off their devices")
        while not self._sweep.gate.settled and not self._stopped_by:
            self._hub.wait(LOOK_INTERVAL_S)
            self._act_on(arrived.take())

    # Ending

    def _end(self, job: RunningJob) -> None:
        left = job.end_leftovers()
        if job.left:
            which = " ".join(map(str, left)) or "of it"
            _log.warning("#%d : a process (%s) cannot be ended, and may hold its devices", job.plan.number, which)
        self._hub.remove(job)
        self._compare_configs(job)
        verdict = self._verdict(job)
        again = None if self._stopped_by is not None else job.next_attempt(verdict, self._sweep.settings)
        if job.difference and self._sweep.settings.check_config is OnConfigDifference.error:
            # The ranks may have been done before the difference was seen. To start again would not mend it.
            verdict = _results.failed_before_start(JobFailedError(f"{job.difference} (check_config=error)"))
            again = None
        if again is not None:
            line = shown(override_line(job.plan.overrides))
            _log.error("#%d : %s: %s\n%s", job.plan.number, again.why, line, shown(verdict.block))
            self._line.pause(job.plan.number)
            if not self._sweep.gate.ready(job.place.devices):
                _log.info("#%d : waits until its devices are free for its next start", job.plan.number)
            self._again[job.plan.number] = _Again(job.plan, job.place.devices, again, verdict)
        else:
            self._end_for_good(job.plan, job.attempt, verdict)

    def _end_for_good(self, plan: PlannedJob, attempt: Attempt, verdict: Verdict) -> None:
        self._line.job_ended(plan.number)
        self._finish(plan.number, plan.config, plan.run_dir, time.monotonic() - attempt.since, verdict)

    def _verdict(self, job: RunningJob) -> Verdict:
        try:
            return job.verdict()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (what is the user's may raise wherever it is touched)
            why = f"what its ranks stored cannot be used: {type(error).__name__}: {error}"
            return _results.failed_before_start(JobFailedError(f"{why}\nThe logs are in {job.paths.folder}."))

    def _finish(
        self, number: int, config: DictConfig | None, run_dir: str, seconds: float | None, verdict: Verdict
    ) -> None:
        overrides = self._overrides[number]
        job_return: JobReturn = _results.make_job_return(overrides, config, run_dir, self._sweep.task_name, verdict)
        self._results[number] = JobResult(number, job_return, verdict.completed, verdict.cause, seconds)
        for line in verdict.warnings:
            _log.warning("#%d : %s", number, shown(line))
        if not verdict.completed:
            _log.error(
                "#%d : FAILED after %s: %s\n%s",
                number,
                duration(seconds),
                shown(override_line(overrides)),
                shown(verdict.block),
            )
