"""The option `resume`: what earlier runs of the sweep have left to do."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import yaml

from .. import __version__
from ..common import processes, quoting
from ..common.choices import Resume
from ..common.errors import StartError
from ..common.files import FORMAT, JobPaths, SweepPaths, find_outcome, move_aside
from ..common.quoting import is_secret
from ..common.text import pluralize
from ..groups.rendezvous import JobFolder
from ..job import results
from ..job.results import JobResult
from ..job.settings import LaunchSettings
from ..records.events import NO_NUMBERS, JobRecord, JobState, SweepBegan, SweepRecord, json_value, short_text, shortened
from ..records.journal import SweepRecorder, read_journal
from ..records.sweep_lock import SweepLock

_MOST_KEYS = 3


@dataclass(frozen=True)
class ResumeDecision:
    """Whether a resumed sweep runs a job.

    Attributes:
        why: The reason, in a few words.
        result: Result of a job that is not run, or None if it is run.
    """

    why: str
    result: JobResult | None = None


class PreviousRuns:
    """Look up the jobs of earlier runs of a sweep.

    Args:
        record: What they have recorded, or None if there were none.
        choice: Which jobs to run, or None if the sweep begins anew.
    """

    def __init__(self, record: SweepRecord | None = None, choice: Resume | None = None) -> None:
        self._choice = None if record is None else choice
        known = [] if record is None else [*record.past, *record.touched()]
        self._by_key: dict[tuple[int, tuple[str, ...], str], list[JobRecord]] = {}
        self._keys: dict[tuple[tuple[str, ...], str], list[tuple[int, tuple[str, ...], str]]] = {}
        for job in known:
            self._by_key.setdefault(job.key, []).append(job)
        for key in self._by_key:
            self._keys.setdefault(key[1:], []).append(key)
        self._lost: dict[tuple[int, tuple[str, ...], str], list[JobRecord]] = {}
        self._taken = {folder for job in known for folder in (job.run_dir, job.planned_dir) if folder}

    @property
    def resumes(self) -> bool:
        """Whether the sweep resumes earlier runs."""
        return self._choice is not None

    def find(self, number: int, overrides: Sequence[str], task: str, config_hash: str) -> JobRecord | None:
        """Return the record of a job, each record once: the one with its number, else one with its overrides.

        If the job ran several times, the last run counts, unless an earlier one has completed with the same config.

        Args:
            number: Number of the job.
            task: Which function of the program it runs.
            config_hash: SHA-256 of its own current config, hexadecimal.
        """
        wanted = (tuple(overrides), task)
        keys = self._keys.get(wanted, [])
        if not keys:
            return None
        key = (number, *wanted) if (number, *wanted) in keys else keys[0]
        keys.remove(key)
        runs = self._by_key[key]
        self._lost[number, tuple(overrides), task] = [job for job in runs if job.job_id]
        done = [job for job in runs if job.state is JobState.COMPLETED and job.config_hash == config_hash]
        started = [job for job in runs if job.attempts or job.job_id]
        chosen = _as_stored((done or started or runs)[-1])
        return replace(chosen, attempts=max(job.attempts for job in runs))

    def lost(self, number: int, overrides: Sequence[str], task: str) -> list[JobRecord]:
        """Return the runs of a job that may still be on a cluster, as no end is recorded. Call `find` first."""
        runs = map(_as_stored, self._lost.get((number, tuple(overrides), task), ()))
        return [job for job in runs if not job.state.over]

    def left_out(self) -> list[JobRecord]:
        """Return the runs that may still be on a cluster, of jobs that `find` has not returned."""
        keys = [key for keys in self._keys.values() for key in keys]
        runs = [_as_stored(job) for key in keys for job in self._by_key[key] if job.job_id]
        return [job for job in runs if not job.state.over]

    def directory(self, run_dir: str, known: JobRecord | None) -> str:
        """Return a run directory that no other job has, for a job that is new or whose own directory is gone.

        Args:
            known: Record of the job, or None if it is new.
        """
        found, count = run_dir, 1
        while found in self._taken and (known is None or found not in (known.run_dir, known.planned_dir)):
            count += 1
            found = f"{run_dir}-{count}"
        self._taken.add(found)
        return found

    def decide(self, job: JobRecord | None, config_yaml: str, config_hash: str) -> ResumeDecision | None:
        """Decide whether to run a job. Return None if the sweep begins anew.

        Args:
            job: Record of the job, or None if there is none.
            config_hash: SHA-256 of `config_yaml`, hexadecimal.
        """
        if self._choice is None:
            return None
        if job is None or job.state not in (JobState.COMPLETED, JobState.FAILED):
            why = "new" if job is None else "not finished before"
            return ResumeDecision(why) if self._choice is Resume.unfinished else _left_out(why)
        if job.state is JobState.FAILED:
            return ResumeDecision(f"failed before ({shortened(job.cause)})")
        if job.config_hash != config_hash:
            why = f"config changed in {_difference(job, config_yaml)}"
            return ResumeDecision(why) if self._choice is Resume.unfinished else _left_out(why)
        result = _stored(job)
        if result is None:
            return ResumeDecision("done, but its value cannot be read any more")
        return ResumeDecision("done", result)


def _left_out(why: str) -> ResumeDecision:
    return ResumeDecision(
        why, results.skipped(f"{why}, and hydra.launcher.resume=failed runs only what has failed before")
    )


def _as_stored(job: JobRecord) -> JobRecord:
    """Return a job with the end that its ranks stored or its nodes published, if no process was left to record it."""
    end = JobFolder(job.folder).read_end() if job.folder and not job.state.over else None
    if end is not None and end.spec is not None:
        job = replace(job, run_dir=end.spec.run_dir, run_id=end.spec.run_id, nproc=end.spec.world_size)
    if end is not None and not end.completed:
        return replace(job, state=JobState.FAILED, cause=end.cause)
    if job.state.over or not job.run_id:
        return job
    outcomes = [find_outcome(JobPaths(job.run_dir), rank, job.run_id) for rank in range(job.nproc)]
    done = [outcome for outcome in outcomes if outcome is not None and outcome.completed]
    if not done or len(done) < job.nproc:
        return job
    value, _ = results.value_of(done[0])
    stored, exact = json_value(value)
    return replace(
        job,
        state=JobState.COMPLETED,
        value=stored,
        exact=exact,
        text=short_text(value),
        ungrouped=results.never_grouped(outcomes),
    )


def _stored(job: JobRecord) -> JobResult | None:
    """Return the result of a completed job with its value, or None if the value is lost."""
    outcome = find_outcome(JobPaths(job.run_dir), 0, job.run_id)
    if outcome is not None and outcome.completed:
        value, _ = results.value_of(outcome)
        return JobResult(completed=True, value=value, kept=job)
    return JobResult(completed=True, value=_from_json(job.value), kept=job) if job.exact else None


def _from_json(value: Any) -> Any:
    """Undo `json_value`, as far as JSON preserves the value."""
    if isinstance(value, str) and value in NO_NUMBERS:
        return float(value)
    if isinstance(value, Mapping):
        return {key: _from_json(part) for key, part in value.items()}
    return [_from_json(part) for part in value] if isinstance(value, list | tuple) else value


def _difference(job: JobRecord, config_yaml: str) -> str:
    """Describe the keys in which a job's config has changed."""
    try:
        before = yaml.safe_load(Path(JobPaths(job.run_dir).config).read_text(encoding="utf-8"))
        now = yaml.safe_load(config_yaml)
    except (OSError, ValueError, yaml.YAMLError):
        return "keys that are not known any more"
    old, new = dict(_leaves(before)), dict(_leaves(now))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    said = [f"{key}: {_said(old, key)} → {_said(new, key)}" for key in changed[:_MOST_KEYS]]
    more = [f"{len(changed) - _MOST_KEYS} more"] if len(changed) > _MOST_KEYS else []
    return ", ".join([*said, *more]) or "the order of its keys"


def _said(values: Mapping[str, str], key: str) -> str:
    if key not in values:
        return "(absent)"
    return "(hidden)" if is_secret(key) else shortened(values[key])


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, part in value.items() for leaf in _leaves(part, f"{prefix}.{key}".lstrip("."))]
    # Use repr, as 1, 1.0 and '1' are different configs.
    return [(prefix, repr(value))]


_log = logging.getLogger(__name__)


class Submissions(Protocol):
    """Jobs of earlier runs that may still be on a cluster.

    Attributes:
        executor: Submitit's name of the cluster whose jobs this sweep can wait for. Empty if it cannot wait for any.
    """

    executor: str

    def find_orphans(self, record: SweepRecord, *, fence: bool) -> None:
        """Add the ids of jobs that were submitted, but not recorded as submitted, to their records."""

    def state_of(self, job: JobRecord) -> str:
        """Return the state of a job, or an empty string if it has ended.

        Raises:
            StartError: if the cluster does not report it.
        """

    def how_to_cancel(self, job: JobRecord) -> str:
        """Return a sentence, without the final period, on how to cancel a job."""


@dataclass(frozen=True)
class SweepState:
    """What a sweep has recorded so far, and where it records from now on.

    Attributes:
        lock: The sweep lock, or None if nothing is written.
        recorder: Records what happens.
        previous: Jobs of earlier runs.
    """

    lock: SweepLock | None
    recorder: SweepRecorder
    previous: PreviousRuns

    @property
    def held(self) -> tuple[int, ...]:
        """Descriptors that keepers hold, so that no other sweep takes the directory while ranks of this one run."""
        return () if self.lock is None else (self.lock.descriptor,)


def open_sweep_dir(paths: SweepPaths, settings: LaunchSettings, submissions: Submissions) -> SweepState:
    """Lock the sweep directory, and begin or continue its record.

    Args:
        paths: Files of the sweep.
        settings: Options of the launcher.
        submissions: Jobs of earlier runs that may still be on a cluster.

    Raises:
        StartError: if another sweep has the directory, or it cannot be used.
    """
    lock = _lock_directory(paths, settings, submissions)
    record, previous = _read_previous(paths, settings, submissions, fence=True)
    recorder = SweepRecorder(paths, record)
    recorder.record(_beginning(settings, paths.sweep_dir))
    return SweepState(lock, recorder, previous)


def read_sweep_dir(paths: SweepPaths, settings: LaunchSettings, submissions: Submissions) -> SweepState:
    """Read the state of a sweep for a dry run, without writing anything.

    Raises:
        StartError: if it cannot be read.
    """
    record, previous = _read_previous(paths, settings, submissions, fence=False)
    recorder = SweepRecorder(None, record)
    recorder.record(_beginning(settings, paths.sweep_dir))
    return SweepState(None, recorder, previous)


def _read_previous(
    paths: SweepPaths, settings: LaunchSettings, submissions: Submissions, *, fence: bool
) -> tuple[SweepRecord | None, PreviousRuns]:
    record = None if settings.resume is None else _read_earlier(paths)
    if record is None:
        return None, PreviousRuns()
    submissions.find_orphans(record, fence=fence)
    _refuse_jobs_of_other_launchers(record, submissions)
    return record, PreviousRuns(record, settings.resume)


def _read_earlier(paths: SweepPaths) -> SweepRecord | None:
    """Return what earlier runs in the sweep directory have recorded, or None if there were none."""
    try:
        record = read_journal(paths.journal)
    except FileNotFoundError:
        _log.info(
            "There is nothing to resume in %s: all jobs are new. An earlier sweep goes on in its own hydra.sweep.dir",
            paths.sweep_dir,
        )
        return None
    except OSError as error:
        raise StartError(
            f"The journal of the sweep cannot be read: {error.strerror}: {paths.journal}. Make it readable, or "
            "choose another hydra.sweep.dir."
        ) from None
    if record.formats - {FORMAT}:
        raise StartError(
            f"Cannot resume the sweep in {paths.sweep_dir}: another version of this package ran it, and stored the "
            "outcomes of its jobs in a format that this one cannot read. Resume it with that version, or choose "
            "another hydra.sweep.dir."
        )
    if record.unreadable:
        _log.warning(
            "In %s %s cannot be read: damaged, or of a later version of this package. The rest is used",
            paths.journal,
            pluralize(record.unreadable, "line"),
        )
    return record


def _lock_directory(paths: SweepPaths, settings: LaunchSettings, submissions: Submissions) -> SweepLock:
    """Lock the sweep directory, and move the record of an earlier sweep aside, unless it is resumed."""
    try:
        os.makedirs(paths.folder, exist_ok=True)
        lock = SweepLock(paths.claim)
        keep = settings.resume is not None
        recorded = [path for path in (paths.journal, paths.results) if os.path.exists(path) and not keep]
        if paths.journal in recorded:
            record = read_journal(paths.journal)
            submissions.find_orphans(record, fence=True)
            _refuse_jobs_on_cluster(record, paths.sweep_dir, submissions)
        aside = move_aside(paths.folder, recorded)
    except OSError as error:
        why = error.strerror or str(error)
        where = error.filename or paths.folder
        raise StartError(
            f"Cannot use sweep directory {paths.sweep_dir}: {why}: {where}. Fix that, or choose another "
            "hydra.sweep.dir."
        ) from None
    if aside is not None:
        _log.info("What an earlier sweep recorded in this directory is now in %s", aside)
    return lock


def _refuse_jobs_on_cluster(record: SweepRecord, sweep_dir: str, submissions: Submissions) -> None:
    """Refuse a sweep whose jobs could share run directories with jobs of an earlier run that are on a cluster."""
    for job in [*record.past, *record.touched()]:
        if state := submissions.state_of(job):
            raise StartError(
                f"Job {job.number} of an earlier run of the sweep {sweep_dir} is still on the cluster ({job.job_id}, "
                f"{state}). With hydra/launcher=ddp_submitit_{job.executor} and hydra.launcher.resume=unfinished a run "
                f"waits for it. {submissions.how_to_cancel(job)}, or choose another hydra.sweep.dir, to begin anew."
            )


def _refuse_jobs_of_other_launchers(record: SweepRecord, submissions: Submissions) -> None:
    """Refuse to resume while jobs that this launcher cannot wait for are on a cluster."""
    for job in [*record.past, *record.touched()]:
        if job.executor != submissions.executor and (state := submissions.state_of(job)):
            raise StartError(
                f"Job {job.number} of an earlier run is still on the cluster ({job.job_id}, {state}), and this "
                f"launcher cannot wait for it. Use hydra/launcher=ddp_submitit_{job.executor}. "
                f"{submissions.how_to_cancel(job)}, or wait for its end, to go on with this one."
            )


def _beginning(settings: LaunchSettings, sweep_dir: str) -> SweepBegan:
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""  # It was deleted.
    return SweepBegan(
        time.time(),
        os.getpid(),
        processes.host(),
        quoting.masked(sys.orig_argv),
        cwd,
        __version__,
        settings.limits.grace_period_s,
        sweep_dir,
        FORMAT,
    )
