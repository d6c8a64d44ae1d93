"""Show a batch of jobs while they run: a board or lines, the ranks' output, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from ..common import quoting
from ..common.choices import ShowProgress
from ..common.files import JobPaths
from ..common.protocol import JOB_ID_TOKEN
from ..common.text import duration, encodable, pluralize
from ..display.logs import LogTee, LogView
from ..display.tables import UNGROUPED, Summary, override_line
from ..display.terminal import Terminal, descriptor_of, is_terminal
from ..job.plan import Allocation, Attempt, PlannedJob
from ..job.results import JobResult
from ..job.settings import SweepContext
from ..records.events import (
    JobEnded,
    JobKept,
    JobPaused,
    JobsAdded,
    JobSkipped,
    JobStarted,
    JobState,
    JobSubmitted,
    SweepStopped,
    json_value,
    short_text,
)
from ..records.journal import SweepRecorder
from .resume import ResumeDecision

_log = logging.getLogger(__name__)
# Seconds between two drawings of the board.
_PAINT_INTERVAL_S = 0.25


class Progress:
    """Record and show what happens in one batch.

    Args:
        summary: Shown at the end of the batch.
        overrides: Override strings of each job, by its number, in order.
        at_once: Maximum number of jobs that run at a time.
    """

    def __init__(
        self,
        context: SweepContext,
        recorder: SweepRecorder,
        summary: Summary,
        overrides: Mapping[int, Sequence[str]],
        at_once: int,
    ) -> None:
        self._context = context
        self._recorder = recorder
        self._summary = summary
        self._overrides = overrides
        self._at_once = at_once
        self._style = _style(context.settings.progress)
        self._has_board = self._style is ShowProgress.rich
        self._terminal = Terminal(board=self._has_board)
        self._view = LogView(self._terminal)
        self._paint_at = 0.0
        self._stopped_by = ""
        self._said_new = False
        jobs = tuple(tuple(one) for one in overrides.values())
        self._recorder.record(JobsAdded(time.time(), next(iter(overrides), 0), jobs, at_once, context.task))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the board, if any, for the duration of the block, and never wait for a slow reader of the output."""
        with self._terminal.taken():
            yield

    @property
    def failures(self) -> int:
        """Number of failed jobs in this run of the sweep."""
        return self._recorder.failures

    # What happens

    def submitted(self, plan: PlannedJob, job_id: str, folder: str, executor: str) -> None:
        """Record that a job is queued on a cluster.

        Args:
            folder: Where its nodes report.
            executor: Submitit's name of the cluster.
        """
        run_dir = plan.run_dir.replace(JOB_ID_TOKEN, job_id)
        facts = (job_id, folder, plan.config_hash, executor, run_dir)
        self._recorder.record(JobSubmitted(time.time(), plan.number, *facts))

    def started(
        self, plan: PlannedJob, attempt: Attempt, allocation: Allocation, run_id: str, nodes: tuple[str, ...] = ()
    ) -> None:
        """Record that a job is being started."""
        facts = (plan.world_size, allocation.devices, plan.run_dir, run_id, plan.config_hash, nodes)
        self._recorder.record(JobStarted(time.time(), plan.number, attempt.number, *facts))
        if not attempt.why and self._style is ShowProgress.plain:
            _log.info("\t#%d : %s", plan.number, encodable(override_line(plan.overrides)))

    def paused(self, plan: PlannedJob, why: str, result: JobResult) -> None:
        """Record that a start has failed and that the job is started again."""
        self._recorder.record(JobPaused(time.time(), plan.number, result.cause))
        line = encodable(override_line(plan.overrides))
        _log.error("#%d : %s: %s\n%s", plan.number, why, line, encodable(result.block))

    def decided(self, plan: PlannedJob, decision: ResumeDecision) -> None:
        """Show whether a job is run, given what earlier runs of the sweep have done."""
        if plan.known is None and not self._context.has_basic_sweeper:
            if not self._said_new:
                self._said_new = True
                _log.info("Jobs that %s did not propose before are run as new ones", self._context.sweeper_name)
            return
        what = "is run" if decision.result is None else "is not run"
        _log.info(
            "\t#%d : %s : %s: %s", plan.number, encodable(override_line(plan.overrides)), what, encodable(decision.why)
        )

    def ended(self, number: int, result: JobResult, seconds: float | None) -> None:
        """Record that a job is over.

        Args:
            number: Number of the job.
            seconds: Seconds since its first start, or None if it was never started.
        """
        if result.skipped:
            self._recorder.record(JobSkipped(time.time(), number, result.cause))
            return
        if result.kept is not None:
            names = {field.name for field in dataclasses.fields(JobKept)} - {"at", "job"}
            facts = {name: getattr(result.kept, name) for name in names}
            self._recorder.record(JobKept(time.time(), number, **facts))
            return
        value = result.value if result.completed else None
        text = short_text(value) if result.completed else ""
        stored, exact = json_value(value)
        event = JobEnded(
            time.time(), number, result.completed, stored, text, result.cause, seconds, exact, result.ungrouped
        )
        self._recorder.record(event)
        for line in (*result.warnings, *([UNGROUPED] if result.ungrouped else [])):
            _log.warning("#%d : %s", number, encodable(line))
        overrides = encodable(override_line(self._overrides[number]))
        if not result.completed:
            block = "\n".join([result.block, *self._repeat_line(number, result)])
            _log.error("#%d : FAILED after %s: %s\n%s", number, duration(seconds), overrides, encodable(block))
        elif self._style is not ShowProgress.none:
            _log.info("\t#%d : %s : completed after %s: %s", number, overrides, duration(seconds), encodable(text))

    def _repeat_line(self, number: int, result: JobResult) -> list[str]:
        if self._recorder.sweep.jobs[number].attempts == 0:
            return []
        rank = result.rank or 0
        return [f"Repeat rank {rank}: {quoting.repeat_line(self._context.paths.sweep_dir, number, rank)}"]

    def stopped(self, name: str) -> None:
        """Record that a signal has stopped the sweep."""
        self._recorder.record(SweepStopped(time.time(), name))
        self._stopped_by = name
        self._terminal.hurry()

    def finish(self) -> None:
        """Show the rest of the ranks' output, and the table of finished jobs unless more batches follow."""
        if not self._view.finish(self._terminal.patience_s):
            _log.warning("\nNobody read what was shown here for long. The rest of it is in the logs of the ranks alone")
            self._terminal.hurry()
        if self._stopped_by:
            jobs = [self._recorder.sweep.jobs[number] for number in self._overrides]
            left = sum(job.state is not JobState.COMPLETED for job in jobs)
            _log.warning(
                "Stopped by %s: %d of %s did not complete", self._stopped_by, left, pluralize(len(jobs), "job")
            )
        self._recorder.flush(last=True)
        if self._context.has_one_batch:
            self._summary.show(self._recorder, self._overrides)

    # The ranks' output

    def tees(self, plan: PlannedJob, paths: JobPaths) -> list[LogTee]:
        """Return the tees that show the output of a job's ranks on the terminal."""
        chosen, debug = self._context.settings.tee_ranks, self._context.settings.debug
        alone = self._at_once == 1
        if self._has_board and chosen == (0,) and not alone:
            return []  # The board shows its last line.
        # In a debug session, rank 0 writes to the terminal itself.
        ranks = [rank for rank in range(debug, plan.world_size) if chosen is None or rank in chosen]
        bare = alone and len(ranks) == 1 and not debug
        prefixes = ["" if bare else f"[job {plan.number} rank {rank}] " for rank in ranks]
        raw = bare and not self._has_board
        return [LogTee(paths.log(rank), prefix, raw=raw) for rank, prefix in zip(ranks, prefixes, strict=True)]

    def begin_round(self) -> None:
        """Begin one pass over all jobs."""
        self._recorder.flush()
        self._view.begin_round()
        self._paint()

    def show(self, tees: Sequence[LogTee], *, last: bool) -> None:
        """Show new output of the ranks.

        Args:
            last: Whether no more output will follow.
        """
        self._view.show(tees, last=last)

    def due_s(self, otherwise: float) -> float:
        """Return the seconds until the display needs an update, or `otherwise` if it needs none."""
        due = self._view.due_s(otherwise)
        return due if not self._has_board else min(due, max(0.0, self._paint_at - time.monotonic()))

    # The board

    def resumed(self) -> None:
        """Redraw the whole board, as a shell has continued this process and may have written over it."""
        self._terminal.forget_board()

    def _paint(self) -> None:
        board = self._terminal.board
        if board is None or time.monotonic() < self._paint_at:
            return
        from ..display.board import draw_board  # Imports rich.

        self._paint_at = time.monotonic() + _PAINT_INTERVAL_S
        self._terminal.paint(draw_board(self._recorder.sweep, time.time(), board.size, board.encoding))


def _style(chosen: ShowProgress) -> ShowProgress:
    if chosen in (ShowProgress.plain, ShowProgress.none) or descriptor_of(sys.stderr) is None:
        return ShowProgress.none if chosen is ShowProgress.none else ShowProgress.plain
    moves = is_terminal(sys.stderr) and os.environ.get("TERM", "") not in ("", "dumb")
    return ShowProgress.rich if moves or chosen is ShowProgress.rich else ShowProgress.plain
