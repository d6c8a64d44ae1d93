"""Whose turn it is, and on which devices: written histories, and whole sweeps on a simulated clock."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import OptionError
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.schedule import (
    MAX_OVERTAKEN,
    DevicePool,
    Placement,
    Schedule,
)

# --- what a pool has room for


@pytest.mark.parametrize(
    ("ids", "asked", "per_rank", "nproc", "devices"),
    [
        ("", None, 1, 1, 1),
        ("0", None, 1, 1, 1),
        ("0123", None, 1, 4, 4),
        ("", 3, 1, 3, 3),
        ("0123", 2, 1, 2, 2),
        ("01", 2, 1, 2, 2),
        ("0123", None, 2, 2, 4),
        ("01234", None, 2, 2, 4),
        ("0123", 1, 3, 1, 3),
        ("0123", 2, 2, 2, 4),
        ("", None, 4, 1, 4),
        ("", 2, 4, 2, 8),
    ],
)
def test_ranks_of_a_job(ids: str, asked: int | None, per_rank: int, nproc: int, devices: int) -> None:
    """`auto` is as many ranks as the devices do for, 1 without devices; a number is that number."""
    size = DevicePool(tuple(ids)).size(asked, per_rank)
    assert (size.nproc, size.devices) == (nproc, devices)


def test_a_job_that_never_fits() -> None:
    """A job that needs more devices than there are is an error with both numbers and the ids."""
    with pytest.raises(OptionError, match=r"nproc_per_node=3, but there are only 2 devices \(GPU-a, GPU-b\)"):
        DevicePool(("GPU-a", "GPU-b"), jobs_per_device=4).size(3)
    with pytest.raises(
        OptionError, match=r"nproc_per_node=2 with .*devices_per_rank=2 takes 4 devices.* only 3 devices"
    ):
        DevicePool(("a", "b", "c")).size(2, 2)
    with pytest.raises(OptionError, match=r"devices_per_rank=2 takes 2 devices.* only 1 device \(a\)"):
        DevicePool(("a",)).size(None, 2)


@pytest.mark.parametrize(
    ("ids", "shared", "limit", "nproc", "jobs"),
    [
        ("", 1, None, 2, 1),
        ("", 1, 4, 2, 4),
        ("0123", 1, None, 2, 2),
        ("0123", 1, 1, 2, 1),
        ("0123", 1, 9, 2, 2),
        ("0123", 1, None, 3, 1),
        ("0123", 1, None, 1, 4),
        ("01", 1, None, 4, 1),
        ("0", 3, None, 1, 3),
        ("012", 2, None, 2, 3),
        ("012", 2, 2, 2, 2),
    ],
)
def test_jobs_at_once(ids: str, shared: int, limit: int | None, nproc: int, jobs: int) -> None:
    """As many jobs as the devices have room for, 1 without devices, and no more than the option allows."""
    pool = DevicePool(tuple(ids), shared, limit)
    assert pool.most_jobs(nproc) == jobs
    if nproc <= len(ids) or not ids:
        schedule = scheduled(pool, [nproc] * 12)
        assert len(start_all(schedule)) == jobs


# --- written histories


def scheduled(pool: DevicePool, sizes: list[int | None]) -> Schedule:
    schedule = Schedule(pool)
    for job, nproc in enumerate(sizes):
        schedule.add(job, nproc)
    return schedule


def start_all(schedule: Schedule) -> list[Placement]:
    """Start whoever can."""
    turns = []
    while (turn := schedule.choose()) is not None:
        schedule.start(turn)
        turns.append(turn)
    return turns


def test_devices_in_order() -> None:
    """Devices are given out in the pool's order, in whole sets, and again when they are back."""
    schedule = scheduled(DevicePool(("b", "a", "c")), [2, 2, 1])
    assert start_all(schedule) == [Placement(0, ("b", "a")), Placement(2, ("c",), overtakes=(1,))]
    schedule.end(2)
    assert start_all(schedule) == []
    schedule.end(0)
    assert start_all(schedule) == [Placement(1, ("b", "a"))]
    assert schedule.devices_in_use == {"b", "a"}
    assert schedule.waiting == []


def test_without_devices() -> None:
    """Without devices jobs have none, whatever their size, and one runs at a time unless the option says more."""
    assert start_all(scheduled(DevicePool(), [4, 1])) == [Placement(0, ())]
    assert start_all(scheduled(DevicePool(max_jobs=2), [4, 1, 1])) == [Placement(0, ()), Placement(1, ())]


def test_shared_devices() -> None:
    """Jobs go where the fewest are, and a device is given back by the last one on it."""
    schedule = scheduled(DevicePool(("0", "1"), jobs_per_device=2), [1] * 5)
    assert [turn.devices for turn in start_all(schedule)] == [("0",), ("1",), ("0",), ("1",)]
    assert [schedule.alone_on(job) for job in range(4)] == [[], [], [], []]
    schedule.end(0)
    assert schedule.alone_on(2) == ["0"]
    schedule.end(2)
    assert [turn.devices for turn in start_all(schedule)] == [("0",)]


def test_a_large_job_is_overtaken_at_most_so_often() -> None:
    """Smaller jobs pass one that does not fit; after eight of them the devices that come back are kept for it."""
    schedule = scheduled(DevicePool(("0", "1")), [1, 2, *[1] * 20])
    assert [turn.job for turn in start_all(schedule)] == [0, 2]
    for started in range(3, 2 + MAX_OVERTAKEN):
        schedule.end(min(schedule.running))
        assert [turn.job for turn in start_all(schedule)] == [started]
    schedule.end(min(schedule.running))
    assert start_all(schedule) == []
    schedule.end(min(schedule.running))
    assert [turn.job for turn in start_all(schedule)] == [1]


def test_no_overtaking() -> None:
    """Where others wait for the jobs in order, none passes one whose devices other people have."""
    busy = {"1"}
    schedule = scheduled(DevicePool(("0", "1"), max_jobs=1, in_order=True), [2, 1])
    assert schedule.choose(lambda device: device not in busy) is None
    busy.clear()
    turn = schedule.choose(lambda device: device not in busy)
    assert turn == Placement(0, ("0", "1"))
    schedule.start(turn)
    schedule.end(0)
    assert [one.job for one in start_all(schedule)] == [1]


def test_a_job_of_unknown_size() -> None:
    """It does not start before its size is known; first in line it holds the others up, elsewhere it does not."""
    schedule = scheduled(DevicePool(("0", "1")), [None, 1, None, 1])
    assert start_all(schedule) == []
    schedule.resize(0, 1)
    assert [turn.job for turn in start_all(schedule)] == [0, 1]
    schedule.drop(2)
    schedule.end(0)
    assert [turn.job for turn in start_all(schedule)] == [3]


def test_devices_that_others_have() -> None:
    """What cannot be obtained is left out, and the order of the rest kept."""
    schedule = scheduled(DevicePool(("0", "1", "2")), [2, 2])
    turn = schedule.choose(lambda device: device != "0")
    assert turn == Placement(0, ("1", "2"))
    assert schedule.choose(lambda device: device == "1") is None
    # To be chosen is not to be started.
    assert schedule.choose() == Placement(0, ("0", "1"))


def test_devices_that_others_keep_for_long() -> None:
    """A job that lacks what others have is passed by as many as there are; ours would idle for it in vain."""
    schedule = scheduled(DevicePool(("0", "1")), [2, *[1] * 20])
    for job in range(1, 21):
        turn = schedule.choose(lambda device: device == "1")
        assert turn == Placement(job, ("1",))
        schedule.start(turn)
        schedule.end(job)
    assert start_all(schedule) == [Placement(0, ("0", "1"))]


def test_no_device_is_asked_for_in_vain() -> None:
    """Jobs that are larger than one that did not get enough ask for nothing, however many there are."""
    asked: list[str] = []

    def obtain(device: str) -> bool:
        asked.append(device)
        return device == "0"

    assert scheduled(DevicePool(("0", "1")), [2] * 100).choose(obtain) is None
    assert asked == ["0", "1"]


# --- whole sweeps on a simulated clock


@dataclass
class Played:
    """A sweep that was played to its end.

    Attributes:
        began: Start of each job, in the order of starts.
        ended: End of each job.
        devices: What each job had.
    """

    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    overtaken: Counter[int] = field(default_factory=Counter)


def play(pool: DevicePool, sizes: list[int], durations: list[float], cancelled: set[int]) -> Played:
    """Run a sweep; failed jobs are short ones, and `cancelled` leave the line when the first job ends."""
    schedule = scheduled(pool, list(sizes))
    played = Played()
    now = 0.0
    ends: list[tuple[float, int]] = []
    while schedule.waiting or ends:
        for turn in start_all(schedule):
            for job in schedule.waiting:
                played.overtaken[job] += job < turn.job
            played.began[turn.job], played.devices[turn.job] = now, turn.devices
            heapq.heappush(ends, (now + durations[turn.job], turn.job))
        check_nothing_idles(schedule, sizes, played)
        assert ends, "jobs wait for ever"
        now, job = heapq.heappop(ends)
        played.ended[job] = now
        schedule.end(job)
        while ends and ends[0][0] == now:
            played.ended[ends[0][1]] = now
            schedule.end(heapq.heappop(ends)[1])
        for waiting in cancelled & set(schedule.waiting):
            schedule.drop(waiting)
    return played


def check_nothing_idles(schedule: Schedule, sizes: list[int], played: Played) -> None:
    """When no more can start, the devices that are left do not do for the next in line."""
    pool = schedule.pool
    if not schedule.waiting or len(schedule.running) >= pool.limit:
        return
    used = Counter(device for devices in schedule.running.values() for device in devices)
    free = sum(used[device] < pool.jobs_per_device for device in pool.devices)
    head = schedule.waiting[0]
    assert free < sizes[head]
    if played.overtaken[head] < MAX_OVERTAKEN:
        assert all(free < sizes[job] for job in schedule.waiting)


def check_devices(pool: DevicePool, sizes: list[int], played: Played) -> None:
    """Each job has as many devices as ranks, all different; no moment sees more jobs on one than it may have."""
    for job, devices in played.devices.items():
        assert len(set(devices)) == len(devices) == (sizes[job] if pool.devices else 0)
        assert list(devices) == sorted(devices, key=pool.devices.index)
        moment = played.began[job]
        now = [one for one in played.began if played.began[one] <= moment < played.ended[one]]
        on = Counter(device for one in now for device in played.devices[one])
        assert max(on.values(), default=0) <= pool.jobs_per_device
        assert len(now) <= pool.limit


@st.composite
def sweeps(draw: st.DrawFn, *, mixed: bool) -> tuple[DevicePool, list[int], list[float], set[int]]:
    count = draw(st.integers(0, 8))
    ids = draw(st.permutations([f"GPU-{number}" for number in range(count)]))
    pool = DevicePool(tuple(ids), draw(st.integers(1, 3)), draw(st.none() | st.integers(1, 6)))
    jobs = draw(st.integers(1, 40))
    sizes = st.integers(1, max(1, count))
    drawn = draw(st.lists(sizes, min_size=jobs, max_size=jobs)) if mixed else [draw(sizes)] * jobs
    # Of whole seconds, so that jobs often end together.
    durations = draw(st.lists(st.integers(1, 9), min_size=jobs, max_size=jobs))
    cancelled = draw(st.sets(st.integers(0, jobs - 1), max_size=5))
    return pool, drawn, [float(seconds) for seconds in durations], cancelled


@given(sweeps(mixed=True))
@settings(deadline=None, max_examples=300)
def test_any_sweep(sweep: tuple[DevicePool, list[int], list[float], set[int]]) -> None:
    """No overlap, no idle set that the next in line could use, the bound on overtaking, and every job ends."""
    pool, sizes, durations, cancelled = sweep
    played = play(pool, sizes, durations, cancelled)
    check_devices(pool, sizes, played)
    assert set(range(len(sizes))) - cancelled <= set(played.ended) == set(played.began)
    assert max(played.overtaken.values(), default=0) <= MAX_OVERTAKEN


@given(sweeps(mixed=False))
@settings(deadline=None, max_examples=200)
def test_jobs_of_one_size(sweep: tuple[DevicePool, list[int], list[float], set[int]]) -> None:
    """They start exactly as the greedy list schedule has it: the next one on whichever place is free first."""
    pool, sizes, durations, _ = sweep
    played = play(pool, sizes, durations, set())
    places = [0.0] * pool.most_jobs(sizes[0])
    for job, seconds in enumerate(durations):
        assert played.began[job] == places[0]
        heapq.heapreplace(places, places[0] + seconds)
    assert list(played.began) == sorted(played.began)
    check_devices(pool, sizes, played)
