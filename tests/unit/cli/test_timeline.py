"""Bars from events: which job was where, from when to when, and how that ended. No matplotlib here."""

from __future__ import annotations

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.cli.show import (
    NO_DEVICE,
    BarStatus,
    Row,
    Timeline,
    blocks,
    make_timeline,
    time_unit,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import (
    Event,
    JobEnded,
    JobPaused,
    JobsAdded,
    JobStarted,
    SweepBegan,
)


def began(at: float = 0.0) -> SweepBegan:
    return SweepBegan(at, 1, "host", ("python",), "/", "0")


def added(count: int, first: int = 0) -> JobsAdded:
    return JobsAdded(0.5, first, tuple((f"x={number}",) for number in range(count)), 2)


def started(at: float, job: int, *devices: str, attempt: int = 0) -> JobStarted:
    return JobStarted(at, job, attempt, max(1, len(devices)), devices, f"/sweep/{job}")


def ended(at: float, job: int, *, completed: bool = True) -> JobEnded:
    return JobEnded(at, job, completed, None, "", "" if completed else "rank 0: broken", 1.0)


def encodable(timeline: Timeline) -> list[tuple[int, int, BarStatus, float, float]]:
    return [(bar.job, bar.attempt, bar.status, bar.began_at, bar.ended_at) for bar in timeline.bars]


def test_each_start_of_a_job_has_a_bar() -> None:
    """A job that was started again has one for each start, and there is a gap between them."""
    events: list[Event] = [began(), added(2), started(1, 0, "0"), started(2, 1, "1"), JobPaused(3, 0, "rank 0: broken")]
    events += [started(5, 0, "0", attempt=1), ended(6, 1, completed=False), ended(9, 0)]
    timeline = make_timeline(events, 10, 99)
    assert encodable(timeline) == [
        (0, 0, BarStatus.FAILED_ATTEMPT, 1, 3),
        (1, 0, BarStatus.FAILED, 2, 6),
        (0, 1, BarStatus.COMPLETED, 5, 9),
    ]
    assert (timeline.began_at, timeline.ended_at, timeline.jobs) == (0, 9, 2)
    assert timeline.rows == (Row("0", 0), Row("1", 0))


def test_what_has_not_ended_runs_or_is_lost() -> None:
    """In a live sweep it reaches to now; of one that is over it is lost, and reaches to its last sign of life."""
    events = [began(), added(1), started(1, 0, "0")]
    assert encodable(make_timeline(events, None, 7)) == [(0, 0, BarStatus.RUNNING, 1, 7)]
    assert encodable(make_timeline(events, 5, 7)) == [(0, 0, BarStatus.LOST, 1, 5)]
    # A clock that was set back makes no bar of negative length.
    assert encodable(make_timeline(events, 0.5, 7)) == [(0, 0, BarStatus.LOST, 1, 1)]


def test_a_job_has_a_row_on_each_of_its_devices() -> None:
    """Rows are in the order of numbers, then of names."""
    events = [began(), added(3), started(1, 0, "10", "2"), started(1, 1, "GPU-b"), started(1, 2, "GPU-a")]
    timeline = make_timeline(events, None, 2)
    assert timeline.bars[0].rows == (Row("10", 0), Row("2", 0))
    assert [row.device for row in timeline.rows] == ["2", "10", "GPU-a", "GPU-b"]


@pytest.mark.parametrize("devices", [(), ("0",)])
def test_jobs_side_by_side_take_the_lowest_free_lane(devices: tuple[str, ...]) -> None:
    """Without devices, and where several jobs share one."""
    events: list[Event] = [began(), added(4), started(1, 0, *devices), started(2, 1, *devices), ended(3, 0)]
    events += [started(3, 2, *devices), ended(4, 1), ended(4, 2), started(5, 3, *devices), ended(6, 3)]
    device = devices[0] if devices else NO_DEVICE
    timeline = make_timeline(events, 7, 7)
    assert [(bar.job, bar.rows) for bar in timeline.bars] == [
        (0, (Row(device, 0),)),
        (1, (Row(device, 1),)),
        (2, (Row(device, 0),)),
        (3, (Row(device, 0),)),
    ]
    assert timeline.rows == (Row(device, 0), Row(device, 1))


def test_a_sweep_without_a_started_job_has_no_bars() -> None:
    """Nor has one that has just begun, or a job that failed before its start."""
    assert make_timeline([], 1, 2) == Timeline(2, 2, 0, (), ())
    assert make_timeline([began(1), added(2), ended(2, 0, completed=False)], 3, 4) == Timeline(1, 1, 2, (), ())


def test_a_batch_that_repeats_numbers_counts_them_once() -> None:
    """The number of jobs is that of their numbers."""
    assert make_timeline([began(), added(2), added(3, first=2), added(2)], 1, 1).jobs == 5


def test_neighbouring_rows_are_one_block() -> None:
    """A job on devices 0, 1 and 3 is two blocks."""
    assert blocks([1, 3, 0]) == [range(2), range(3, 4)]
    assert blocks([]) == []


@pytest.mark.parametrize(("seconds", "unit"), [(5, "seconds"), (600, "minutes"), (11_000, "hours")])
def test_the_unit_of_the_time_axis(seconds: float, unit: str) -> None:
    """Neither 7200 seconds nor 0.001 hours."""
    assert time_unit(seconds)[1] == unit
