"""Which job had which devices when: bars, made from the events of a journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ._events import Event, JobEnded, JobPaused, JobsAdded, JobStarted, SweepBegan

# Stands for a device where jobs have none.
NO_DEVICE = ""


class BarStatus(Enum):
    """How one start of a job has ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    FAILED_ATTEMPT = "failed, started again"
    RUNNING = "running"
    LOST = "lost"


@dataclass(frozen=True)
class Row:
    """A line of the picture: a device, or a part of one that several jobs share.

    Attributes:
        device: Its id; NO_DEVICE: for jobs without one.
        lane: Counts the jobs that are on it at once, from 0.
    """

    device: str
    lane: int


@dataclass(frozen=True)
class Bar:
    """One start of a job.

    Attributes:
        job: Number of the job.
        attempt: Starts of it before this one.
        status: How it ended.
        began_at: Unix time in seconds.
        ended_at: Likewise.
        rows: Where it was, one a device.
    """

    job: int
    attempt: int
    status: BarStatus
    began_at: float
    ended_at: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Timeline:
    """All of a sweep.

    Attributes:
        began_at: Unix time in seconds.
        ended_at: Likewise.
        jobs: How many there are, started or not.
        rows: In the order in which they are drawn, top to bottom.
        bars: In the order in which they began.
    """

    began_at: float
    ended_at: float
    jobs: int
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]


def make_timeline(events: Sequence[Event], over_at: float | None, now: float) -> Timeline:
    """Return the timeline of a sweep.

    Args:
        events: What happened, in order.
        over_at: When there was a last sign of a sweep that is over, Unix time in seconds; None: it runs.
        now: The same of this moment.
    """
    left, end = (BarStatus.RUNNING, now) if over_at is None else (BarStatus.LOST, over_at)
    placed = _placed(_attempts(events, left, end))
    rows = sorted({row for bar in placed for row in bar.rows}, key=_row_order)
    began_at = events[0].at if events else now
    ended_at = max([bar.ended_at for bar in placed], default=began_at)
    jobs = len({event.first + place for event in events if isinstance(event, JobsAdded) for place in _places(event)})
    return Timeline(began_at, ended_at, jobs, tuple(rows), placed)


def _places(added: JobsAdded) -> range:
    return range(len(added.overrides))


def _attempts(events: Iterable[Event], left: BarStatus, end: float) -> list[Bar]:
    """Return a bar for each start of a job; those that have not ended are `left` and reach to the end."""
    done: list[Bar] = []
    running: dict[int, Bar] = {}
    last_at = 0.0
    for event in events:
        if isinstance(event, JobStarted):
            rows = tuple(Row(device, 0) for device in event.devices or (NO_DEVICE,))
            running[event.job] = Bar(event.job, event.attempt, left, event.at, max(event.at, end), rows)
        elif isinstance(event, JobPaused | JobEnded) and event.job in running:
            done.append(replace(running.pop(event.job), status=_status(event), ended_at=event.at))
        elif isinstance(event, SweepBegan):
            # The launching process before it was killed, at the latest when it had written its last event.
            done += [replace(bar, status=BarStatus.LOST, ended_at=last_at) for bar in running.values()]
            running.clear()
        last_at = event.at
    return sorted([*done, *running.values()], key=lambda bar: bar.began_at)


def _status(event: JobPaused | JobEnded) -> BarStatus:
    if isinstance(event, JobPaused):
        return BarStatus.FAILED_ATTEMPT
    return BarStatus.COMPLETED if event.completed else BarStatus.FAILED


def _placed(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """Return the bars, each in the lowest lane of each of its devices that is free while it lasts."""
    free_at: dict[str, list[float]] = {}
    placed = []
    for bar in bars:
        rows = []
        for row in bar.rows:
            lanes = free_at.setdefault(row.device, [])
            lane = next((lane for lane, at in enumerate(lanes) if at <= bar.began_at), len(lanes))
            lanes[lane : lane + 1] = [bar.ended_at]
            rows.append(Row(row.device, lane))
        placed.append(replace(bar, rows=tuple(rows)))
    return tuple(placed)


def _row_order(row: Row) -> tuple[bool, int, str, int]:
    """Numbers as numbers, names after them."""
    number = row.device.isdecimal()
    return not number, int(row.device) if number else 0, row.device, row.lane


def blocks(rows: Iterable[int]) -> list[range]:
    """Return neighbouring places as one: a job on devices 0 and 1 is one block of two rows.

    Args:
        rows: Places of rows, counted from the top.
    """
    found: list[range] = []
    for row in sorted(rows):
        if found and found[-1].stop == row:
            found[-1] = range(found[-1].start, row + 1)
        else:
            found.append(range(row, row + 1))
    return found


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for a duration, as its seconds and its name."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
