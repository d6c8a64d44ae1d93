"""Events of a sweep, and the records of its jobs that result from them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, get_args

_LONGEST_TEXT = 60
# Python refuses to print much longer integers, and deeper values are unreadable anyway.
_MOST_BITS = 4096
_MOST_DEEP = 20
# Floats that JSON lacks, from Python's to JavaScript's names.
_NO_NUMBERS_OF = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
NO_NUMBERS = frozenset(_NO_NUMBERS_OF.values())


@dataclass(frozen=True)
class SweepBegan:
    """A launching process has acquired the sweep lock.

    Attributes:
        at: Unix time in seconds, as in all events.
        pid: Pid of the launching process.
        host: Its host.
        argv: Its command line.
        cwd: Directory in which it was started.
        launcher: Version of this package.
        grace_period_s: The option; None if unknown.
        sweep_dir: Sweep directory, absolute; it may have been moved since.
        format: Format of the files stored for other processes (`files.FORMAT`); 1 if the journal does not say.
    """

    at: float
    pid: int
    host: str
    argv: tuple[str, ...]
    cwd: str
    launcher: str
    grace_period_s: float | None = None
    sweep_dir: str = ""
    format: int = 1


@dataclass(frozen=True)
class JobsAdded:
    """The sweeper has passed a batch of jobs to the launcher.

    Attributes:
        at: Unix time in seconds.
        first: Number of the first job; the others are consecutive.
        overrides: Override strings, one tuple per job.
        at_once: Maximum number of jobs that run at the same time.
        task: Function of the program that the jobs run.
    """

    at: float
    first: int
    overrides: tuple[tuple[str, ...], ...]
    at_once: int
    task: str = ""


@dataclass(frozen=True)
class JobSubmitted:
    """A job is pending on a cluster: it is about to be submitted, was submitted, or was requeued.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        job_id: Its id on the cluster; empty if it is only about to be submitted.
        folder: Folder in which its nodes report its state, absolute.
        config_hash: SHA-256 of its own config, hexadecimal.
        executor: Submitit's name of the cluster.
        planned_dir: Run directory that it will have, absolute; empty if that depends on an id that is not known yet.
        submitit_folder: Folder of the submitit file from which to find the id, absolute, with submitit's placeholders,
            such as `%j`; empty if the id is known.
    """

    at: float
    job: int
    job_id: str
    folder: str
    config_hash: str
    executor: str
    planned_dir: str
    submitit_folder: str = ""


@dataclass(frozen=True)
class JobStarted:
    """The ranks of a job are being started.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        attempt: Number of earlier starts of the job.
        nproc: Number of ranks.
        devices: Ids of its devices; empty if none.
        run_dir: Run directory, absolute.
        run_id: Name of this start, which its outcomes contain.
        config_hash: SHA-256 of the job's own config, hexadecimal.
        nodes: Host names of its nodes; empty if it runs on the host of the launching process.
    """

    at: float
    job: int
    attempt: int
    nproc: int
    devices: tuple[str, ...]
    run_dir: str
    run_id: str = ""
    config_hash: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobPaused:
    """A start of a job has failed, and another one follows.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        why: How that start failed.
    """

    at: float
    job: int
    why: str


@dataclass(frozen=True)
class JobEnded:
    """A job is over.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        completed: Whether it completed; otherwise it failed.
        value: Its value, as returned by `json_value`.
        text: Its value as a short text.
        cause: Why it failed, one line; empty if it completed.
        seconds: Seconds since its first start; None if it was never started.
        exact: Whether `value` is the complete value.
        ungrouped: Whether it has several ranks that imported torch.distributed, but opened no process group.
    """

    at: float
    job: int
    completed: bool
    value: Any
    text: str
    cause: str
    seconds: float | None
    exact: bool = False
    ungrouped: bool = False


@dataclass(frozen=True)
class JobKept:
    """A job is not run, because an earlier run of the sweep completed it.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        attempts: Total number of its starts.
        nproc: Number of ranks.
        devices: Ids of its devices.
        run_dir: Run directory, absolute.
        run_id: Name of the start that completed.
        config_hash: SHA-256 of its own config, hexadecimal.
        began_at: First start, Unix time in seconds.
        ended_at: End, Unix time in seconds.
        seconds: Seconds from the first start to the end.
        value: As in JobEnded.
        exact: As in JobEnded.
        text: As in JobEnded.
        ungrouped: As in JobEnded.
    """

    at: float
    job: int
    attempts: int
    nproc: int
    devices: tuple[str, ...]
    run_dir: str
    run_id: str
    config_hash: str
    began_at: float | None
    ended_at: float | None
    seconds: float | None
    value: Any
    exact: bool
    text: str
    ungrouped: bool = False


@dataclass(frozen=True)
class JobSkipped:
    """A job is not run.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        why: The reason, one line.
    """

    at: float
    job: int
    why: str


@dataclass(frozen=True)
class SweepStopped:
    """A signal has stopped the sweep.

    Attributes:
        at: Unix time in seconds.
        signal: Name of the signal.
    """

    at: float
    signal: str


JobEvent = JobSubmitted | JobStarted | JobPaused | JobEnded | JobKept | JobSkipped
Event = SweepBegan | JobsAdded | JobEvent | SweepStopped
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


def json_value(value: Any) -> tuple[Any, bool]:
    """Convert a job's value to JSON types; return it and whether it is exact, so that the value can be restored.

    NaN and the infinities, which JSON lacks, become the strings `NaN`, `Infinity` and `-Infinity`. NumPy scalars become
    numbers, keys become strings, tuples become lists, and parts that JSON cannot represent become short texts.
    """
    try:
        return _json_value(value, 0)
    except (Exception, SystemExit):  # noqa: BLE001  (an object of the user's may raise anything on any access)
        return short_text(value), False


def _json_value(value: Any, depth: int) -> tuple[Any, bool]:
    if value is None or type(value) in (bool, str):
        return value, value not in NO_NUMBERS
    if type(value) is int and value.bit_length() < _MOST_BITS:
        return value, True
    if isinstance(value, float):
        text = str(float(value))
        return _NO_NUMBERS_OF.get(text, float(value)), type(value) is float
    if isinstance(value, Mapping) and depth < _MOST_DEEP:
        parts = {str(key): _part(part, depth) for key, part in value.items()}
        exact = type(value) is dict and all(type(key) is str for key in value)
        return {key: part for key, (part, _) in parts.items()}, exact and all(whole for _, whole in parts.values())
    if isinstance(value, list | tuple) and depth < _MOST_DEEP:
        listed = [_part(part, depth) for part in value]
        return [part for part, _ in listed], type(value) is list and all(whole for _, whole in listed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _json_value(value.item(), depth)[0], False
    return short_text(value), False


def _part(value: Any, depth: int) -> tuple[Any, bool]:
    # A part that raises must not hide the others.
    try:
        return _json_value(value, depth + 1)
    except (Exception, SystemExit):  # noqa: BLE001  (as above)
        return short_text(value), False


def short_text(value: Any) -> str:
    """Return a text for a value, of at most 60 characters."""
    try:
        return shortened(f"{value:.6g}" if isinstance(value, float) else repr(value))
    except (Exception, SystemExit):  # noqa: BLE001  (a user's __repr__ may raise anything)
        return type(value).__name__


def shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    """Return a text on one line, cut to `most` characters with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


class JobState(Enum):
    """State of a job."""

    WAITING = "waiting"
    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "FAILED"
    LOST = "lost"
    NEVER_STARTED = "never started"

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self in (JobState.COMPLETED, JobState.FAILED)


@dataclass(frozen=True)
class JobRecord:
    """The record of one job.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        task: Function of the program that it runs.
        state: Its state.
        attempts: Number of its starts.
        nproc: Number of ranks; 0 if not known yet.
        devices: Ids of its devices; empty if it has none or has not started yet.
        run_dir: Run directory; empty if it has not started yet.
        run_id: Name of its last start; empty if it has not started yet.
        config_hash: SHA-256 of its own config, hexadecimal; empty if it has not started yet.
        began_at: First start, Unix time in seconds; None if it has not started yet.
        ended_at: End, Unix time in seconds; None if it has not ended yet.
        seconds: Seconds from the first start to the end; None if it has not ended, or was never started.
        value: As in JobEnded.
        exact: As in JobEnded.
        text: As in JobEnded.
        ungrouped: As in JobEnded.
        cause: Why it failed or is not run; if paused, why its last start failed.
        job_id: Its id on a cluster; empty if it is on no cluster, or its id is not recorded yet (`submitit_folder`).
        folder: Folder in which its nodes report its state; empty if it is on no cluster.
        nodes: Host names of its nodes; empty if it is on no cluster, or has not started yet.
        executor: Submitit's name of the cluster; empty if it is on no cluster.
        planned_dir: Run directory that it will have; empty if it is on no cluster, or that is not known yet.
        submitit_folder: As in JobSubmitted; empty if it is on no cluster, or its id is known.
    """

    number: int
    overrides: tuple[str, ...]
    state: JobState = JobState.WAITING
    attempts: int = 0
    nproc: int = 0
    devices: tuple[str, ...] = ()
    run_dir: str = ""
    run_id: str = ""
    config_hash: str = ""
    began_at: float | None = None
    ended_at: float | None = None
    seconds: float | None = None
    value: Any = None
    exact: bool = False
    text: str = ""
    ungrouped: bool = False
    cause: str = ""
    task: str = ""
    job_id: str = ""
    folder: str = ""
    nodes: tuple[str, ...] = ()
    executor: str = ""
    planned_dir: str = ""
    submitit_folder: str = ""

    @property
    def key(self) -> tuple[int, tuple[str, ...], str]:
        """Key that identifies the job in every run of the sweep."""
        return self.number, self.overrides, self.task


@dataclass
class SweepRecord:
    """The record of a sweep.

    Attributes:
        began: Event of the process that runs it, or ran it last; None if unknown.
        jobs: Jobs of the current run by number, in the order in which the sweeper passed them.
        at_once: Maximum number of jobs of the current batch that run at the same time.
        stopped_by: Name of the signal that stopped it; empty if none.
        shared: Overrides that all jobs have in common, if there are several jobs.
        unreadable: Number of unreadable lines in the journal.
        past: Records from earlier runs of jobs that were started or have ended, oldest first.
        formats: Formats of the files that the runs have stored for other processes.
    """

    began: SweepBegan | None = None
    jobs: dict[int, JobRecord] = field(default_factory=dict)
    at_once: int = 1
    stopped_by: str = ""
    shared: frozenset[str] = frozenset()
    unreadable: int = 0
    past: list[JobRecord] = field(default_factory=list)
    formats: set[int] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Update the record with the next event."""
        if isinstance(event, SweepBegan):
            self.past += self.touched()
            self.began, self.stopped_by, self.jobs, self.shared = event, "", {}, frozenset()
            self.formats.add(event.format)
        elif isinstance(event, JobsAdded):
            self._add(event)
        elif isinstance(event, SweepStopped):
            self.stopped_by = event.signal
        elif event.job in self.jobs:
            job = self.jobs[event.job]
            if isinstance(event, JobStarted) and job.state is JobState.COMPLETED:
                self.past.append(job)
            self.jobs[event.job] = _after(job, event)

    def _add(self, event: JobsAdded) -> None:
        self.at_once = event.at_once
        earlier = [self.shared] if len(self.jobs) > 1 else [job.overrides for job in self.jobs.values()]
        known = {job.key: job for job in self.past if job.attempts}
        for number, overrides in enumerate(event.overrides, start=event.first):
            job = JobRecord(number, tuple(overrides), task=event.task)
            before = known.get(job.key, job)
            # A completed job stays completed until it is started again.
            if before.state is not JobState.COMPLETED:
                before = replace(before, state=JobState.WAITING, cause="", began_at=None, ended_at=None, seconds=None)
                before = replace(
                    before, job_id="", folder="", nodes=(), executor="", planned_dir="", submitit_folder=""
                )
            self.jobs[number] = before
        if len(self.jobs) > 1:
            self.shared = frozenset.intersection(*map(frozenset, [*earlier, *event.overrides]))

    def touched(self) -> list[JobRecord]:
        """Return the jobs of this run, except those that are waiting or never started."""
        return [job for job in self.jobs.values() if job.state not in (JobState.WAITING, JobState.NEVER_STARTED)]

    def by_state(self) -> dict[JobState, list[JobRecord]]:
        """Return the jobs by state, with a list for every state."""
        found: dict[JobState, list[JobRecord]] = {state: [] for state in JobState}
        for job in self.jobs.values():
            found[job.state].append(job)
        return found

    def in_state(self, *states: JobState) -> list[JobRecord]:
        """Return the jobs in any of these states."""
        return [job for job in self.jobs.values() if job.state in states]


def _after(job: JobRecord, event: JobEvent) -> JobRecord:
    if isinstance(event, JobKept):
        facts = {name: value for name, value in vars(event).items() if name not in ("at", "job")}
        return replace(job, state=JobState.COMPLETED, **facts)
    if isinstance(event, JobSkipped):
        return replace(job, state=JobState.NEVER_STARTED, cause=event.why)
    if isinstance(event, JobSubmitted):
        facts = {name: value for name, value in vars(event).items() if name not in ("at", "job")}
        return replace(job, state=JobState.PENDING, nodes=(), **facts)
    if isinstance(event, JobStarted):
        return replace(
            job,
            state=JobState.RUNNING,
            attempts=event.attempt + 1,
            nproc=event.nproc,
            devices=tuple(event.devices),
            run_dir=event.run_dir,
            run_id=event.run_id,
            config_hash=event.config_hash,
            nodes=tuple(event.nodes),
            began_at=event.at if job.began_at is None else job.began_at,
        )
    if isinstance(event, JobPaused):
        return replace(job, state=JobState.PAUSED, cause=event.why)
    return replace(
        job,
        state=JobState.COMPLETED if event.completed else JobState.FAILED,
        ended_at=event.at,
        seconds=event.seconds,
        value=event.value,
        exact=event.exact,
        text=event.text,
        ungrouped=event.ungrouped,
        cause=event.cause,
    )
