"""A real SLURM with two nodes, for the tests that need one.

`slurm_cluster` is started once a session, by slurm_cluster.sh, and shared with sessions that run at the same time.
`slurm` is the same, and ends the jobs that the test left. Tests that use either have the mark `slurm`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from support.runner import PATIENCE_S

SCRIPT = Path(__file__).with_suffix(".sh")
# Set, it makes a failure of what otherwise is a skip.
REQUIRE = "HYDRA_DDP_REQUIRE_SLURM"
# Held by every session that uses the cluster, so that the last one stops it. The lock of a killed session is gone.
_USERS = Path("/run/hydra-ddp-slurm.users")


@dataclass(frozen=True)
class SlurmCluster:
    """The running cluster. Its nodes share files and processes with this machine: `runner.alive()` sees their jobs.

    Each node claims 8 CPUs, 16 GB and 2 GPUs. A job in the partition `high` preempts those in `test`, the default one.
    """

    # "netns": a node has its own host name, address and loopback; "shared": it has this machine's.
    network: str
    nodes: tuple[str, ...]
    addresses: tuple[str, ...]
    # At which the nodes reach this machine, and their interface for it, as in GLOO_SOCKET_IFNAME.
    controller_address: str
    interface: str

    def squeue(self, below: Path | None = None) -> dict[str, str]:
        """Return the jobs that wait or run, array tasks apart, with their states; `below`: submitted in that folder."""
        rows = [line.split("|", 2) for line in _output("squeue", "-h", "-r", "-o", "%i|%T|%Z").splitlines()]
        return {job: state for job, state, cwd in rows if below is None or Path(cwd).is_relative_to(below)}

    def scancel(self, job_id: int | str, signal: str | None = None) -> None:
        """Cancel a job, or send the processes of its steps a signal, say "USR2"."""
        _output("scancel", *([f"--signal={signal}"] if signal else []), str(job_id))

    def sacct_state(self, job_id: int | str) -> str:
        """Return a job's state as accounting knows it, "" for not at all. It hears of a start up to 5 s late."""
        lines = _output("sacct", "-X", "-n", "-P", "-o", "State", "-j", str(job_id)).splitlines()
        return lines[0].split()[0] if lines else ""  # "CANCELLED by 0"

    def wait_for_state(self, job_id: int | str, *states: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until accounting has one of these states for a job."""
        _wait(lambda: self.sacct_state(job_id) in states, timeout_s, lambda: f"{job_id}: {self.sacct_state(job_id)!r}")

    def wait_until_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no job waits or runs and all nodes are idle; for ever, while another session has jobs."""
        _wait(lambda: not self.squeue() and self._idle(), timeout_s, lambda: f"still there: {self.squeue()}")

    def _idle(self) -> bool:
        return set(_output("sinfo", "-h", "-N", "-o", "%t").split()) == {"idle"}


def _output(*argv: str) -> str:
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, f"{' '.join(argv)}: {ran.stderr}"
    return ran.stdout


def _wait(holds: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"{timeout_s} s are over; {otherwise()}")
        time.sleep(0.1)


def unavailable(reason: str) -> NoReturn:
    """Skip, or fail where a cluster is required."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but there is no SLURM cluster: {reason}", pytrace=False)
    pytest.skip(f"no SLURM cluster: {reason}")


def _script(*argv: str) -> list[list[str]]:
    """Run slurm_cluster.sh and return the words of what it said."""
    ran = subprocess.run(
        [SCRIPT, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False
    )
    if ran.returncode != 0:
        last = "\n".join(ran.stderr.splitlines()[-15:])
        unavailable(last.removeprefix(f"{SCRIPT.name}: "))
    return [line.split() for line in ran.stdout.splitlines()]


def _kept() -> bool:
    return ["keep", "yes"] in _script("status")


def _alone(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster, started if need be; stopped by the last session that uses it, unless somebody wants to keep it."""
    if os.geteuid() != 0:
        unavailable("needs root")
    users = os.open(_USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _alone(users):
            if not _kept():
                _script("down")  # What a killed session left, with its jobs.
            said = _script("up", "--session")
            fcntl.flock(users, fcntl.LOCK_SH)
        else:
            fcntl.flock(users, fcntl.LOCK_SH)
            said = _script("up", "--session")
        facts = {words[0]: words[1] for words in said}
        nodes = [words[1:] for words in said if words[0] == "node"]
        yield SlurmCluster(
            network=facts["network"],
            nodes=tuple(name for name, _ in nodes),
            addresses=tuple(address for _, address in nodes),
            controller_address=facts["controller"],
            interface="eth0" if facts["network"] == "netns" else "lo",
        )
        if _alone(users) and not _kept():
            _script("down")
    finally:
        os.close(users)


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmCluster]:
    """The cluster; jobs that were submitted in this test's folder and outlive the test are ended and fail it."""
    yield slurm_cluster
    # A job that has just ended is about to leave.
    left = {job: state for job, state in slurm_cluster.squeue(tmp_path).items() if state != "COMPLETING"}
    for job in left:
        slurm_cluster.scancel(job)
    _wait(lambda: not slurm_cluster.squeue(tmp_path), 30, lambda: f"still there: {slurm_cluster.squeue(tmp_path)}")
    assert left == {}, f"jobs outlived the test: {left}"
