"""What runs on each node of a job on a cluster, without one: with signals, files and a stand-in for submitit's."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import JobFailedError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupReport, RankExit, StopReason
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.node_runner import NodeRunner
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobEnd, JobFolder, Rendezvous
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm import node_task
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.node_task import SubmittedJob
from support.runner import PATIENCE_S
from support.starts import launch_spec, submitted

if importlib.util.find_spec("submitit") is None:
    pytest.skip("needs the extra `submitit`", allow_module_level=True)


class Environment:
    """Stand in for submitit's JobEnvironment."""

    job_id, node, num_nodes, hostnames = "7", 0, 1, ("here",)

    def _usr_sig(self) -> int:
        return signal.SIGUSR2

    def name(self) -> str:
        return "local"


def part_of(job: SubmittedJob) -> Any:
    os.makedirs(job.folder, exist_ok=True)
    return node_task._NodeRun(job, Environment(), ("here",), "0.0")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(node_task, "_AFTERMATH_LOCAL_S", 0.5)
    monkeypatch.setattr(node_task, "_REFUSED_S", 0.5)
    monkeypatch.setattr(node_task, "_SKEW_S", 1.0)
    logger = logging.getLogger(node_task.__package__)
    before = list(logger.handlers), logger.level
    handler = signal.getsignal(signal.SIGUSR2)
    yield
    logger.handlers[:], level = before
    logger.setLevel(level)
    signal.signal(signal.SIGUSR2, handler)


# --- a job that is over


@pytest.mark.parametrize("end", [JobEnd(True), JobEnd(False, "rank 1: ValueError")])
def test_a_job_that_is_over_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: JobEnd) -> None:
    """A job that the cluster starts once more after its end gives that end again, and touches nothing."""
    import submitit

    monkeypatch.setattr(submitit, "JobEnvironment", Environment)
    job = submitted(tmp_path)
    JobFolder(job.folder).publish_end(end)
    if end.completed:
        assert node_task.NodeTask()(job) == "completed"
    else:
        with pytest.raises(JobFailedError, match=r"The job failed \(rank 1: ValueError\)"):
            node_task.NodeTask()(job)
    assert not (tmp_path / "run").exists()


def test_too_few_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job for two nodes that got one, as by `sbatch` within another allocation, says so."""
    import submitit

    from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError

    monkeypatch.setattr(submitit, "JobEnvironment", Environment)
    job = submitted(tmp_path)
    spec = launch_spec(str(tmp_path / "run"), 1, nnodes=2)
    with pytest.raises(StartError, match=r"for 2 nodes, but the cluster names 1 \(here"):
        node_task.NodeTask()(replace(job, spec=spec))


def test_the_checkpoint_counts(tmp_path: Path) -> None:
    """What is run when the job is queued again differs from what ran: files of the two are told apart by it."""
    delayed = node_task.NodeTask(2).checkpoint(submitted(tmp_path))
    assert delayed.function._requeued == 3 and delayed.args == (submitted(tmp_path),)


def test_an_end_that_cannot_be_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while does not turn a job that has completed into one that could not be started."""
    monkeypatch.setattr(node_task, "_PUBLISH_INTERVAL_S", 0.0)
    job = submitted(tmp_path)
    part = part_of(job)
    (tmp_path / "meeting").rename(tmp_path / "elsewhere")
    (tmp_path / "meeting").write_text("in its way")
    tried = []

    def make_room(_seconds: float) -> None:
        tried.append(1)
        if len(tried) == 3:
            (tmp_path / "meeting").unlink()

    monkeypatch.setattr(node_task.time, "sleep", make_room)
    part._publish(JobEnd(True))
    assert len(tried) == 3 and JobFolder(job.folder).read_end() == JobEnd(True)


# --- leaving


def handled_by(function: Any) -> None:
    signal.signal(signal.SIGUSR2, function)


def preempted(job: SubmittedJob) -> Any:
    part = part_of(job)
    part._node.preempted = True
    return part


def test_queued_again(tmp_path: Path) -> None:
    """Submitit's handler ends the process; the job has no end yet."""
    job = submitted(tmp_path)
    handled_by(lambda *_: sys.exit(144))
    with pytest.raises(SystemExit) as raised:
        preempted(job)._leave()
    assert raised.value.code == 144
    assert JobFolder(job.folder).read_end() is None


def test_not_queued_again(tmp_path: Path) -> None:
    """Where submitit does not, as for too many time limits, the job has failed of that."""
    job = submitted(tmp_path)

    def refuse(*_: object) -> None:
        raise RuntimeError("Job not requeued because: timed-out too many times.")

    handled_by(refuse)
    with pytest.raises(RuntimeError, match="too many times"):
        preempted(job)._leave()
    end = JobFolder(job.folder).read_end()
    assert end is not None and (end.completed, end.cause) == (
        False,
        "Job not requeued because: timed-out too many times.",
    )


def test_scontrol_that_is_ended_by_what_it_asks_for(tmp_path: Path) -> None:
    """The requeue ends all processes of the job, also the `scontrol` that waits for its answer: that is no failure."""
    job = submitted(tmp_path)

    def requeue(*_: object) -> None:
        raise subprocess.CalledProcessError(-signal.SIGTERM, ["scontrol", "requeue", "7"])

    handled_by(requeue)
    with pytest.raises(SystemExit):
        preempted(job)._leave()
    assert JobFolder(job.folder).read_end() is None


def test_scontrol_that_refuses(tmp_path: Path) -> None:
    """If nothing follows, the job has failed, and it is said of what."""
    job = submitted(tmp_path)

    def refuse(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["scontrol", "requeue", "7"])

    handled_by(refuse)
    with pytest.raises(SystemExit):
        preempted(job)._leave()
    end = JobFolder(job.folder).read_end()
    assert end is not None and end.cause.startswith(
        "it could not be queued again: Command '['scontrol', 'requeue', '7']'"
    )


def test_a_signal_that_is_not_followed_by_another(tmp_path: Path) -> None:
    """After SIGTERM alone the part waits for what the cluster does, and leaves."""
    part = part_of(submitted(tmp_path))
    part._node.shutdown.receive(signal.SIGTERM, 0.0)
    with pytest.raises(SystemExit) as raised:
        part._leave()
    assert raised.value.code == 128 + signal.SIGTERM


def test_sigterm_before_the_clusters_signal(tmp_path: Path) -> None:
    """Some clusters send SIGTERM first and then say why: the job is queued again all the same."""
    part = part_of(submitted(tmp_path))
    part._aftermath_s = 30.0
    part._node.shutdown.receive(signal.SIGTERM, 0.0)
    handled_by(lambda *_: sys.exit(144))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    with pytest.raises(SystemExit) as raised:
        part._leave()
    timer.join()
    assert raised.value.code == 144


# --- a signal that comes to one node first


@pytest.mark.parametrize(
    ("report", "waits"),
    [
        (None, False),
        (GroupReport((RankExit(0, 1, 1.0, stopped=False),), StopReason.RANK_FAILED, 0), False),
        (GroupReport((RankExit(1, -15, 1.0, stopped=True),), StopReason.RANK_FAILED, 0), False),
        (GroupReport((RankExit(1, -15, 1.0, stopped=False),), StopReason.RANK_FAILED, 1), True),
        (GroupReport((RankExit(1, -signal.SIGUSR2, 1.0, stopped=False),), StopReason.RANK_FAILED, 1), True),
        (GroupReport((), StopReason.SIGNALLED, None), True),
        (GroupReport((), StopReason.PREEMPTED, None), True),
    ],
)
@pytest.mark.parametrize("comes", [True, False])
def test_what_a_signal_has_ended(tmp_path: Path, report: GroupReport | None, waits: bool, comes: bool) -> None:
    """Where ranks on another node were ended by a signal, it comes here, too, or they have failed of it."""
    part = part_of(submitted(tmp_path))
    with part._node.listening():
        if comes:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
        began = time.monotonic()
        assert part._is_being_stopped(report) == (waits and comes)
        waited = time.monotonic() - began
        assert waits or waited < 0.15
        if comes:
            timer.join()
            part._node.pause()


# --- a parent that is gone

ORPHAN = """
import os, sys, time
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.node_runner import NodeRunner
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import Rendezvous
if os.fork():
    os._exit(0)
node = NodeRunner(0, Rendezvous(), None, int(sys.argv[1]) or os.getppid())
with node.listening():
    print(node.is_stopped_within(20), node.orphaned, flush=True)
"""


def test_an_orphan_is_stopped() -> None:
    """A part whose parent has ended notices that by itself."""
    argv = [sys.executable, "-c", ORPHAN, "1000000000"]
    assert subprocess.check_output(argv, text=True, timeout=PATIENCE_S).split() == ["True", "True"]


def test_a_part_with_a_parent_is_not(tmp_path: Path) -> None:
    node = NodeRunner(0, Rendezvous(), signal.SIGUSR2, os.getppid())
    with node.listening():
        assert not node.is_stopped_within(0.3)
    assert not node.orphaned


# --- the stand-in


def test_environment_of_a_local_job() -> None:
    """The stand-in has what submitit's environment has."""
    import submitit

    real = submitit.local.local.LocalJobEnvironment
    assert all(hasattr(real, name) for name in ("_usr_sig", "name", "job_id", "node", "num_nodes", "hostnames"))
