"""What happens in a sweep, event by event, and what is known about its jobs after any of them.

The launching process keeps these records while it runs, and writes the events into the journal; from there
`hydra-ddp` makes the same records again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

_LONGEST_TEXT = 60


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
    """

    at: float
    pid: int
    host: str
    argv: tuple[str, ...]
    cwd: str
    launcher: str
    grace_period_s: float | None = None


@dataclass(frozen=True)
class JobsAdded:
    """The sweeper has handed over a batch of jobs.

    Attributes:
        at: Unix time in seconds.
        first: Number of the first one; the others count up from it.
        overrides: Override strings, one tuple a job.
        at_once: Most of them that run at a time.
    """

    at: float
    first: int
    overrides: tuple[tuple[str, ...], ...]
    at_once: int


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
    """

    at: float
    job: int
    attempt: int
    nproc: int
    devices: tuple[str, ...]
    run_dir: str


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
        value: Its value in what JSON has, if it can be; else None.
        text: Its value in a few words.
        cause: Why it failed, one line; empty when it completed.
        seconds: From its first start; None: it was never started.
    """

    at: float
    job: int
    completed: bool
    value: Any
    text: str
    cause: str
    seconds: float | None


@dataclass(frozen=True)
class SweepStopped:
    """A signal has stopped the sweep.

    Attributes:
        at: Unix time in seconds.
        signal: Its name.
    """

    at: float
    signal: str


Event = SweepBegan | JobsAdded | JobStarted | JobPaused | JobEnded | SweepStopped
EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (SweepBegan, JobsAdded, JobStarted, JobPaused, JobEnded, SweepStopped)
}


class JobState(Enum):
    """Where a job is on its way. The last two are those of a sweep that is over without having ended them."""

    WAITING = "waiting"
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
        state: Where it is.
        attempts: How often it was started.
        nproc: Number of ranks; 0: not known yet.
        devices: Ids of its devices; empty: none, or not started yet.
        run_dir: Run directory; empty: not started yet.
        began_at: First start, Unix time in seconds; None: not started yet.
        ended_at: Its end, likewise.
        seconds: From the first start to the end; None: it is not over, or was never started.
        value: Its value, as in JobEnded.
        text: Its value in a few words.
        cause: Why it failed; of one that is paused, why its last start did.
    """

    number: int
    overrides: tuple[str, ...]
    state: JobState = JobState.WAITING
    attempts: int = 0
    nproc: int = 0
    devices: tuple[str, ...] = ()
    run_dir: str = ""
    began_at: float | None = None
    ended_at: float | None = None
    seconds: float | None = None
    value: Any = None
    text: str = ""
    cause: str = ""


@dataclass
class SweepRecord:
    """What is known about a sweep.

    Attributes:
        began: Who runs it, or ran it last; None: not known.
        jobs: By number, in the order in which the sweeper handed them over.
        at_once: Most jobs of the current batch that run at a time.
        stopped_by: Signal that stopped it; empty: none.
        shared: Overrides that all of several jobs have.
    """

    began: SweepBegan | None = None
    jobs: dict[int, JobRecord] = field(default_factory=dict)
    at_once: int = 1
    stopped_by: str = ""
    shared: frozenset[str] = frozenset()

    def apply(self, event: Event) -> None:
        """Take note of the next event."""
        if isinstance(event, SweepBegan):
            self.began, self.stopped_by = event, ""
        elif isinstance(event, JobsAdded):
            self.at_once = event.at_once
            earlier = [self.shared] if len(self.jobs) > 1 else [job.overrides for job in self.jobs.values()]
            for number, overrides in enumerate(event.overrides, start=event.first):
                self.jobs[number] = JobRecord(number, tuple(overrides))
            if len(self.jobs) > 1:
                self.shared = frozenset.intersection(*map(frozenset, [*earlier, *event.overrides]))
        elif isinstance(event, SweepStopped):
            self.stopped_by = event.signal
        elif event.job in self.jobs:
            self.jobs[event.job] = _after(self.jobs[event.job], event)

    def in_state(self, *states: JobState) -> list[JobRecord]:
        """Return the jobs that are in one of these states."""
        return [job for job in self.jobs.values() if job.state in states]


def _after(job: JobRecord, event: JobStarted | JobPaused | JobEnded) -> JobRecord:
    if isinstance(event, JobStarted):
        return replace(
            job,
            state=JobState.RUNNING,
            attempts=event.attempt + 1,
            nproc=event.nproc,
            devices=tuple(event.devices),
            run_dir=event.run_dir,
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
        text=event.text,
        cause=event.cause,
    )


def json_value(value: Any) -> Any:
    """Return a job's value in what JSON has: numbers, text, lists, and dicts with text as keys; None for all else.

    NumPy's scalars become numbers. NaN and the infinities, which JSON lacks, become `NaN`, `Infinity`, `-Infinity`.
    """
    try:
        return _json_value(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _json_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return (
            float(value) if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        )
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key that is no text")
        return {key: _json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(part) for part in value]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _json_value(value.item())
    raise TypeError(type(value).__name__)


def short_text(value: Any) -> str:
    """Return a value in at most 60 characters."""
    return shortened(_attempt(lambda: f"{value:.6g}" if isinstance(value, float) else repr(value)) or _type_name(value))


def shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    """Return a text on one line, with an ellipsis where it is longer than `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _attempt(make: Callable[[], str]) -> str | None:
    try:
        return make()
    except (Exception, SystemExit):  # noqa: BLE001  (a user's __repr__ may raise anything)
        return None


def _type_name(value: Any) -> str:
    return type(value).__name__
