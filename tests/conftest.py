"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.version import VersionBase

from support.runner import Runner

# Their fixtures are everybody's.
pytest_plugins = ("support.slurm_cluster", "support.two_hosts", "support.spawning")


def pytest_configure() -> None:
    """Take back signals that nohup or a shell's `&` had ignored: what the tests start would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a SLURM cluster, so that `-m "not slurm"` leaves it out."""
    for item in items:
        if "slurm_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")


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
