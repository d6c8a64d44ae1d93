"""From what ranks stored and how they exited to a verdict, and to words for the user."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import _pickling
from ._errors import JobFailedError, RankTraceback
from ._failures import advice_on, describe, rank_name, root_cause, unusable_folder
from ._files import JobPaths, read_outcome
from ._logs import last_lines
from ._peers import refresh_names
from ._records import JobRecord
from ._signals import advice_on_exit, describe_end, describe_exit
from ._specs import OUTPUT_LOST, GroupReport, Outcome
from ._start import JobStart
from ._words import counted, numbered

_SHOWN_LOG_LINES = 20
_SHOWN_TRACEBACK_LINES = 25
_SEE_LOG = "The log of each rank is in {folder}."


class LostValue:
    """Stand in for a job's value that could not be brought to the launching process.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<lost value: {self.reason}>"


@dataclass(frozen=True)
class Verdict:
    """How a job ended.

    Attributes:
        completed: Whether it did.
        value: Return value, or the exception of a failed job.
        cause: One line for the table; empty when completed.
        block: The report for the moment of failure, several lines; empty when completed.
        warnings: Lines for the user although the job completed.
        remote: Fields for Hydra 1.4's JobReturn; may be empty.
        rank: Rank that failed first; None: none did.
        skipped: Whether the job was not run at all.
        ungrouped: Whether it has several ranks, which had torch.distributed and opened no process group.
        kept: What an earlier run of the sweep has recorded, if that stands; else None.
    """

    completed: bool
    value: Any
    cause: str = ""
    block: str = ""
    warnings: tuple[str, ...] = ()
    remote: tuple[tuple[str, object], ...] = ()
    rank: int | None = None
    skipped: bool = False
    ungrouped: bool = False
    kept: JobRecord | None = None


def has_completed(report: GroupReport, outcomes: Sequence[Outcome | None]) -> bool:
    """Return whether a job has completed.

    A bad exit beats a good outcome, except after every rank had stored a good one: then only tear-down failed.

    Args:
        report: The keeper's.
        outcomes: What each rank stored; None: nothing.
    """
    good = all(outcome is not None and outcome.completed for outcome in outcomes)
    return good and (report.finished or report.reason is None)


def never_grouped(outcomes: Sequence[Outcome | None]) -> bool:
    """Return whether a job has several ranks, of which none has been in a process group with others."""
    return len(outcomes) > 1 and all(outcome is not None and outcome.alone for outcome in outcomes)


def read_outcomes(start: JobStart) -> list[Outcome | None]:
    """Return what each rank of a start stored; None: nothing."""
    if start.meeting or start.hosts:
        # Those on other nodes stored it there.
        refresh_names(start.paths.folder)
    return [read_outcome(start.paths, rank, start.run_id) for rank in range(start.group.world_size)]


def judge(report: GroupReport | None, start: JobStart, keeper_code: int | None = None) -> Verdict:
    """Decide how a job ended.

    Args:
        report: The keeper's; None: it was lost.
        start: What was started.
        keeper_code: Exit code of the keeper; None: not known.
    """
    if report is None:
        how = "ended without a report" if keeper_code is None else describe_end(keeper_code)
        what = f"The process that kept this job {how}, and its ranks ended with it."
        logs = f"The logs of the ranks are in {start.paths.folder}."
        return failed_before_start(JobFailedError(" ".join(filter(None, (what, advice_on_exit(keeper_code), logs)))))
    outcomes = read_outcomes(start)
    if has_completed(report, outcomes):
        return replace(_completed(report, outcomes[0]), ungrouped=never_grouped(outcomes))
    # The output of a rank that has the terminal is not in its log.
    return _failed(report, outcomes, start.paths, logged=range(start.terminal, len(outcomes)))


def judge_safely(report: GroupReport | None, start: JobStart, keeper_code: int | None = None) -> Verdict:
    """Decide how a job ended, also where what its ranks stored makes trouble."""
    try:
        return judge(report, start, keeper_code)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (what is the user's may raise wherever it is touched)
        why = f"what its ranks stored cannot be used: {type(error).__name__}: {error}"
        return failed_before_start(JobFailedError(f"{why}\nThe logs are in {start.paths.folder}."))


def failed_before_start(error: Exception) -> Verdict:
    """Return the verdict on a job whose ranks were never started."""
    summary = " ".join(str(error).split())
    return Verdict(completed=False, value=error, cause=summary, block=f"{type(error).__name__}: {error}")


def not_begun(why: str) -> Verdict:
    """Return the verdict on a job that was handed to a spawner which did not take it up.

    Args:
        why: What became of that spawner.
    """
    return failed_before_start(
        JobFailedError(
            f"The process that was to start this job did not do so: it {why}. "
            "hydra.launcher.resume=failed runs the job again."
        )
    )


def skipped(why: str) -> Verdict:
    """Return the verdict on a job that is not run.

    Args:
        why: Why not, one line.
    """
    return Verdict(completed=False, value=JobFailedError(f"This job was not run: {why}."), cause=why, skipped=True)


def _completed(report: GroupReport, outcome: Outcome | None) -> Verdict:
    assert outcome is not None
    warnings = [outcome.note] if outcome.note else []
    for ended in report.exits:
        if ended.code == OUTPUT_LOST and not ended.stopped:
            how = f"ended with {describe_exit(ended.code)}, as its last output could not be written,"
            warnings.append(f"rank {ended.rank} {how} after it had finished its job: the results count")
        elif ended.code != 0:
            why = "was ended by the launcher" if ended.stopped else f"ended with {describe_exit(ended.code)}"
            warnings.append(f"rank {ended.rank} {why} after every rank had finished its job: the results count")
    value, lost = value_of(outcome)
    return Verdict(completed=True, value=value, warnings=(*warnings, *lost))


def value_of(outcome: Outcome) -> tuple[Any, tuple[str, ...]]:
    """Return the value of a completed job, or what stands in for a lost one, and lines for the user about that."""
    if outcome.value is not None:
        try:
            return _pickling.loads(outcome.value), ()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a pickle can fail with anything, such as a module's exit)
            value = LostValue(f"cannot be loaded in the launching process ({type(error).__name__}: {error})")
            return value, (f"the job's value {value.reason}",)
    if outcome.lost:
        return LostValue(outcome.lost), (f"the job's value is lost: {outcome.lost}",)
    return None, ()


def _failed(
    report: GroupReport, outcomes: Sequence[Outcome | None], paths: JobPaths, logged: Container[int]
) -> Verdict:
    failure = root_cause(report, outcomes, paths)
    rank = failure.rank if failure is not None else None
    what, advice = describe(report, outcomes, failure)
    others = [ended.rank for ended in report.exits if ended.stopped and rank not in (None, ended.rank)]
    stopped = f"{numbered('rank', sorted(others))} {'was' if len(others) == 1 else 'were'}" if others else ""
    lines = [f"{what}; {stopped} then ended by the launcher." if stopped else f"{what}."]
    if failure is not None and failure.traceback:
        lines += ["", *_shortened(failure.traceback.rstrip().splitlines()), ""]
    elif rank is not None and rank in logged and (tail := last_lines(paths.log(rank), _SHOWN_LOG_LINES)):
        lines += ["", f"Last lines of rank {rank}:", *(f"  {line}" for line in tail), ""]
    broken = unusable_folder(paths) if rank is not None and outcomes[rank] is None else None
    if broken is not None:
        advice = f"The run directory {paths.run_dir} cannot be used any more: {broken}."
    if failure is not None:
        advice = advice_on(failure, "\n".join(lines), len(outcomes)) or advice
    if advice:
        lines.append(advice)
    lines.append(f"Log: {paths.log(rank)}" if rank is not None else _SEE_LOG.format(folder=paths.folder))
    block = "\n".join(lines)
    cause = what
    if failure is not None and failure.summary:
        cause = f"{rank_name(report, failure.rank, len(outcomes))}: {failure.summary}"
    if broken is not None:
        cause = f"{cause}; {broken}"
    outcome = outcomes[rank] if rank is not None else None
    error = _rebuilt_exception(outcome)
    if outcome is None or error is None:
        return Verdict(False, JobFailedError(block), cause, block, rank=rank)
    if outcome.remote:
        # Hydra 1.4 gives the exception its frames and causes back by itself.
        return Verdict(False, error, cause, block, (), tuple(outcome.remote.items()), rank)
    # Past the class's own __setattr__, which may refuse.
    BaseException.__setattr__(error, "__cause__", RankTraceback(outcome.traceback))
    return Verdict(False, error, cause, block, rank=rank)


def _shortened(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _SHOWN_TRACEBACK_LINES:
        return list(lines)
    left_out = counted(len(lines) - _SHOWN_TRACEBACK_LINES, "line")
    return [f"  … {left_out} more in the log", *lines[-_SHOWN_TRACEBACK_LINES:]]


def _rebuilt_exception(outcome: Outcome | None) -> Exception | None:
    if outcome is None or outcome.exception is None:
        return None
    try:
        error = _pickling.loads(outcome.exception)
    except (Exception, SystemExit):  # noqa: BLE001  (then the text has to do)
        return None
    return error if isinstance(error, Exception) else None
