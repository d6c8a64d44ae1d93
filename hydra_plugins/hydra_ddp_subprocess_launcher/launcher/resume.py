"""What earlier runs of the sweep have left to do: `resume`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from .. import __version__
from ..common import processes, quoting
from ..common.choices import Resume
from ..common.errors import StartError
from ..common.files import JobPaths, SweepPaths, find_outcome, move_aside
from ..common.quoting import is_secret
from ..common.text import pluralize
from ..groups.rendezvous import JobFolder
from ..job import results
from ..job.results import JobResult
from ..job.settings import LaunchSettings
from ..records.events import NO_NUMBERS, JobRecord, JobState, SweepBegan, SweepRecord, json_value, short_text, shortened
from ..records.journal import SweepRecorder, read_journal
from ..records.sweep_lock import SweepLock
from ..slurm.jobs import find_orphans
from ..slurm.submitit_api import Cluster, how_to_cancel, still_there

_MOST_KEYS = 3


@dataclass(frozen=True)
class ResumeDecision:
    """What becomes of a job.

    Attributes:
        why: In a few words.
        verdict: How it ended, if it is not run; None: it is run.
    """

    why: str
    verdict: JobResult | None = None


class PreviousRuns:
    """The jobs of the earlier runs of a sweep.

    Args:
        record: What is known about them.
        choice: What to do about them.
    """

    def __init__(self, record: SweepRecord, choice: Resume) -> None:
        self._choice = choice
        known = [*record.past, *record.touched()]
        self._by_key: dict[tuple[int, tuple[str, ...], str], list[JobRecord]] = {}
        self._keys: dict[tuple[tuple[str, ...], str], list[tuple[int, tuple[str, ...], str]]] = {}
        for job in known:
            self._by_key.setdefault(job.key, []).append(job)
        for key in self._by_key:
            self._keys.setdefault(key[1:], []).append(key)
        self._said_new = False
        self._lost: dict[tuple[int, tuple[str, ...], str], list[JobRecord]] = {}
        self._taken = {folder for job in known for folder in (job.run_dir, job.planned_dir) if folder}

    def first_new(self) -> bool:
        """Return whether this is called for the first time, for what is to be said once."""
        first, self._said_new = not self._said_new, True
        return first

    def find(self, number: int, overrides: Sequence[str], task: str, config_hash: str) -> JobRecord | None:
        """Return what is known about a job, each record once: the one of its number, else one with its overrides.

        Of several runs of it the last one counts, unless an earlier one has completed with its config.

        Args:
            number: Number of the job.
            overrides: Its override strings.
            task: Which function of the program it runs.
            config_hash: SHA-256 of its own config now, hexadecimal.
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
        """Return the runs of a job, after `find`, that may still be on a cluster, as nobody has seen their end.

        Args:
            number: As of `find`.
            overrides: As of `find`.
            task: As of `find`.
        """
        runs = map(_as_stored, self._lost.get((number, tuple(overrides), task), ()))
        return [job for job in runs if not job.state.over]

    def left_out(self) -> list[JobRecord]:
        """Return the runs of jobs that were not asked for with `find`, and may still be on a cluster."""
        keys = [key for keys in self._keys.values() for key in keys]
        runs = [_as_stored(job) for key in keys for job in self._by_key[key] if job.job_id]
        return [job for job in runs if not job.state.over]

    def directory(self, run_dir: str, known: JobRecord | None) -> str:
        """Return a run directory that no other job has, for one that is new, or whose own directory is gone.

        Args:
            run_dir: What its config says.
            known: What is known about it; None: it is new.
        """
        found, count = run_dir, 1
        while found in self._taken and (known is None or found not in (known.run_dir, known.planned_dir)):
            count += 1
            found = f"{run_dir}-{count}"
        self._taken.add(found)
        return found

    def decide(self, job: JobRecord | None, config_yaml: str, config_hash: str) -> ResumeDecision:
        """Decide what becomes of a job.

        Args:
            job: What is known about it; None: nothing.
            config_yaml: Its own config now.
            config_hash: SHA-256 of that, hexadecimal.
        """
        if job is None or job.state not in (JobState.COMPLETED, JobState.FAILED):
            why = "new" if job is None else "not finished before"
            return ResumeDecision(why) if self._choice is Resume.unfinished else _left_out(why)
        if job.state is JobState.FAILED:
            return ResumeDecision(f"failed before ({shortened(job.cause)})")
        if job.config_hash != config_hash:
            why = f"config changed in {_difference(job, config_yaml)}"
            return ResumeDecision(why) if self._choice is Resume.unfinished else _left_out(why)
        verdict = _stored(job)
        if verdict is None:
            return ResumeDecision("done, but its value cannot be read any more")
        return ResumeDecision("done", verdict)


def _left_out(why: str) -> ResumeDecision:
    return ResumeDecision(
        why, results.skipped(f"{why}, and hydra.launcher.resume=failed runs only what has failed before")
    )


def _as_stored(job: JobRecord) -> JobRecord:
    """Return a job as over if its ranks had all stored that, or its nodes told so, when nobody was left to note it."""
    end = JobFolder(job.folder).read_end() if job.folder and not job.state.over else None
    if end is not None and end.start is not None:
        job = replace(job, run_dir=end.start.run_dir, run_id=end.start.run_id, nproc=end.start.group.world_size)
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
    """Return how a completed job ended, with its value; None where that is lost."""
    outcome = find_outcome(JobPaths(job.run_dir), 0, job.run_id)
    if outcome is not None and outcome.completed:
        value, _ = results.value_of(outcome)
        return JobResult(completed=True, value=value, kept=job)
    return JobResult(completed=True, value=_from_json(job.value), kept=job) if job.exact else None


def _from_json(value: Any) -> Any:
    """Return what `json_value` was made from, as far as JSON can tell."""
    if isinstance(value, str) and value in NO_NUMBERS:
        return float(value)
    if isinstance(value, Mapping):
        return {key: _from_json(part) for key, part in value.items()}
    return [_from_json(part) for part in value] if isinstance(value, list | tuple) else value


def _difference(job: JobRecord, config_yaml: str) -> str:
    """Say in which keys a job's config has changed."""
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
    # As Python writes it: 1, 1.0 and '1' are different configs.
    return [(prefix, repr(value))]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepState:
    """The books of a sweep.

    Attributes:
        claim: On its directory; None: it has none.
        ledger: What has happened.
        earlier: What earlier runs have left to do; None: nothing is resumed.
    """

    claim: SweepLock | None
    ledger: SweepRecorder
    earlier: PreviousRuns | None


def open_sweep_dir(paths: SweepPaths, settings: LaunchSettings, cluster: Cluster | None) -> SweepState:
    """Take the sweep directory, and begin or go on with the books in it.

    Args:
        paths: Where the sweep is.
        settings: Options of the launcher.
        cluster: What jobs ask of submitit; None: they run here.

    Raises:
        StartError: when another sweep has the directory, or it cannot be used.
    """
    claim = _take_directory(paths, settings)
    record, earlier = _earlier(paths, settings, cluster, fence=True)
    ledger = SweepRecorder(paths, record)
    ledger.note(_beginning(settings, paths.sweep_dir))
    return SweepState(claim, ledger, earlier)


def read_sweep_dir(paths: SweepPaths, settings: LaunchSettings, cluster: Cluster | None) -> SweepState:
    """Return the books that a dry run reads, and does not write.

    Args:
        paths: As of `open_books`.
        settings: As of `open_books`.
        cluster: As of `open_books`.

    Raises:
        StartError: when they cannot be read.
    """
    record, earlier = _earlier(paths, settings, cluster, fence=False)
    ledger = SweepRecorder(None, record)
    ledger.note(_beginning(settings, paths.sweep_dir))
    return SweepState(None, ledger, earlier)


def _earlier(
    paths: SweepPaths, settings: LaunchSettings, cluster: Cluster | None, *, fence: bool
) -> tuple[SweepRecord | None, PreviousRuns | None]:
    if settings.resume is None:
        return None, None
    record = _read_earlier(paths)
    if record is None:
        return None, None
    find_orphans(record, fence=fence)
    _refuse_jobs_of_other_launchers(record, cluster)
    return record, PreviousRuns(record, settings.resume)


def _read_earlier(paths: SweepPaths) -> SweepRecord | None:
    """Return what earlier runs in the sweep directory have recorded; None: there was none."""
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
    if record.unreadable:
        _log.warning(
            "In %s %s cannot be read: damaged, or of a later version of this package. The rest is used",
            paths.journal,
            pluralize(record.unreadable, "line"),
        )
    return record


def _take_directory(paths: SweepPaths, settings: LaunchSettings) -> SweepLock:
    """Claim the sweep directory, and move aside what an earlier sweep has recorded there, unless it is to be kept."""
    try:
        os.makedirs(paths.folder, exist_ok=True)
        claim = SweepLock(paths.claim)
        keep = settings.resume is not None
        recorded = [path for path in (paths.journal, paths.results) if os.path.exists(path) and not keep]
        if paths.journal in recorded:
            record = read_journal(paths.journal)
            find_orphans(record, fence=True)
            _refuse_jobs_on_cluster(record, paths.sweep_dir)
        aside = move_aside(paths.folder, recorded)
    except OSError as error:
        why = error.strerror or str(error)
        where = error.filename or paths.folder
        raise StartError(
            f"The sweep directory {paths.sweep_dir} cannot be used: {why}: {where}. Mend that, or choose another "
            "hydra.sweep.dir."
        ) from None
    if aside is not None:
        _log.info("What an earlier sweep recorded in this directory is now in %s", aside)
    return claim


def _refuse_jobs_on_cluster(record: SweepRecord, sweep_dir: str) -> None:
    """Refuse a sweep whose jobs could share run directories with those that an earlier launching process has left."""
    for job in [*record.past, *record.touched()]:
        if state := still_there(job):
            raise StartError(
                f"Job {job.number} of an earlier run of the sweep {sweep_dir} is still on the cluster ({job.job_id}, "
                f"{state}). With hydra/launcher=ddp_submitit_{job.executor} and hydra.launcher.resume=unfinished a run "
                f"waits for it. {how_to_cancel(job)}, or choose another hydra.sweep.dir, to begin anew."
            )


def _refuse_jobs_of_other_launchers(record: SweepRecord, cluster: Cluster | None) -> None:
    """Refuse to go on beside jobs for which this launcher cannot wait."""
    own = "" if cluster is None else cluster.executor
    for job in [*record.past, *record.touched()]:
        if job.executor != own and (state := still_there(job)):
            raise StartError(
                f"Job {job.number} of an earlier run is still on the cluster ({job.job_id}, {state}), and this "
                f"launcher cannot wait for it. Use hydra/launcher=ddp_submitit_{job.executor}. {how_to_cancel(job)}, "
                "or wait for its end, to go on with this one."
            )


def _beginning(settings: LaunchSettings, sweep_dir: str) -> SweepBegan:
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""  # Somebody deleted it.
    return SweepBegan(
        time.time(),
        os.getpid(),
        processes.host(),
        quoting.masked(sys.orig_argv),
        cwd,
        __version__,
        settings.limits.grace_period_s,
        sweep_dir,
    )
