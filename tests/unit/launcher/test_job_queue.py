"""What is expected of the jobs in line: how many run at a time, with how many ranks, and how that is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher._errors import OptionError
from hydra_plugins.hydra_ddp_subprocess_launcher._line import Line
from hydra_plugins.hydra_ddp_subprocess_launcher._schedule import Pool
from hydra_plugins.hydra_ddp_subprocess_launcher._spool import KeptConfig

NOTHING: Any = None


def line(pool: Pool, sizes: list[object]) -> Line:
    """Return a line of jobs whose configs ask for these numbers of ranks, or of ranks and of devices for each of them.

    "?" is one that was not composed yet.
    """

    def take(overrides: list[str]) -> KeptConfig | None:
        size = sizes[int(overrides[0].removeprefix("job="))]
        return None if size == "?" else KeptConfig(NOTHING, size if isinstance(size, tuple) else (size, 1))

    sweep: Any = SimpleNamespace(
        pool=pool,
        settings=SimpleNamespace(nnodes=1),
        spool=SimpleNamespace(take=take),
        config=OmegaConf.create({"size": 1, "hydra": {"launcher": {"nproc_per_node": "${size}"}}}),
    )
    return Line(sweep, {number: [f"job={number}"] for number in range(len(sizes))}, NOTHING, NOTHING)


@pytest.mark.parametrize(
    ("pool", "sizes", "jobs", "ranks", "said"),
    [
        (Pool(), [2], 1, 2, "1 job, 1 at a time, 2 ranks each"),
        (Pool(), [1, 1, 1], 1, 1, "3 jobs, 1 at a time, 1 rank each"),
        (Pool(max_jobs=4), [2, 2], 2, 4, "2 jobs, 2 at a time, 2 ranks each"),
        (Pool(max_jobs=2), [3, 1, 2], 2, 5, "3 jobs, 2 at a time, 1-3 ranks each"),
        (Pool(tuple("abcd")), [2, 2, 2], 2, 4, "3 jobs, 2 at a time, 2 ranks each, devices [a,b] [c,d]"),
        (Pool(tuple("abcd")), [1], 1, 1, "1 job, 1 at a time, 1 rank each, devices [a]"),
        (Pool(tuple("abcd")), [3, 3], 1, 3, "2 jobs, 1 at a time, 3 ranks each, devices [a,b,c]"),
        (Pool(tuple("abcd")), ["auto", "auto"], 1, 4, "2 jobs, 1 at a time, 4 ranks each, devices [a,b,c,d]"),
        (Pool(tuple("ab"), jobs_per_device=2), [1] * 9, 4, 4, "9 jobs, 4 at a time, 1 rank each, devices a b"),
        (Pool(tuple("abcd")), [1, 3], 2, 4, "2 jobs, 2 at a time, 1-3 ranks each, devices a b c d"),
        (Pool(tuple("abcd")), ["?", "?"], 2, 4, "2 jobs, 2 at a time, ranks as each job asks, devices a b c d"),
        (Pool(tuple("abcd")), [(1, 2)] * 3, 2, 2, "3 jobs, 2 at a time, 1 rank on 2 devices each, devices [a,b] [c,d]"),
        (Pool(tuple("abcd")), [("auto", 2)], 1, 2, "1 job, 1 at a time, 2 ranks on 4 devices each, devices [a,b,c,d]"),
        (
            Pool(tuple("abcd")),
            [(1, 2), (1, 4), (2, 1)],
            2,
            4,
            "3 jobs, 2 at a time, 1-2 ranks on 2-4 devices each, devices a b c d",
        ),
        (
            Pool(tuple("ab"), jobs_per_device=2),
            [(1, 2)] * 9,
            2,
            2,
            "9 jobs, 2 at a time, 1 rank on 2 devices each, devices a b",
        ),
        (Pool(), [(2, 4)], 1, 2, "1 job, 1 at a time, 2 ranks each"),
        (Pool(), [], 0, 1, "0 jobs, 0 at a time, ranks as each job asks"),
    ],
)
def test_what_is_expected(pool: Pool, sizes: list[object], jobs: int, ranks: int, said: str) -> None:
    """No more jobs than there are, and the ranks that are then there at most, which share the processor cores."""
    expected = line(pool, sizes)
    assert (expected.most_jobs, expected.most_ranks, expected.summary) == (jobs, ranks, said)


def test_a_size_that_never_fits() -> None:
    """A job that is known to be too large stops the sweep, and is named; one whose size makes no sense fails alone."""
    with pytest.raises(OptionError, match=r"Job 1 \(job=1\): A job of 3 ranks does not fit"):
        line(Pool(("a", "b")), [1, 3])
    with pytest.raises(OptionError, match=r"Job 1 \(job=1\): A job of 2 ranks on 2 devices each does not fit"):
        line(Pool(("a", "b")), [(1, 2), (2, 2)])
    assert line(Pool(("a", "b")), [1, 0, "many", None, (1, 0)]).most_jobs == 2
