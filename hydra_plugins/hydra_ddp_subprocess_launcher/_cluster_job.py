"""A job on a cluster, as the launching process knows it from its files and from the cluster's word for its state."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import _results, _submitit
from ._choices import OnConfigDifference
from ._errors import JobFailedError
from ._logs import LogTee, last_lines
from ._nodes import JobEnd, JobFolder, StartFile
from ._plan import PlannedJob
from ._results import Verdict
from ._running import config_difference
from ._specs import GroupReport
from ._start import JobStart

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
        start: Its last start; None: it waits for its turn.
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
    start: JobStart | None = None
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
        start = told.read()
        if start is None:
            return False
        self.told_by = told
        if self.start is not None and start.run_id == self.start.run_id:
            return False
        self.start, self.began_at = start, self.began_at or time.time()
        # It may depend on the id that it has there.
        self.plan = replace(self.plan, frozen=replace(self.plan.frozen, run_dir=start.run_dir))
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
        over = _submitit.has_ended(self.state) or preempted
        # What was cancelled is waited for until its last process is gone, as who stops a sweep may start it again.
        if not over or not (self._has_gone() if self.why else now - self.since > patience_s):
            return False
        self.folder.refresh()
        return self.folder.read_end() is None

    def _has_gone(self) -> bool:
        return not _submitit.is_queued(self.handle)

    def told_end(self, end: JobEnd, check_config: OnConfigDifference | None) -> Verdict:
        """Return how it ended, as its first node has told it.

        Args:
            end: What that one told.
            check_config: That option.
        """
        if end.start is not None:
            return self._judge(end.report, end.start, check_config)
        if self.start is not None and self._all_completed(self.start):
            return self._judge(_FINISHED, self.start, check_config)
        return _results.failed_before_start(JobFailedError(end.cause))

    def _judge(self, report: GroupReport | None, start: JobStart, check_config: OnConfigDifference | None) -> Verdict:
        difference = config_difference(start) if check_config is not None else None
        if difference:
            _log.warning("#%d : %s", self.plan.number, difference)
        if difference and check_config is OnConfigDifference.error:
            return _results.failed_before_start(JobFailedError(f"{difference} (check_config=error)"))
        return _results.judge_safely(report, start)

    def _all_completed(self, start: JobStart) -> bool:
        outcomes = _results.read_outcomes(start)
        return bool(outcomes) and all(outcome is not None and outcome.completed for outcome in outcomes)

    def ended_from_outside(self, executor: str, check_config: OnConfigDifference | None) -> Verdict:
        """Return how it ended, of which the cluster alone tells.

        Args:
            executor: Submitit's name of the cluster.
            check_config: That option.
        """
        if self.start is not None and self._all_completed(self.start):
            # Only the way out was cut off.
            return self._judge(_FINISHED, self.start, check_config)
        if self.why and self.start is None:
            self._fence(self.why)
            return _results.skipped(self.why)
        name = {"slurm": "SLURM"}.get(executor, "submitit")
        why = f" ({self.why})" if self.why else ""
        lines = [f"{name} ended job {self.handle.job_id}: {self.state}{why}."]
        errors = Path(str(self.handle.paths.stderr))
        if tail := last_lines(str(errors), _SHOWN_LINES):
            lines += ["", f"Last lines of {errors}:", *(f"  {line}" for line in tail), ""]
        self._fence(lines[0])
        if advice := _submitit.hint(self.state):
            lines.append(advice)
        if self.start is not None:
            lines.append(f"The log of each rank is in {self.start.paths.folder}.")
        return replace(_results.failed_before_start(JobFailedError("\n".join(lines))), cause=lines[0].rstrip("."))

    def _fence(self, why: str) -> None:
        """Should the cluster start it again all the same: nobody waits for it any more."""
        with contextlib.suppress(OSError):
            self.folder.publish_end(JobEnd(False, why))
