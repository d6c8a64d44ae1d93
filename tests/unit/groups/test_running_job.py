"""A job whose spawner stands still: noticed although the copy that it holds keeps the keeper's socket open."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Channel, GroupReport, Limits, Started
from hydra_plugins.hydra_ddp_subprocess_launcher.groups import running_job as running_job_module
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.running_job import RunningJob
from hydra_plugins.hydra_ddp_subprocess_launcher.job.plan import Attempt
from support.runner import PATIENCE_S
from support.starts import launch_spec

NOTHING: Any = None


@dataclass
class FakeSpawner:
    """Takes note of what is done to it."""

    done: list[str] = field(default_factory=list)

    def wake(self) -> None:
        self.done.append("woken")

    def kill(self) -> None:
        self.done.append("killed")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


def running_job(link: Any, channel: Channel) -> RunningJob:
    start = launch_spec("/nowhere", 1, "of no process", max_restarts=3)
    return RunningJob(start, NOTHING, Attempt(), link, channel, [])


def test_a_report_through_a_socket_that_stays_open(ends: tuple[Channel, Channel]) -> None:
    """After the keeper's last word the spawner is asked for its own, whether the keeper's socket closes or not."""
    spawner = FakeSpawner()
    job = running_job(spawner, ends[0])
    ends[1].send(GroupReport((), None, None))
    job.receive()
    now = time.monotonic()
    assert not job.channel.disconnected
    job.check_stuck(now + 4)
    assert spawner.done == []
    job.check_stuck(now + 6)
    job.check_stuck(now + 11)
    assert spawner.done == ["woken", "killed"]


def test_a_killed_keeper_behind_a_socket_that_stays_open(ends: tuple[Channel, Channel]) -> None:
    """A keeper that ended without a last word is missed by its pid, whether its socket closes or not."""
    spawner = FakeSpawner()
    job = running_job(spawner, ends[0])
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as keeper:
        ends[1].send(Started(keeper.pid, ()))
        job.receive()
        now = time.monotonic()
        job.check_stuck(now)
        assert job.lost_at is None
        keeper.kill()
    job.check_stuck(now)
    assert job.lost_at == now
    job.check_stuck(now + 11)
    assert spawner.done == ["killed"]
    assert job.keeper is not None
    job.keeper.close()


def test_no_time_runs_while_it_waits_for_other_nodes(ends: tuple[Channel, Channel]) -> None:
    """A time limit is for ranks: a keeper that has not started its own yet is not taken for one that hangs."""
    start = launch_spec("/nowhere", 1, "of no process", rendezvous_dir="/meeting", limits=Limits(1.0, timeout_s=10.0))
    job = RunningJob(start, NOTHING, Attempt(), NOTHING, ends[0], [])
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as keeper:
        ends[1].send(Started(keeper.pid, ()))
        job.receive()
        job.check_stuck(time.monotonic() + 1000)
        assert keeper.poll() is None
        ends[1].send(Started(keeper.pid, (keeper.pid,)))
        job.receive()
        job.check_stuck(time.monotonic() + 1000)
        assert keeper.wait(PATIENCE_S) == -9
    assert job.keeper is not None
    job.keeper.close()


def test_no_restart_beside_what_cannot_be_ended(ends: tuple[Channel, Channel]) -> None:
    """A job of which something is left, whoever says so, is not started again: its devices may still be in use."""
    for left in (False, True):
        job = running_job(FakeSpawner(), ends[0])
        job.report = GroupReport((), None, None, left=left)
        assert job.end_leftovers() == []
        again = job.next_attempt(completed=False, own_port=False)
        assert (again is None) == left
        lost = running_job(FakeSpawner(), ends[0])
        lost.has_leftovers = left
        lost.end_leftovers()
        assert lost.has_leftovers == left


def test_configs_that_are_gone(tmp_path: Path) -> None:
    """What a job did to the files that would be compared is no difference, and ends no sweep."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "torn").write_text("{")
    (tmp_path / "good").write_text('{"x": "1"}')
    (tmp_path / "other").write_text('{"x": "2"}')
    for bad in ("folder", "torn", "missing"):
        assert running_job_module._differing_keys([str(tmp_path / "good"), str(tmp_path / bad)]) == []
    assert running_job_module._differing_keys([str(tmp_path / "good"), str(tmp_path / "other")]) == ["x"]
