"""The short version of tests/benchmarks/soak.py."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from support.runner import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import soak

JOBS = 60
# What measuring a short sweep adds to the memory that the results themselves take.
NOISE_KIB = 4096


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> soak.Soaked:
    return soak.soak(tmp_path_factory.mktemp("soak"), JOBS, timeout_s=PATIENCE_S)


def test_every_result_is_right_and_in_its_place(soaked: soak.Soaked) -> None:
    """Sixty jobs with random faults: each JobReturn is what its job's fault makes of it, in order."""
    print(soak.report(soaked))
    assert len(soaked.plans) > JOBS / 6
    assert soaked.wrong == []
    assert soaked.left == []
    assert soaked.code == 1


def test_nothing_grows_but_the_results(soaked: soak.Soaked) -> None:
    """Memory grows by what the results take, and descriptors and unreaped children do not grow."""
    (begun, first), (ended, last) = soaked.launcher[0], soaked.launcher[-1]
    assert last.memory - first.memory < 1.5 * soaked.kept * (ended - begun) + NOISE_KIB, soak.report(soaked)
    assert soaked.spawner[-1][1].memory - soaked.spawner[0][1].memory < NOISE_KIB / 4
    for history in (soaked.launcher, soaked.spawner):
        quarter = len(history) // 4
        early, late = ([usage.descriptors for _, usage in part] for part in (history[:quarter], history[-quarter:]))
        assert max(late) <= max(early) + 1
        # One may be seen between its end and its reaping.
        assert statistics.median(usage.zombies for _, usage in history) == 0
        assert max(usage.zombies for _, usage in history) <= 2
