"""Turn the outcomes and exit codes of ranks into a JobReturn and messages for the user."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write

from ..common.errors import JobFailedError, RankTraceback
from ..common.files import JobPaths, read_outcome, write_private
from ..common.protocol import OUTPUT_LOST, GroupReport, LaunchSpec, Outcome, RankExit, StopReason
from ..common.signals import advice_on_exit, describe_end, describe_exit
from ..common.text import MOST_OF_A_CAUSE, bounded, bounded_lines, list_numbers, pluralize
from ..display.logs import last_lines
from ..records.events import JobRecord
from ..resources.port import is_of_spawned, says_taken
from ..supervisor.heartbeat import refresh_names
from . import frozen_config
from .environment import error_file
from .frozen_config import CachedConfig
from .hydra_state import changes_directory

_SHOWN_LOG_LINES = 20
_SHOWN_TRACEBACK_LINES = 25
_SHOWN_LINE = 500
_SEE_LOG = "The log of each rank is in {folder}."


class UnavailableValue:
    """Placeholder for a job's value that could not be passed to the launching process.

    Attributes:
        reason: Why the value is lost.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<lost value: {self.reason}>"


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        completed: Whether the job completed.
        value: Return value, or the exception of a failed job.
        cause: One line for the table; empty if completed.
        block: Report shown on failure, several lines; empty if completed.
        warnings: Lines to show even though the job completed.
        remote: Fields for Hydra 1.4's JobReturn; may be empty.
        rank: Rank that failed first, or None.
        skipped: Whether the job was not run at all.
        ungrouped: Whether it has several ranks, which imported torch.distributed but opened no process group.
        kept: Record of an earlier run of the sweep if its result is kept, else None.
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

    A bad exit overrides a good outcome, unless every rank had stored a good one: then only the tear-down failed.

    Args:
        outcomes: Outcome that each rank stored, or None for none.
    """
    good = all(outcome is not None and outcome.completed for outcome in outcomes)
    return good and (report.finished or report.reason is None)


def never_grouped(outcomes: Sequence[Outcome | None]) -> bool:
    """Return whether a job has several ranks, none of which joined a process group with others."""
    return len(outcomes) > 1 and all(outcome is not None and outcome.alone for outcome in outcomes)


def read_outcomes(spec: LaunchSpec) -> list[Outcome | None]:
    """Return the outcome that each rank of a start stored, or None for none."""
    if spec.rendezvous_dir or spec.hosts:
        # Ranks on other nodes stored theirs there.
        refresh_names(JobPaths(spec.run_dir).folder)
    return [read_outcome(JobPaths(spec.run_dir), rank, spec.run_id) for rank in range(spec.world_size)]


def resolve_result(report: GroupReport | None, spec: LaunchSpec, keeper_code: int | None = None) -> JobResult:
    """Determine how a job ended.

    Args:
        report: The keeper's report, or None if the keeper was lost.
        keeper_code: Exit code of the keeper, or None if it is not known.
    """
    if report is None:
        how = "ended without a report" if keeper_code is None else describe_end(keeper_code)
        what = f"The process that kept this job {how}, and its ranks ended with it."
        logs = f"The logs of the ranks are in {JobPaths(spec.run_dir).folder}."
        return failed_before_start(JobFailedError(" ".join(filter(None, (what, advice_on_exit(keeper_code), logs)))))
    outcomes = read_outcomes(spec)
    if has_completed(report, outcomes):
        return replace(_completed(report, outcomes), ungrouped=never_grouped(outcomes))
    # In a debug session, the output of rank 0 goes to the terminal and not to its log.
    return _failed(report, outcomes, spec, logged=range(spec.terminal, len(outcomes)))


def resolve_result_safely(report: GroupReport | None, spec: LaunchSpec, keeper_code: int | None = None) -> JobResult:
    """Determine how a job ended, even if reading what its ranks stored raises an error."""
    try:
        return resolve_result(report, spec, keeper_code)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's objects may raise anything)
        why = f"what its ranks stored cannot be used: {type(error).__name__}: {bounded(str(error))}"
        return failed_before_start(JobFailedError(f"{why}\nThe logs are in {JobPaths(spec.run_dir).folder}."))


def failed_before_start(error: Exception) -> JobResult:
    """Return the result of a job that failed for a reason other than its ranks, such as at its start."""
    text = bounded_lines(str(error))
    summary = bounded(" ".join(text.split()))
    return JobResult(completed=False, value=error, cause=summary, block=f"{type(error).__name__}: {text}")


def not_begun(why: str) -> JobResult:
    """Return the result of a job that the spawner did not start.

    Args:
        why: How that spawner ended.
    """
    return failed_before_start(
        JobFailedError(
            f"The process that was to start this job did not do so: it {why}. "
            "hydra.launcher.resume=failed runs the job again."
        )
    )


def skipped(why: str) -> JobResult:
    """Return the result of a job that is not run.

    Args:
        why: The reason, one line.
    """
    return JobResult(completed=False, value=JobFailedError(f"This job was not run: {why}."), cause=why, skipped=True)


def _notes(outcomes: Sequence[Outcome | None]) -> list[str]:
    """Return the first note of the ranks, as those of one job are alike."""
    return [outcome.note for outcome in outcomes if outcome is not None and outcome.note][:1]


def _completed(report: GroupReport, outcomes: Sequence[Outcome | None]) -> JobResult:
    outcome = outcomes[0]
    assert outcome is not None
    warnings = [*_notes(outcomes)]
    for ended in report.exits:
        if ended.code == OUTPUT_LOST and not ended.stopped:
            how = f"ended with {describe_exit(ended.code)}, as its last output could not be written,"
            warnings.append(f"rank {ended.rank} {how} after it had finished its job: the results count")
        elif ended.code != 0:
            why = "was ended by the launcher" if ended.stopped else f"ended with {describe_exit(ended.code)}"
            warnings.append(f"rank {ended.rank} {why} after every rank had finished its job: the results count")
    value, lost = value_of(outcome)
    return JobResult(completed=True, value=value, warnings=(*warnings, *lost))


def value_of(outcome: Outcome) -> tuple[Any, tuple[str, ...]]:
    """Return the value of a completed job, or a placeholder if it is lost and lines for the user about that."""
    if outcome.value is not None:
        try:
            return frozen_config.loads(outcome.value), ()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (loading a pickle may raise anything, even SystemExit)
            value = UnavailableValue(
                f"cannot be loaded in the launching process ({type(error).__name__}: {bounded(str(error))})"
            )
            return value, (f"the job's value {value.reason}",)
    if outcome.lost:
        return UnavailableValue(outcome.lost), (f"the job's value is lost: {outcome.lost}",)
    return None, ()


def _failed(
    report: GroupReport, outcomes: Sequence[Outcome | None], spec: LaunchSpec, logged: Container[int]
) -> JobResult:
    paths = JobPaths(spec.run_dir)
    failure = root_cause(report, outcomes, spec)
    rank = failure.rank if failure is not None else None
    what, advice = describe(report, outcomes, failure)
    others = [ended.rank for ended in report.exits if ended.stopped and rank not in (None, ended.rank)]
    stopped = f"{list_numbers('rank', sorted(others))} {'was' if len(others) == 1 else 'were'}" if others else ""
    lines = [f"{what}; {stopped} then ended by the launcher." if stopped else f"{what}."]
    if failure is not None and failure.traceback:
        lines += ["", *_shortened(failure.traceback.rstrip().splitlines()), ""]
    elif rank is not None and rank in logged and (tail := last_lines(paths.log(rank), _SHOWN_LOG_LINES)):
        lines += ["", f"Last lines of rank {rank}:", *(f"  {line}" for line in _shortened(tail)), ""]
    broken = unusable_folder(paths) if rank is not None and outcomes[rank] is None else None
    if broken is not None:
        advice = f"The run directory {paths.run_dir} cannot be used any more: {broken}."
    if failure is not None:
        advice = advice_on(failure, "\n".join(lines), len(outcomes)) or advice
    if advice:
        lines.append(advice)
    lines += [f"Note: {note}." for note in _notes(outcomes)]
    lines.append(f"Log: {paths.log(rank)}" if rank is not None else _SEE_LOG.format(folder=paths.folder))
    block = "\n".join(lines)
    cause = what
    if failure is not None and failure.summary:
        cause = f"{rank_name(report, failure.rank, len(outcomes))}: {failure.summary}"
    if broken is not None:
        cause = f"{cause}; {broken}"
    cause = bounded(cause, 2 * MOST_OF_A_CAUSE)
    outcome = outcomes[rank] if rank is not None else None
    error = _rebuilt_exception(outcome)
    if outcome is None or error is None:
        return JobResult(False, JobFailedError(block), cause, block, rank=rank)
    if outcome.remote:
        # Hydra 1.4 restores the frames and causes of the exception itself.
        return JobResult(False, error, cause, block, (), tuple(outcome.remote.items()), rank)
    # Bypass the class's own __setattr__, which may raise.
    BaseException.__setattr__(error, "__cause__", RankTraceback(outcome.traceback))
    return JobResult(False, error, cause, block, rank=rank)


def _shortened(lines: Sequence[str]) -> list[str]:
    shown = [bounded(line, _SHOWN_LINE) for line in lines[-_SHOWN_TRACEBACK_LINES:]]
    if len(lines) <= _SHOWN_TRACEBACK_LINES:
        return shown
    left_out = pluralize(len(lines) - _SHOWN_TRACEBACK_LINES, "line")
    return [f"  … {left_out} more in the log", *shown]


def _rebuilt_exception(outcome: Outcome | None) -> Exception | None:
    if outcome is None or outcome.exception is None:
        return None
    try:
        error = frozen_config.loads(outcome.exception)
    except (Exception, SystemExit):  # noqa: BLE001  (the text is used instead)
        return None
    return error if isinstance(error, Exception) else None


_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|remote process (has )?(exited|terminated)"
    r"|logs of the remote worker",
    re.IGNORECASE,
)
LOST_PEER_ADVICE = (
    "This rank lost a peer, which is seldom the cause: look at the logs of the other ranks beside this one."
)
SPAWN_ADVICE = (
    "Each rank has started processes of its own (torch.multiprocessing.spawn, Lightning's strategy=ddp_spawn), and "
    "these got in each other's way at the port of the job. The launcher starts the ranks: call the function that you "
    "spawn, or use strategy=ddp."
)
NO_TERMINAL_ADVICE = (
    "A rank has no terminal, as it writes to its log file. For the size use shutil.get_terminal_size(), which knows "
    "that of the launching process; hydra.launcher.debug=true gives rank 0 the terminal itself."
)
_SEE_STACKS = "Where each rank was, the Python stacks at the end of its log tell."
# More than a full disk may still have for a small file.
_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: The rank.
        at: When it failed, Unix time in seconds.
        summary: Type and message of its error; empty if only the exit code is known.
        traceback: Its traceback; may be empty.
    """

    rank: int
    at: float
    summary: str = ""
    traceback: str = ""


def root_cause(report: GroupReport, outcomes: Sequence[Outcome | None], spec: LaunchSpec) -> Failure | None:
    """Return the failure that came first, or None if the group was ended although no rank had failed.

    The first rank to exit need not be the first to fail: its peers lose their connection and can exit before it.
    """
    exits = {ended.rank: ended for ended in report.exits}
    failures = []
    for rank, outcome in enumerate(outcomes):
        ended = exits.get(rank)
        error = _error_file(error_file(spec, rank), rank)
        exited_at = report.began_at + ended.after_s if ended is not None else time.time()
        if outcome is not None and not outcome.completed:
            at = outcome.failed_at or exited_at
            failures.append(Failure(rank, at, outcome.summary, outcome.traceback))
        elif outcome is None and error is not None:
            failures.append(error)
        elif ended is not None and (not ended.reached_end or outcome is None) and not ended.stopped:
            failures.append(Failure(rank, exited_at))
    if not failures and report.cause is not None:
        return Failure(report.cause, report.began_at)
    hung = report.cause is None and report.reason is not None
    before = [failure for failure in failures if not hung or not _was_stopped(exits, failure.rank)]

    def order(failure: Failure) -> tuple[bool, bool, float]:
        # The clocks of nodes differ, so prefer the node that reported a failure first.
        elsewhere = _node_of(report, failure.rank, len(outcomes)) != report.first_node
        return lost_a_peer(failure), elsewhere, failure.at

    # A rank that lost a peer often fails first, while the peer is still in a `finally` block.
    return min(before, key=order, default=None)


def lost_a_peer(failure: Failure) -> bool:
    """Return whether an error only says that another rank exited, by the messages of gloo, NCCL and torch's store."""
    return _LOST_PEER.search(f"{failure.summary}\n{failure.traceback}") is not None


def advice_on(failure: Failure, shown: str, world_size: int) -> str:
    """Return advice on an error of a known kind, or an empty string.

    Args:
        shown: The part of its traceback or log that is shown.
    """
    if f"OSError: [Errno {errno.ENOTTY}]" in shown:
        return NO_TERMINAL_ADVICE
    if world_size == 1:
        return ""
    lost = lost_a_peer(failure)
    if is_of_spawned(failure.traceback) and (lost or says_taken(failure.traceback)):
        return SPAWN_ADVICE
    return LOST_PEER_ADVICE if lost else ""


def _was_stopped(exits: Mapping[int, RankExit], rank: int) -> bool:
    return rank in exits and exits[rank].stopped


def _error_file(path: str, rank: int) -> Failure | None:
    """Read the error that a rank stored in torchrun's format, which torch's `record` writes, too."""
    try:
        with open(path, encoding="utf-8") as file:
            at = os.fstat(file.fileno()).st_mtime
            message = json.load(file)["message"]
        if isinstance(message, str):
            return Failure(rank, at, bounded(message))
        # Its own timestamp is not used, as it is in whole seconds.
        extra = message.get("extraInfo", {})
        callstack = bounded_lines(str(extra.get("py_callstack", "")))
        return Failure(rank, at, bounded(str(message["message"])), callstack)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def unusable_folder(paths: JobPaths) -> str | None:
    """Return why a job's folder cannot be used any more, or None if it can."""
    if not os.path.exists(paths.payload):
        return "its files were deleted while the job ran"
    try:
        write_private(os.path.join(paths.folder, "probe"), bytes(_PROBE_BYTES))
        os.unlink(os.path.join(paths.folder, "probe"))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _node_of(report: GroupReport, rank: int, world_size: int) -> int:
    return rank * len(report.hosts) // world_size


def rank_name(report: GroupReport, rank: int, world_size: int) -> str:
    """Return the display name of a rank, including its node if there are several nodes."""
    if not report.hosts:
        return f"rank {rank}"
    node = _node_of(report, rank, world_size)
    return f"rank {rank} (node {node}, {report.hosts[node] or 'unknown host'})"


def describe(report: GroupReport, outcomes: Sequence[Outcome | None], failure: Failure | None) -> tuple[str, str]:
    """Return a description of the failure, and advice."""
    if failure is None:
        assert report.reason is not None
        detail = f" ({report.detail})" if report.detail else ""
        hung = report.reason in (StopReason.TIMEOUT, StopReason.EXIT_TIMEOUT)
        return f"the job was ended because {report.reason.value}{detail}", _SEE_STACKS if hung else ""
    rank = failure.rank
    name = rank_name(report, rank, len(outcomes))
    if report.reason is StopReason.START_FAILED:
        return f"{name} could not be started: {report.detail}", ""
    code, stopped = next(((ended.code, ended.stopped) for ended in report.exits if ended.rank == rank), (0, False))
    if report.reason is StopReason.FAILED_RANK_HUNG and rank == report.cause and code == -signal.SIGKILL:
        return (
            f"{name} failed{f': {failure.summary}' if failure.summary else ''}, and did not end until it was killed",
            f"Fix the error of {name} first. Its tear-down did not end within hydra.launcher.grace_period_s, although "
            "the other ranks had been stopped. The Python stacks at the end of its log show where it was.",
        )
    if stopped and failure.summary:
        # It had failed but not exited, so the signal that ended it is the launcher's.
        return f"{name} failed: {failure.summary}", ""
    if code < 0:
        return f"{name} {describe_end(code)}", advice_on_exit(code)
    if outcomes[rank] is None and code == 0:
        return (
            f"{name} ended with exit code 0 but did not finish the job",
            "The program ended before or inside the job, for instance by os._exit(0), or never called the "
            "hydra.main function of this sweep.",
        )
    advice = "Its last output could not be written, as on a full disk." if code == OUTPUT_LOST else ""
    return f"{name} failed with {describe_exit(code)}", advice


def make_job_return(
    overrides: Sequence[str],
    config: DictConfig | None,
    run_dir: str,
    result: JobResult,
    cached: CachedConfig | None = None,
) -> JobReturn:
    """Build the JobReturn for the sweeper from the launching process's own config and the result.

    Args:
        config: Frozen config, which must not be used afterwards, or None if the job did not compose.
        result: Result of the job.
        cached: The pickled config, or None to pickle it now.
    """
    if config is not None and cached is None:
        cached = CachedConfig.store(config)
    job_return = JobReturn() if cached is None else _CachedJobReturn.of(cached)
    job_return.overrides, job_return.task_name = list(overrides), JobRuntime.instance().get("name")
    job_return.status = JobStatus.COMPLETED if result.completed else JobStatus.FAILED
    job_return._return_value = result.value
    for name, value in result.remote:
        if hasattr(job_return, name):
            setattr(job_return, name, value)
    if config is not None:
        # Without overrides of Hydra's own options, as with the basic launcher.
        task_overrides = OmegaConf.to_container(config.hydra.overrides.task)
        assert isinstance(task_overrides, list)
        job_return.overrides = task_overrides
        job_return.working_dir = run_dir if changes_directory(config) else _working_dir(config)
        if cached is None:
            job_return.cfg, job_return.hydra_cfg = _apart(config)
    return job_return


class _CachedJobReturn(JobReturn):
    """A JobReturn that loads its configs on first access, as those of 500 jobs would take 70 MB of memory.

    Pickling or copying it gives a plain JobReturn. `dataclasses.replace` loads the configs at once.
    """

    _cached: CachedConfig

    @classmethod
    def of(cls, cached: CachedConfig) -> _CachedJobReturn:
        """Return a JobReturn with this frozen config."""
        job_return = cls()
        job_return._cached = cached
        # Without these, attribute access finds the properties of the class.
        del job_return.cfg, job_return.hydra_cfg
        return job_return

    @functools.cached_property
    def cfg(self) -> DictConfig:  # type: ignore[override]
        """Config of the job without the `hydra` node."""
        return self._configs[0]

    @functools.cached_property
    def hydra_cfg(self) -> DictConfig:  # type: ignore[override]
        """Config with only the `hydra` node."""
        return self._configs[1]

    @functools.cached_property
    def _configs(self) -> tuple[DictConfig, DictConfig]:
        return _apart(self._cached.load())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain JobReturn, as Hydra's own launcher returns it."""
        plain = JobReturn(cfg=self.cfg, hydra_cfg=self.hydra_cfg)
        vars(plain).update({name: value for name, value in vars(self).items() if name not in ("_cached", "_configs")})
        # Pickle refuses `copyreg.__newobj__` with another class than the object's, so call JobReturn instead.
        state = plain.__reduce_ex__(2)[2]
        return JobReturn, (), state


def _apart(config: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Move the `hydra` node of a config into a separate config, read-only, and return both.

    Copying it, as Hydra does, would take longer.
    """
    part = config.hydra
    OmegaConf.set_readonly(part, True)
    with read_write(config), open_dict(config):
        del config["hydra"]
    alone = OmegaConf.create()
    with flag_override(alone, "no_deepcopy_set_nodes", True):
        alone.hydra = part
    return config, alone


def _working_dir(config: DictConfig) -> str:
    try:
        return os.getcwd()
    except OSError:
        return str(config.hydra.runtime.cwd)  # The working directory was deleted.
