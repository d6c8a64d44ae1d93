"""What is expected of the jobs in line: how many run at a time, with how many ranks, and how that is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import OptionError
from hydra_plugins.hydra_ddp_subprocess_launcher.job.frozen_config import CachedConfig
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher import job_queue
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.job_queue import JobQueue
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.resume import PreviousRuns
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.devices import DeviceAllocator, Nvml
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.schedule import DevicePool, JobSize
from support.scripted import ScriptedPlanner, make_context

NOTHING: Any = None


def line(pool: DevicePool, sizes: list[object], compose: Callable[[Sequence[str]], object] | None = None) -> JobQueue:
    """Return a line of jobs whose configs ask for these numbers of ranks, or of ranks and of devices for each of them.

    "?" is one that was not composed yet.
    """

    def take(overrides: list[str]) -> CachedConfig | None:
        size = sizes[int(overrides[0].removeprefix("job="))]
        return None if size == "?" else CachedConfig(NOTHING, size if isinstance(size, tuple) else (size, 1))

    context: Any = SimpleNamespace(
        settings=SimpleNamespace(nnodes=1, master_port=None, omp_num_threads=None, debug=False),
        config=OmegaConf.create({"size": 1, "hydra": {"launcher": {"nproc_per_node": "${size}"}}}),
    )
    planner: Any = SimpleNamespace(take_cached=take, compose=compose)
    return JobQueue(context, planner, pool, NOTHING, {number: [f"job={number}"] for number in range(len(sizes))})


@pytest.mark.parametrize(
    ("pool", "sizes", "jobs", "ranks", "said"),
    [
        (DevicePool(), [2], 1, 2, "1 job, 1 at a time, 2 ranks each"),
        (DevicePool(), [1, 1, 1], 1, 1, "3 jobs, 1 at a time, 1 rank each"),
        (DevicePool(max_jobs=4), [2, 2], 2, 4, "2 jobs, 2 at a time, 2 ranks each"),
        (DevicePool(max_jobs=2), [3, 1, 2], 2, 5, "3 jobs, 2 at a time, 1-3 ranks each"),
        (DevicePool(tuple("abcd")), [2, 2, 2], 2, 4, "3 jobs, 2 at a time, 2 ranks each, devices [a,b] [c,d]"),
        (DevicePool(tuple("abcd")), [1], 1, 1, "1 job, 1 at a time, 1 rank each, devices [a]"),
        (DevicePool(tuple("abcd")), [3, 3], 1, 3, "2 jobs, 1 at a time, 3 ranks each, devices [a,b,c]"),
        (DevicePool(tuple("abcd")), ["auto", "auto"], 1, 4, "2 jobs, 1 at a time, 4 ranks each, devices [a,b,c,d]"),
        (DevicePool(tuple("ab"), jobs_per_device=2), [1] * 9, 4, 4, "9 jobs, 4 at a time, 1 rank each, devices a b"),
        (DevicePool(tuple("abcd")), [1, 3], 2, 4, "2 jobs, 2 at a time, 1-3 ranks each, devices a b c d"),
        (DevicePool(tuple("abcd")), ["?", "?"], 2, 4, "2 jobs, 2 at a time, ranks as each job asks, devices a b c d"),
        (
            DevicePool(tuple("abcd")),
            [(1, 2)] * 3,
            2,
            2,
            "3 jobs, 2 at a time, 1 rank on 2 devices each, devices [a,b] [c,d]",
        ),
        (
            DevicePool(tuple("abcd")),
            [("auto", 2)],
            1,
            2,
            "1 job, 1 at a time, 2 ranks on 4 devices each, devices [a,b,c,d]",
        ),
        (
            DevicePool(tuple("abcd")),
            [(1, 2), (1, 4), (2, 1)],
            2,
            4,
            "3 jobs, 2 at a time, 1-2 ranks on 2-4 devices each, devices a b c d",
        ),
        (
            DevicePool(tuple("ab"), jobs_per_device=2),
            [(1, 2)] * 9,
            2,
            2,
            "9 jobs, 2 at a time, 1 rank on 2 devices each, devices a b",
        ),
        (DevicePool(), [(2, 4)], 1, 2, "1 job, 1 at a time, 2 ranks each"),
        (DevicePool(), [], 0, 1, "0 jobs, 0 at a time, ranks as each job asks"),
    ],
)
def test_what_is_expected(pool: DevicePool, sizes: list[object], jobs: int, ranks: int, said: str) -> None:
    """No more jobs than there are, and the ranks that are then there at most, which share the processor cores."""
    expected = line(pool, sizes)
    assert (expected.most_jobs, expected.most_ranks, expected.summary) == (jobs, ranks, said)


@pytest.mark.parametrize(
    ("pool", "sizes", "planned", "threads"),
    [
        # The first one is composed before the number is chosen.
        (DevicePool(), [8], 8, 8),
        (DevicePool(), [8, 2], 2, 8),
        # A later one turns out to be larger.
        (DevicePool(), [2, 16], 16, 4),
        (DevicePool(max_jobs=2), [2, 16], 16, 2),
        (DevicePool(), [2, 128], 128, 1),
        (DevicePool(tuple("abcdefgh")), [2, 8], 8, 8),
    ],
)
def test_threads_of_jobs_whose_sizes_are_not_known_at_first(
    monkeypatch: pytest.MonkeyPatch, pool: DevicePool, sizes: list[int], planned: int, threads: int
) -> None:
    """No job has more threads than its ranks, and those of jobs like it, have cores: here 64."""
    monkeypatch.setattr(job_queue, "usable_cores", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    queue = line(pool, ["?"] * len(sizes), lambda overrides: sizes[int(overrides[0].removeprefix("job="))])
    monkeypatch.setattr(CachedConfig, "store", lambda size: CachedConfig(NOTHING, (size, 1)))
    first = int(queue.base_environment()["OMP_NUM_THREADS"])
    assert first * sizes[0] <= 64
    plan: Any = SimpleNamespace(size=JobSize(planned))
    assert queue.environment_of(plan)["OMP_NUM_THREADS"] == str(threads)


def test_a_size_that_never_fits() -> None:
    """A job that is known to be too large stops the sweep, and is named; one whose size makes no sense fails alone."""
    with pytest.raises(OptionError, match=r"Job 1 \(job=1\): A job of 3 ranks does not fit"):
        line(DevicePool(("a", "b")), [1, 3])
    with pytest.raises(OptionError, match=r"Job 1 \(job=1\): A job of 2 ranks on 2 devices each does not fit"):
        line(DevicePool(("a", "b")), [(1, 2), (2, 2)])
    assert line(DevicePool(("a", "b")), [1, 0, "many", None, (1, 0)]).most_jobs == 2


# --- jobs on their way to their turn


class Queue:
    """A queue of jobs `x=0`, `x=1`, …, and what was asked of their planner."""

    def __init__(
        self, folder: Path, jobs: int, pool: DevicePool | None = None, early: Sequence[int] = (), **planner: Any
    ) -> None:
        pool = pool or DevicePool()
        self.planner = ScriptedPlanner(folder, PreviousRuns(), early=early, **planner)
        context = make_context(folder)
        context.config.hydra.launcher.nproc_per_node = "${size}"
        context.config.size = 1
        allocator = DeviceAllocator({}, Nvml("", {}), None, None)
        given: Any = self.planner
        overrides = {number: [f"x={number}"] for number in range(jobs)}
        self.queue = JobQueue(context, given, pool, allocator, overrides)

    def prepare_all(self) -> list[tuple[int, bool]]:
        """Do all that can be done ahead; return the jobs of which something was told, and if they are planned."""
        found = []
        while self.queue.can_prepare:
            prepared = self.queue.prepare_next()
            if prepared is not None:
                found.append((prepared.number, prepared.plan is not None))
        return found

    def take(self) -> tuple[int, tuple[str, ...]] | None:
        taken = self.queue.take_next()
        return None if taken is None else (taken[0].number, taken[1])


def test_what_is_done_ahead(tmp_path: Path) -> None:
    """The first in line is planned; of the others each is composed, which shows early what does not compose."""
    queue = Queue(tmp_path, 4, errors={2: KeyError("y")})
    assert queue.prepare_all() == [(0, True), (2, False)]
    assert queue.planner.calls == [
        ("compose", 0),
        ("plan", 0),
        ("compose", 1),
        ("compose", 2),
        ("compose", 3),
    ]
    # What has failed has left the queue.
    queue.queue.take_next()
    assert queue.queue.waiting
    queue.queue.job_ended(0)
    assert queue.prepare_all() == [(1, True)]
    assert queue.take() == (1, ())
    queue.queue.job_ended(1)
    assert queue.prepare_all() == [(3, True)]
    # Each was composed once.
    assert [number for call, number in queue.planner.calls if call == "compose"] == [0, 1, 2, 3]


def test_jobs_that_the_sweeper_has_composed(tmp_path: Path) -> None:
    """They are not composed again."""
    queue = Queue(tmp_path, 3, early=range(3))
    assert queue.prepare_all() == [(0, True)]
    assert queue.planner.calls == [("plan", 0)]


def test_a_turn_that_comes_too_early(tmp_path: Path) -> None:
    """A job that is not ready does not start, and is prepared next; its devices are not taken meanwhile."""
    queue = Queue(tmp_path, 2, DevicePool(("0", "1")), early=range(2))
    assert queue.take() is None
    assert queue.queue.prepare_next() is not None
    assert queue.take() == (0, ("0",))
    # The second one has its turn as well, but nobody has planned it.
    assert queue.take() is None
    assert queue.queue.can_prepare
    assert queue.prepare_all() == [(1, True)]
    assert queue.take() == (1, ("1",))
    assert not queue.queue.waiting and not queue.queue.can_prepare
    assert queue.take() is None


def test_a_job_that_is_larger_than_was_known(tmp_path: Path) -> None:
    """What its own config asks for counts: it waits for as many devices, and a smaller one starts before it."""
    queue = Queue(tmp_path, 3, DevicePool(("0", "1")), sizes={1: 2})
    assert queue.prepare_all()[0] == (0, True)
    assert queue.take() == (0, ("0",))
    queue.prepare_all()
    assert queue.take() is None
    queue.prepare_all()
    assert queue.take() == (2, ("1",))
    queue.queue.job_ended(0)
    assert queue.take() is None
    queue.queue.job_ended(2)
    assert queue.take() == (1, ("0", "1"))


def test_a_job_that_does_not_fit(tmp_path: Path) -> None:
    """If that shows only when it is composed it fails alone."""
    queue = Queue(tmp_path, 2, DevicePool(("0",)), sizes={1: 2})
    assert queue.prepare_all() == [(0, True), (1, False)]
    assert queue.take() == (0, ("0",))
    assert not queue.queue.waiting


def test_discarded(tmp_path: Path) -> None:
    """One that was taken out does not start, nor what was ready, nor, at last, any."""
    queue = Queue(tmp_path, 4, early=range(4))
    queue.prepare_all()
    queue.queue.discard(0)
    assert queue.take() is None
    assert queue.prepare_all() == [(1, True)]
    assert queue.queue.discard_ready() == [1]
    assert queue.queue.discard_ready() == []
    assert queue.prepare_all() == [(2, True)]
    assert queue.queue.clear() == [2, 3]
    assert not queue.queue.waiting and not queue.queue.can_prepare and queue.take() is None
    assert queue.queue.clear() == []
