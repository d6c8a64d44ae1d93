"""What is known about a sweep and its jobs after any of its events.

The launching process keeps these records while it runs; from the journal `hydra-ddp` makes the same ones again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ._events import (
    Event,
    JobEvent,
    JobKept,
    JobPaused,
    JobsAdded,
    JobSkipped,
    JobStarted,
    JobSubmitted,
    SweepBegan,
    SweepStopped,
)


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
    """

    began: SweepBegan | None = None
    jobs: dict[int, JobRecord] = field(default_factory=dict)
    at_once: int = 1
    stopped_by: str = ""
    shared: frozenset[str] = frozenset()
    unreadable: int = 0
    past: list[JobRecord] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Take note of the next event."""
        if isinstance(event, SweepBegan):
            self.past += self.touched()
            self.began, self.stopped_by, self.jobs, self.shared = event, "", {}, frozenset()
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
