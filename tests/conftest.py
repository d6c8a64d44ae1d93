"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.version import VersionBase
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from support.runner import Runner

TESTS = Path(__file__).parent
# Tests that share what is costly: one worker runs them. Not by `xdist_group`, which pytest 9.2 ignores.
TOGETHER = re.compile(r"slurm/test_slurm|test_soak|test_fault_matrix.*\[(beside|together)/")
# The machine may be busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# Their fixtures are everybody's.
pytest_plugins = ("support.slurm_cluster", "support.two_hosts", "support.spawning", "support.scripted")


def pytest_configure() -> None:
    """Take back signals that nohup or a shell's `&` had ignored: what the tests start would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests, not only those of the default lane")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run two tests a core, as most of them wait; named tests run in this process."""
    return 0 if any("::" in argument for argument in config.args) else 2 * len(os.sched_getaffinity(0))


class Scheduler(LoadScopeScheduling):
    """Each test is for the next worker that is free, but for those that are run together."""

    def _split_scope(self, nodeid: str) -> str:
        shared = TOGETHER.search(nodeid)
        return shared[0] if shared else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests into lanes, and leave out what only the full lane runs."""
    for item in items:
        lane = item.path.relative_to(TESTS).parts[0]
        if lane == "unit":
            item.add_marker("unit")
        if lane == "integration" and not is_sample(item):
            item.add_marker("full")
        if "slurm_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


def is_sample(item: pytest.Item) -> bool:
    """Return if a test, with these parameters, stands for its kind in the default lane."""
    marker = item.get_closest_marker("sample")
    chosen = item.name.partition("[")[2].removesuffix("]")
    return marker is not None and (not marker.args or chosen in marker.args)


@pytest.fixture(autouse=True)
def _version_base() -> Iterator[None]:
    """Hydra keeps for the rest of the process what a test said of its version."""
    holder = VersionBase.instance()
    before = holder.version_base
    yield
    holder.version_base = before


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """A Runner in this test's own folder; whatever it left running is ended and fails the test."""
    runner = Runner(tmp_path)
    yield runner
    left = runner.alive()
    for pid in left:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    assert left == {}, f"processes outlived the test: {left}"
