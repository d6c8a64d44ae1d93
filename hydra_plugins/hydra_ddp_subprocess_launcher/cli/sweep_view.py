"""A sweep seen from outside its launching process: where it is, whether it runs, and what its journal says.

This module does without Hydra, which takes longer to import than everything else that a command needs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ..common.files import JobPaths, SweepPaths
from ..records.events import Event, JobRecord, JobState, SweepRecord
from ..records.journal import read_events
from ..records.sweep_lock import LockOwner, live_owner, read_owner

_MULTIRUN = "multirun"
# Levels below ./multirun to search for a sweep. Hydra's own layout has two, a date and a time.
_DEEPEST = 4
_MOST_NAMED = 10


class CommandError(Exception):
    """Report why a command of `hydra-ddp` failed.

    Args:
        message: What happened, why, and what next.
        code: Exit code: 2 if something is not there or was asked for wrongly, 1 if it did not work.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class SweepStatus(Enum):
    """Whether a sweep runs, and how it ended if not."""

    LIVE = "running"
    ENDED = "ended"
    STOPPED = "stopped"
    KILLED = "killed"


@dataclass(frozen=True)
class SweepSnapshot:
    """A sweep at one moment.

    Attributes:
        paths: Where it is.
        status: Whether it runs, and how it ended if not.
        holder: Its launching process, or None if that exited by itself.
        events: All that happened, in order.
        record: The state that these events lead to; once the sweep is over, jobs are lost or never started.
    """

    paths: SweepPaths
    status: SweepStatus
    holder: LockOwner | None
    events: tuple[Event, ...]
    record: SweepRecord

    @property
    def live(self) -> bool:
        """Whether it runs."""
        return self.status is SweepStatus.LIVE

    def job(self, number: int) -> JobRecord:
        """Return a job.

        Raises:
            CommandError: when there is none with this number.
        """
        if number not in self.record.jobs:
            has = f"its jobs are {numbers(list(self.record.jobs))}" if self.record.jobs else "it has none yet"
            raise CommandError(f"There is no job {number} in the sweep {self.paths.sweep_dir}: {has}.", 2)
        return self.record.jobs[number]

    def started_job(self, number: int) -> JobRecord:
        """Return a job that was started.

        Raises:
            CommandError: when it was not.
        """
        job = self.job(number)
        if not job.run_dir:
            waits = job.state in (JobState.WAITING, JobState.PENDING)
            why = "has not been started yet; `hydra-ddp status` shows what runs." if waits else "was never started."
            raise CommandError(f"Job {number} {why} {job.cause}".rstrip())
        return job


def folder_of(job: JobRecord) -> str:
    """Return the folder with a job's files, which a later job in the same run directory may have moved aside."""
    paths = JobPaths(job.run_dir)
    folders = [paths.folder, *map(paths.earlier, sorted(_earlier(paths), reverse=True))]
    return next((folder for folder in folders if _holds(folder, job)), paths.folder)


def _earlier(paths: JobPaths) -> list[int]:
    try:
        names = os.listdir(paths.folder)
    except OSError:
        return []
    ends = [name.removeprefix("earlier_") for name in names if name.startswith("earlier_")]
    return [int(end) for end in ends if end.isdecimal()]


def _holds(folder: str, job: JobRecord) -> bool:
    try:
        facts = json.loads(Path(folder, os.path.basename(JobPaths("").facts)).read_bytes())
        # Not its number, which another job may have had in an earlier run of the sweep.
        if job.run_id:
            return bool(facts["environment"]["TORCHELASTIC_RUN_ID"] == job.run_id)
        return bool(facts["job"] == job.number)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


class SweepReader:
    """Follow a sweep; read its journal whenever it has changed."""

    def __init__(self, paths: SweepPaths) -> None:
        self._paths = paths
        self._state: tuple[int, ...] = ()
        self._events: tuple[Event, ...] = ()

    def look(self) -> SweepSnapshot:
        """Return the sweep as it is now.

        Raises:
            CommandError: when that cannot be read.
        """
        try:
            # The lock first: otherwise jobs that end in between would count as lost.
            holder, live = _holder(self._paths.claim)
            journal = os.stat(self._paths.journal)
            state = (journal.st_ino, journal.st_size, journal.st_mtime_ns)
            if state != self._state:
                self._state, self._events = state, tuple(read_events(self._paths.journal))
        except OSError as error:
            raise CommandError(
                f"{error.filename} cannot be read: {error.strerror}. Without it nothing is known of this sweep."
            ) from None
        record = SweepRecord()
        for event in self._events:
            record.apply(event)
        if live:
            return SweepSnapshot(self._paths, SweepStatus.LIVE, holder, self._events, record)
        status = SweepStatus.STOPPED if record.stopped_by else SweepStatus.ENDED
        return SweepSnapshot(
            self._paths, SweepStatus.KILLED if holder is not None else status, holder, self._events, _as_left(record)
        )


def _holder(claim: str) -> tuple[LockOwner | None, bool]:
    """Return the process that has the sweep lock, or had it when it was killed, and whether it is alive."""
    try:
        os.close(os.open(claim, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return None, False  # The sweep was copied without its lock.
    live = live_owner(claim)
    return (live, True) if live is not None else (read_owner(claim), False)


def _as_left(record: SweepRecord) -> SweepRecord:
    """Return the record of a sweep that is over, in which no job runs or waits."""
    become = {
        JobState.WAITING: JobState.NEVER_STARTED,
        JobState.PENDING: JobState.LOST,
        JobState.RUNNING: JobState.LOST,
        JobState.PAUSED: JobState.LOST,
    }
    jobs = {number: replace(job, state=become.get(job.state, job.state)) for number, job in record.jobs.items()}
    return replace(record, jobs=jobs)


def in_words(snapshot: SweepSnapshot) -> str:
    """Return what has become of a sweep."""
    lost = [job.number for job in snapshot.record.in_state(JobState.LOST)]
    jobs = f"job {lost[0]} was" if len(lost) == 1 else f"jobs {numbers(lost)} were"
    left = f", while {jobs} running" if lost else ""
    ids = [job.job_id for job in snapshot.record.in_state(JobState.LOST) if job.job_id]
    if ids:
        left += f"; on the cluster they may go on ({', '.join(ids)}), and hydra.launcher.resume=unfinished finds them"
    elif any(job.submitit_folder for job in snapshot.record.in_state(JobState.LOST)):
        left += "; whether they are on the cluster, hydra.launcher.resume=unfinished finds out"
    holder = snapshot.holder
    if holder is None:
        how = f"Stopped by {snapshot.record.stopped_by}" if snapshot.status is SweepStatus.STOPPED else "Ended"
        at = f" at {_local(snapshot.events[-1].at)}" if snapshot.events else ""
        return f"{how}{at}{left}."
    process = f"process {holder.pid} on {holder.host}, since {holder.since}"
    if snapshot.live:
        stopping = f"; being stopped after {snapshot.record.stopped_by}" if snapshot.record.stopped_by else ""
        return f"Running: {process}{stopping}."
    seen = "" if holder.here else f" Or the file system does not show here what is locked on {holder.host}."
    return f"Its launching process was killed ({process}){left or '; no job was running'}.{seen}"


def _local(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def numbers(jobs: Sequence[int]) -> str:
    """Format numbers for people: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(jobs):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_MOST_NAMED]]
    return ", ".join(shown) + (", …" if len(runs) > _MOST_NAMED else "")


def chosen_sweep(directory: str) -> SweepPaths:
    """Return the sweep in a directory that was named.

    Raises:
        CommandError: when there is none.
    """
    paths = SweepPaths(os.path.abspath(directory))
    if not os.path.isdir(paths.sweep_dir):
        what = "is no directory" if os.path.lexists(paths.sweep_dir) else "does not exist"
        raise CommandError(f"{paths.sweep_dir} {what}. Name a sweep directory, such as multirun/DATE/TIME.", 2)
    if not os.path.exists(paths.journal):
        below = newest_sweep(paths.sweep_dir)
        hint = f" There is one below it: {below.sweep_dir}" if below is not None else ""
        raise CommandError(
            f"There is no sweep in {paths.sweep_dir}: it has no .ddp/journal.jsonl, which "
            f"hydra/launcher=ddp_subprocess writes into the sweep directory (hydra.sweep.dir). Name another "
            f"(-d DIR).{hint}",
            2,
        )
    return paths


def default_sweep() -> SweepPaths | None:
    """Return the sweep in the current directory, else the newest one below ./multirun, or None."""
    here = SweepPaths(os.getcwd())
    return here if os.path.exists(here.journal) else newest_sweep(os.path.abspath(_MULTIRUN))


def newest_sweep(folder: str) -> SweepPaths | None:
    """Return the sweep below a folder whose journal was written last, or None."""
    found = [(os.stat(paths.journal).st_mtime_ns, paths.sweep_dir) for paths in _sweeps_below(folder)]
    return SweepPaths(max(found)[1]) if found else None


def _sweeps_below(folder: str) -> Iterator[SweepPaths]:
    for path, folders, _ in os.walk(folder):
        paths = SweepPaths(path)
        if os.path.exists(paths.journal):
            yield paths
        # A job may have very many files, and no sweep is among them.
        if os.path.exists(paths.journal) or path[len(folder) :].count(os.sep) >= _DEEPEST:
            folders.clear()
