"""Hydra's own suites for launchers, with one and with two ranks a job."""

from __future__ import annotations

import importlib.util

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from hydra.test_utils.test_utils import chdir_plugin_root

from hydra_plugins.hydra_ddp_subprocess_launcher.plugins import DDPSubprocessLauncher

# Ranks a job, and whether they are forks: the suites are small, and preload is to change nothing.
SIZES = (
    ["hydra.launcher.nproc_per_node=1"],
    ["hydra.launcher.nproc_per_node=2"],
    ["hydra.launcher.nproc_per_node=2", "hydra.launcher.preload=auto"],
)
IDS = ("1 rank", "2 ranks", "2 ranks, preloaded")
# Hydra's fixtures put singletons back to what they were when a test began: so the scan comes before.
Plugins.instance()
chdir_plugin_root()


@pytest.mark.sample
def test_discovery() -> None:
    """Hydra finds the launcher among its plugins."""
    assert DDPSubprocessLauncher.__name__ in [found.__name__ for found in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("ddp_subprocess", size) for size in SIZES],
    ids=IDS,
)
class TestLauncher(LauncherTestSuite):
    """Hydra's launcher suite: it calls sweeps from within pytest, so ranks take the function entry."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("ddp_subprocess", ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2", *size]) for size in SIZES],
    ids=IDS,
)
class TestBatches(BatchedSweeperTestSuite):
    """Hydra's suite for sweepers that launch in batches."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/job_logging=disabled", "hydra/launcher=ddp_subprocess", *size]) for size in SIZES],
    ids=IDS,
)
class TestIntegration(IntegrationTestSuite):
    """Hydra's suite of small programs: here ranks run the program again."""


needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit")


@needs_submitit
@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("ddp_submitit_local", ["hydra.launcher.nproc_per_node=1", "hydra.launcher.max_parallel_jobs=2"])],
)
class TestLauncherThroughSubmitit(LauncherTestSuite):
    """Hydra's launcher suite through submitit's local executor."""


@needs_submitit
@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [
        (
            {},
            [
                "-m",
                "hydra/job_logging=disabled",
                "hydra/launcher=ddp_submitit_local",
                "hydra.launcher.nproc_per_node=1",
            ],
        )
    ],
)
class TestIntegrationThroughSubmitit(IntegrationTestSuite):
    """Hydra's suite of small programs through submitit's local executor."""
