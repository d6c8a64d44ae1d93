"""The spawner and its keepers, driven as the launching process drives them, with ranks that are shell commands."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Channel, GroupReport, GroupSpec, Limits, Started
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.spawners import KeeperEnded, SpawnerLink
from support.runner import PATIENCE_S


@pytest.fixture
def link() -> Iterator[SpawnerLink]:
    """A spawner for the test."""
    link = SpawnerLink()
    yield link
    link.close()


def spec(folder: Path, script: str, nproc: int = 2, **changes: object) -> GroupSpec:
    """Return a group whose ranks run a shell script and store an outcome when it ends by itself, without `exec`.

    `$RANK` is the rank, `$PWD` the test's folder.
    """
    values: dict[str, object] = {
        "argv": ("/bin/sh", "-c", f"trap ': > {folder}/outcome_$RANK' EXIT; {script}"),
        "cwd": str(folder),
        "environment": {"PATH": os.environ["PATH"]},
        "rank_environments": tuple({"RANK": str(rank)} for rank in range(nproc)),
        "log_files": tuple(str(folder / f"rank_{rank}.log") for rank in range(nproc)),
        "outcome_files": tuple(str(folder / f"outcome_{rank}") for rank in range(nproc)),
        "failure_files": tuple(str(folder / f"failure_{rank}") for rank in range(nproc)),
        "limits": Limits(grace_period_s=1.0),
    }
    return GroupSpec(**{**values, **changes})  # type: ignore[arg-type]


class Job:
    """One job and what was heard of it."""

    def __init__(self, link: SpawnerLink, number: int, group: GroupSpec, held: Sequence[int] = ()) -> None:
        self.link, self.number = link, number
        self.channel = Channel(link.start_keeper(number, held))
        self.channel.send(group)
        self.started: Started | None = None
        self.report: GroupReport | None = None
        self.ended: KeeperEnded | None = None

    def hear(self, timeout_s: float = 0.05) -> None:
        if self.ended is not None:
            return
        waiting: list[SpawnerLink | Channel] = [one for one in (self.link, self.channel) if not one.disconnected]
        select.select(waiting, [], [], timeout_s)
        # First: what a keeper says last, it has said before its spawner says that it ended.
        ended = [ended for ended in self.link.receive() if ended.job == self.number]
        self.channel.flush()
        for message in self.channel.receive():
            self.started = message if isinstance(message, Started) and message.ranks else self.started
            self.report = message if isinstance(message, GroupReport) else self.report
        if ended:
            self.ended = ended[0]
            self.channel.close()

    def wait(self, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while getattr(self, what) is None:
            assert time.monotonic() < deadline, f"{what} did not come"
            self.hear()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_file(job: Job, path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"{path} did not appear"
        job.hear()
    return path.read_text()
