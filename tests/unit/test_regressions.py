"""Bugs that were found once, each held by a test that fails without its cure."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common import files
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, make_job_folder
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import (
    GroupReport,
    Limits,
    Outcome,
    RankExit,
    Stop,
    StopReason,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.common.text import duration
from hydra_plugins.hydra_ddp_subprocess_launcher.display.logs import LogTee
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.spawners import SpawnerLink
from hydra_plugins.hydra_ddp_subprocess_launcher.job.program import stamp_sources
from hydra_plugins.hydra_ddp_subprocess_launcher.job.results import resolve_result
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor.stop_policy import StopPolicy
from support.runner import NOISE_S
from support.spawning import Job, spec
from support.starts import launch_spec


def test_an_order_that_arrives_with_the_spec(link: SpawnerLink, tmp_path: Path) -> None:
    """A stop that is sent before the keeper has read its spec is obeyed."""
    job = Job(link, 0, spec(tmp_path, "exec sleep 3", nproc=1))
    job.channel.send(Stop(at_once=True, detail="SIGINT"))
    job.wait("ended")
    assert job.report is not None and job.report.reason is StopReason.ORDERED


def test_lines_that_end_in_crlf(tmp_path: Path) -> None:
    """With a prefix, lines that end in CR LF are shown."""
    (tmp_path / "log").write_bytes(b"50%\r100%\r\nhello\r\n")
    assert LogTee(str(tmp_path / "log"), "> ").read() == "> 100%\n> hello\n"


def test_a_limit_is_not_met_by_ranks_that_ended() -> None:
    """Limits are about ranks that run: after the last good exit there is none to be ended."""
    rules = StopPolicy(range(1), Limits(15, exit_timeout_s=0), 0.0)
    rules.outcome_stored(0, 5.0)
    rules.rank_exited(0, 0, 5.0)
    rules.decide(5.0)
    assert rules.report().reason is None


def test_an_earlier_folder_that_was_deleted(tmp_path: Path) -> None:
    """A user may delete `earlier_0`: the next job starts, and the last one's log is kept."""
    paths = JobPaths(str(tmp_path))
    for number in range(3):
        make_job_folder(paths)
        Path(paths.log(0)).write_text(f"log {number}")
    shutil.rmtree(os.path.join(paths.folder, "earlier_0"))
    make_job_folder(paths)
    assert sorted(os.listdir(tmp_path)) == [".ddp"]


def test_a_lazy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in sys.modules whose attributes cannot be had does not end the sweep."""

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise ImportError("an optional dependency is missing")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    stamp_sources(None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "FIFO"])
def test_an_outcome_that_is_no_file(tmp_path: Path, make: Any) -> None:
    """What is no regular file is no outcome, at once."""
    paths = JobPaths(str(tmp_path))
    make_job_folder(paths)
    make(paths.outcome(0))
    assert files.read_outcome(paths, 0, "") is None


@pytest.mark.timeout(120)
def test_a_long_line(tmp_path: Path) -> None:
    """A line of many MiB without a newline neither ends the launcher nor holds it up."""
    with (tmp_path / "log").open("wb") as file:
        for _ in range(70):
            file.write(b"\r" + b"x" * (1 << 20))
    began = time.monotonic()
    LogTee(str(tmp_path / "log"), "> ").read()
    assert time.monotonic() - began < 5 + NOISE_S


def test_half_a_character_at_the_end(tmp_path: Path) -> None:
    """A log that ends within a character shows that something was there."""
    (tmp_path / "log").write_bytes("abc €".encode()[:-1])
    tee = LogTee(str(tmp_path / "log"), "", raw=True)
    assert tee.read() + tee.read(last=True) == "abc \ufffd"


def test_an_impossible_environment(link: SpawnerLink, tmp_path: Path) -> None:
    """A variable that no process can have is a rank that cannot be started, not a lost keeper."""
    job = Job(link, 0, spec(tmp_path, "true", nproc=1, environment={"A=B": "1"}))
    job.wait("ended")
    assert job.report is not None and job.report.reason is StopReason.START_FAILED


def test_a_duration_just_below_a_minute() -> None:
    """59.96 s are a minute."""
    assert duration(59.96) == "1:00"


def test_who_lost_a_peer_is_not_the_cause(tmp_path: Path) -> None:
    """Rank 0 fails first because rank 1, which raised, is tearing its group down: rank 1 is the cause."""
    paths = JobPaths(str(tmp_path))
    make_job_folder(paths)
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"
    for rank, (summary, at) in enumerate([(lost, 10.0), ("ValueError: boom", 11.0)]):
        outcome = Outcome(completed=False, summary=summary, traceback=summary, failed_at=at, run_id="run")
        files.write_outcome(paths, rank, outcome)
    exits = (RankExit(0, 1, 1.0, False), RankExit(1, -15, 2.0, True))
    verdict = resolve_result(
        GroupReport(exits, StopReason.RANK_FAILED, 0, "", 9.0), launch_spec(paths.run_dir, 2, "run")
    )
    assert verdict.cause == "rank 1: ValueError: boom"
    os.unlink(paths.failure(1))
    alone = resolve_result(GroupReport(exits, StopReason.RANK_FAILED, 0, "", 9.0), launch_spec(paths.run_dir, 2, "run"))
    assert "look at the logs of the other ranks" in alone.block
