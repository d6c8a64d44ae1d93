"""What the machine gives this process: cores by affinity and quota, and the environment that it was started with."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common import processes

if TYPE_CHECKING:
    from support.runner import Runner

MODULE = processes.__name__
CORES = f"from {MODULE} import usable_cores; print(usable_cores())"


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)


def test_usable_cores() -> None:
    """There is at least one core, and no more than the affinity allows."""
    assert 1 <= processes.usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_cores_under_taskset(runner: Runner) -> None:
    """A process that is held to one core counts one."""
    core = min(os.sched_getaffinity(0))
    assert runner.run("taskset", "-c", str(core), sys.executable, "-c", CORES).output == "1\n"


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"),
    [
        ("max 100000", 8, 8),
        ("400000 100000", 8, 4),
        ("150000 100000", 8, 1),
        ("50000 100000", 8, 1),
        ("900000 100000", 8, 8),
    ],
)
def test_cores_by_the_quota_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, quota: str, affinity: int, cores: int) -> None:
    """A container's quota counts in whole cores, at least one, and never adds to the affinity."""
    files = {"/proc/self/cgroup": "12:cpu:/old\n0::/box\n", "/sys/fs/cgroup/box/cpu.max": f"{quota}\n"}
    fake_files(monkeypatch, files)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(affinity)))
    assert processes.usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 2), ("10000", 1)])
def test_cores_by_the_quota_of_an_old_cgroup(monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    """cgroup v1 says the same in two files."""
    folder = "/sys/fs/cgroup/cpu"
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    fake_files(monkeypatch, files)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert processes.usable_cores() == cores


def test_cores_without_any_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell of quotas, the affinity counts."""
    fake_files(monkeypatch, {})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert processes.usable_cores() == 3


def fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let these be the only files that can be read as text."""

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_the_first_environment(runner: Runner) -> None:
    """What the program does to its environment later does not show; odd values are read as Python shows them."""
    code = f"""
import os
from {MODULE} import start_environment
os.environ["KEPT"] = "changed"
os.environ["ADDED"] = "new"
del os.environ["GONE"]
found = start_environment()
print(ascii([found.get(name) for name in ("KEPT", "ADDED", "GONE", "ODD", "EMPTY")]))
"""
    env = {"KEPT": "first", "GONE": "there", "ODD": "a=b\n\udcff", "EMPTY": ""}
    ran = runner.python("-c", code, env=env)
    assert ran.output == ascii(["first", None, "there", "a=b\n\udcff", ""]) + "\n"


@pytest.mark.parametrize(("name", "supported"), [("posix", True), ("nt", False)])
def test_unsupported_systems(monkeypatch: pytest.MonkeyPatch, name: str, supported: bool) -> None:
    """On Windows the reason says what to use instead."""
    with monkeypatch.context() as patch:
        patch.setattr("os.name", name)
        reason = processes.unsupported_reason()
    assert reason is None if supported else "WSL 2" in (reason or "")


def test_cores_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM need not bind a job to its cores: what it says bounds them, and what is no number does not."""
    all_of_them = processes.usable_cores()
    for said, cores in (("1", 1), ("100000", all_of_them), ("", all_of_them), ("4(x2)", all_of_them)):
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", said)
        assert processes.usable_cores() == cores
