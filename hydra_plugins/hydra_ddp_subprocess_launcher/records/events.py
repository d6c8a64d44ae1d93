"""What can happen in a sweep, and what is known of its jobs once that has happened."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, get_args

_LONGEST_TEXT = 60
# Python writes no longer numbers out, and nobody reads deeper values.
_MOST_BITS = 4096
_MOST_DEEP = 20
# What JSON lacks, by Python's name, has the names that JavaScript has.
_NO_NUMBERS_OF = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
NO_NUMBERS = frozenset(_NO_NUMBERS_OF.values())


@dataclass(frozen=True)
class SweepBegan:
    """A launching process has taken the sweep directory.

    Attributes:
        at: Unix time in seconds, as in all events.
        pid: Of the launching process.
        host: Its host.
        argv: Its command line.
        cwd: Directory in which it was started.
        launcher: Version of this package.
        grace_period_s: The option; None: not known.
        sweep_dir: Sweep directory, absolute; it may have been moved since.
        format: Of what is stored for other processes (`files.FORMAT`); 1 if the journal does not say.
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
    """The sweeper has handed over a batch of jobs.

    Attributes:
        at: Unix time in seconds.
        first: Number of the first one; the others count up from it.
        overrides: Override strings, one tuple a job.
        at_once: Most of them that run at a time.
        task: Which function of the program they run.
    """

    at: float
    first: int
    overrides: tuple[tuple[str, ...], ...]
    at_once: int
    task: str = ""


@dataclass(frozen=True)
class JobSubmitted:
    """A job waits for its turn on a cluster: it is about to be submitted, was submitted, or was queued again.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        job_id: Its id there; empty: it is only about to be submitted.
        folder: Where its nodes tell how it fares, absolute.
        config_hash: SHA-256 of its own config, hexadecimal.
        executor: Submitit's name of the cluster.
        planned_dir: Run directory that it will have, absolute; empty: that depends on an id which it has not yet.
        submitit_folder: Where submitit puts the file by which the id is found, absolute, with submitit's marks, such as
            `%j`; empty: the id is known.
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
        attempt: Starts of it before this one.
        nproc: Number of ranks.
        devices: Ids of its devices; empty: none.
        run_dir: Run directory, absolute.
        run_id: Name of this start, which its outcomes carry.
        config_hash: SHA-256 of the job's own config, hexadecimal.
        nodes: Host names of its nodes, where it does not run on the launching process's; else empty.
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
    """A start of a job has ended badly, and another one follows.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        why: How that start ended.
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
        completed: Whether it completed; else it has failed.
        value: Its value, as `json_value` makes it.
        text: Its value in a few words.
        cause: Why it failed, one line; empty when it completed.
        seconds: From its first start; None: it was never started.
        exact: Whether `value` is all of it.
        ungrouped: Whether it has several ranks, which had torch.distributed and opened no process group.
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
    """A job is not run, as an earlier run of the sweep has completed it.

    Attributes:
        at: Unix time in seconds.
        job: Number of the job.
        attempts: How often it was started, all in all.
        nproc: Number of ranks.
        devices: Ids of the devices that it had.
        run_dir: Run directory, absolute.
        run_id: Name of the start that completed.
        config_hash: SHA-256 of its own config, hexadecimal.
        began_at: First start, Unix time in seconds.
        ended_at: Its end, likewise.
        seconds: From the first start to the end.
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
        why: Why not, one line.
    """

    at: float
    job: int
    why: str


@dataclass(frozen=True)
class SweepStopped:
    """A signal has stopped the sweep.

    Attributes:
        at: Unix time in seconds.
        signal: Its name.
    """

    at: float
    signal: str


JobEvent = JobSubmitted | JobStarted | JobPaused | JobEnded | JobKept | JobSkipped
Event = SweepBegan | JobsAdded | JobEvent | SweepStopped
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


def json_value(value: Any) -> tuple[Any, bool]:
    """Return a job's value in what JSON has, and whether that is all of it: whether it can be made from that again.

    NaN and the infinities, which JSON lacks, become `NaN`, `Infinity`, `-Infinity`. NumPy's scalars become numbers,
    keys text, tuples lists, and a part that JSON cannot hold a few words.
    """
    try:
        return _json_value(value, 0)
    except (Exception, SystemExit):  # noqa: BLE001  (what is the user's may raise anything wherever it is touched)
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
    # One part that raises does not hide the others.
    try:
        return _json_value(value, depth + 1)
    except (Exception, SystemExit):  # noqa: BLE001  (as above)
        return short_text(value), False


def short_text(value: Any) -> str:
    """Return a value in at most 60 characters."""
    try:
        return shortened(f"{value:.6g}" if isinstance(value, float) else repr(value))
    except (Exception, SystemExit):  # noqa: BLE001  (a user's __repr__ may raise anything)
        return type(value).__name__


def shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    """Return a text on one line, with an ellipsis where it is longer than `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


class JobState(Enum):
    """Where a job is on its way."""

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
        """Whether nothing follows."""
        return self in (JobState.COMPLETED, JobState.FAILED)


@dataclass(frozen=True)
class JobRecord:
    """What is known about one job.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        task: Which function of the program it runs.
        state: Where it is.
        attempts: How often it was started.
        nproc: Number of ranks; 0: not known yet.
        devices: Ids of its devices; empty: none, or not started yet.
        run_dir: Run directory; empty: not started yet.
        run_id: Name of its last start; empty: not started yet.
        config_hash: SHA-256 of its own config, hexadecimal; empty: not started yet.
        began_at: First start, Unix time in seconds; None: not started yet.
        ended_at: Its end, likewise.
        seconds: From the first start to the end; None: it is not over, or was never started.
        value: Its value, as in JobEnded.
        exact: Whether that is all of it.
        text: Its value in a few words.
        ungrouped: As in JobEnded.
        cause: Why it failed, or is not run; of one that is paused, why its last start failed.
        job_id: Its id on a cluster; empty: it is on none, or nobody has noted it yet (`submitit_folder`).
        folder: Where its nodes tell how it fares there; empty: it is on none.
        nodes: Host names of its nodes there; empty: it is on none, or not started yet.
        executor: Submitit's name of that cluster; empty: it is on none.
        planned_dir: Run directory that it will have there; empty: it is on none, or not known yet.
        submitit_folder: As in JobSubmitted; empty: it is on no cluster, or its id is known.
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
        """What tells a job from the others, in every run of the sweep."""
        return self.number, self.overrides, self.task


@dataclass
class SweepRecord:
    """What is known about a sweep.

    Attributes:
        began: Who runs it, or ran it last; None: not known.
        jobs: Of the current run, by number, in the order in which the sweeper handed them over.
        at_once: Most jobs of the current batch that run at a time.
        stopped_by: Signal that stopped it; empty: none.
        shared: Overrides that all of several jobs have.
        unreadable: Lines of the journal that could not be read.
        past: What earlier runs have left of jobs that were started, or are over, oldest first.
        formats: Formats in which the runs have stored what is for other processes.
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
        """Take note of the next event."""
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
            # What is done stays so until it is known to be started again.
            if before.state is not JobState.COMPLETED:
                before = replace(before, state=JobState.WAITING, cause="", began_at=None, ended_at=None, seconds=None)
                before = replace(
                    before, job_id="", folder="", nodes=(), executor="", planned_dir="", submitit_folder=""
                )
            self.jobs[number] = before
        if len(self.jobs) > 1:
            self.shared = frozenset.intersection(*map(frozenset, [*earlier, *event.overrides]))

    def touched(self) -> list[JobRecord]:
        """Return the jobs that this run of the sweep, and not only an earlier one, has started or ended."""
        return [job for job in self.jobs.values() if job.state not in (JobState.WAITING, JobState.NEVER_STARTED)]

    def by_state(self) -> dict[JobState, list[JobRecord]]:
        """Return the jobs by the state they are in; of every state there is a list."""
        found: dict[JobState, list[JobRecord]] = {state: [] for state in JobState}
        for job in self.jobs.values():
            found[job.state].append(job)
        return found

    def in_state(self, *states: JobState) -> list[JobRecord]:
        """Return the jobs that are in one of these states."""
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
