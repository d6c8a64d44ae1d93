"""How the launching processes of a sweep on several nodes find each other, with threads in their place."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupReport, StopReason
from hydra_plugins.hydra_ddp_subprocess_launcher.groups import rendezvous
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobEnd, JobFolder, NodeRendezvous, why_it_ends
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor.heartbeat import HEARTBEAT_TIMEOUT_S
from support.runner import PATIENCE_S
from support.starts import launch_spec


@dataclass
class Clock:
    """Goes on by what is waited, and by itself only if it is told to."""

    now: float = 1000.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.over:
            raise SystemExit
        with self.lock:
            self.now += seconds
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock for the test, at whose end nobody waits any more."""
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(Coming, "threads", clock.threads)
    yield clock
    clock.over = True
    for thread in clock.threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def left_at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """What would be done at the end of the process."""
    hooks: list[Callable[..., None]] = []
    monkeypatch.setattr(atexit, "register", lambda hook, *arguments: hooks.append(lambda: hook(*arguments)))
    return hooks


class Coming:
    """A node that comes, in a thread."""

    threads: ClassVar[list[threading.Thread]] = []

    def __init__(self, folder: Path, node: int, nnodes: int) -> None:
        self.gathering: NodeRendezvous | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._come, args=(str(folder), node, nnodes), daemon=True)
        self.threads.append(self.thread)
        self.thread.start()

    def _come(self, folder: str, node: int, nnodes: int) -> None:
        try:
            self.gathering = NodeRendezvous.join(folder, node, nnodes)
        except BaseException as error:
            self.error = error

    @property
    def came(self) -> NodeRendezvous:
        self.thread.join(PATIENCE_S)
        assert self.error is None, self.error
        assert self.gathering is not None, "it still waits"
        return self.gathering

    @property
    def refused(self) -> str:
        self.thread.join(PATIENCE_S)
        assert isinstance(self.error, StartError), self.error
        return str(self.error)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[NodeRendezvous, NodeRendezvous]:
    """Two nodes that have met."""
    first, second = Coming(tmp_path / "nodes", 0, 2), Coming(tmp_path / "nodes", 1, 2)
    return first.came, second.came


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Who comes first waits for the others; all of them are in one folder then."""
    coming = {}
    for node in order:
        coming[node] = Coming(tmp_path, node, 3)
        time.sleep(0.05)
    assert len({one.came.job_dir(4) for one in coming.values()}) == 1
    assert [one.came.check() for one in coming.values()] == [""] * 3
    assert coming[2].came.first_host == os.uname().nodename


def test_what_an_earlier_run_left(tmp_path: Path, pair: tuple[NodeRendezvous, NodeRendezvous]) -> None:
    """A node that comes before the first one does not take an earlier run for this one."""
    second = Coming(tmp_path / "nodes", 1, 2)
    time.sleep(0.2)
    assert second.gathering is None and second.error is None
    first = Coming(tmp_path / "nodes", 0, 2)
    assert first.came.job_dir(0) == second.came.job_dir(0) != pair[0].job_dir(0)


@pytest.mark.parametrize("text", ["", "abc 1", "abc 1 2 3 4", "\0\0\0"])
def test_a_call_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "session").write_text(text)
    second = Coming(tmp_path, 1, 2)
    time.sleep(0.05)
    first = Coming(tmp_path, 0, 2)
    assert first.came.job_dir(0) == second.came.job_dir(0)


def test_who_waits_says_for_whom(tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level(logging.INFO)
    second = Coming(tmp_path, 1, 2)
    deadline = time.monotonic() + PATIENCE_S
    while "Waiting for node 0 in" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first = Coming(tmp_path, 0, 2)
    assert first.came.job_dir(0) == second.came.job_dir(0)
    Coming(tmp_path / "other", 0, 3)
    while "Waiting for node 1, node 2 (hydra.launcher.nnodes=3)" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_number_twice(tmp_path: Path) -> None:
    """The second one is told, whether it comes before all are there or after."""
    coming = [Coming(tmp_path, 1, 3), Coming(tmp_path, 1, 3)]
    first = Coming(tmp_path, 0, 3)
    deadline = time.monotonic() + PATIENCE_S
    while not any(one.error for one in coming):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (refused,) = [one for one in coming if one.error is not None]
    assert "takes part in this sweep as node 1" in refused.refused
    assert "hydra.launcher.node_rank of its own" in refused.refused
    (good,) = [one for one in coming if one is not refused]
    third = Coming(tmp_path, 2, 3)
    assert good.came.check() == third.came.check() == first.came.check() == ""


def test_one_that_comes_too_late(pair: tuple[NodeRendezvous, NodeRendezvous], tmp_path: Path, clock: Clock) -> None:
    """While the sweep runs the first node goes on calling, so that who has no place in it is not left to wait."""
    late = Coming(tmp_path / "nodes", 1, 2)
    deadline = time.monotonic() + PATIENCE_S
    while late.error is None:
        assert time.monotonic() < deadline
        clock.now += 1.0
        assert pair[0].check() == ""
        time.sleep(0.005)
    assert "as node 1, or has done so" in late.refused


def test_another_number_of_nodes(tmp_path: Path) -> None:
    """Nodes that would wait for each other in vain are told."""
    Coming(tmp_path, 0, 2)
    assert "nnodes=3 here, but 2 at node 0. Start all nodes with the same command" in Coming(tmp_path, 1, 3).refused


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes might not be understood."""
    Coming(tmp_path, 0, 2)
    wait_for(tmp_path / "session")
    monkeypatch.setattr(rendezvous, "__version__", "0.0.1")
    assert "Version 0.0.1 of the launcher is here, but" in Coming(tmp_path, 1, 2).refused


def test_a_fork_of_the_process(pair: tuple[NodeRendezvous, NodeRendezvous], clock: Clock) -> None:
    """Its end is not the end of the process that takes part."""
    if (child := os.fork()) == 0:
        pair[1].leave("forked")
        os._exit(0)
    os.waitpid(child, 0)
    clock.now += 2
    assert pair[0].check() == ""
    pair[1].leave("itself")
    clock.now += 2
    assert "itself" in pair[0].check()


def test_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could not read what the first node writes does not wait for it for ever."""
    Coming(tmp_path, 0, 2)
    wait_for(tmp_path / "session")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert "is another user's" in Coming(tmp_path, 1, 2).refused


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for node in (0, 1):
        assert "cannot meet in" in Coming(tmp_path / "file" / "nodes", node, 2).refused


def test_one_that_leaves_before_all_are_there(tmp_path: Path, left_at_exit: list[Callable[..., None]]) -> None:
    """Who waits for a third one does not go on waiting when the second one is stopped."""
    first, second = Coming(tmp_path, 0, 3), Coming(tmp_path, 1, 3)
    deadline = time.monotonic() + PATIENCE_S
    while len(left_at_exit) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for leave in left_at_exit:
        leave()
    assert "The sweep cannot begin: node 1" in first.refused
    assert "has left the sweep" in second.refused


def test_starts_and_ends_of_jobs(pair: tuple[NodeRendezvous, NodeRendezvous]) -> None:
    """The starts of a job are counted; those of the next one begin anew."""
    first, second = pair
    starts = [launch_spec("/run", 1, f"run-{place}", number=number) for place, number in enumerate((0, 0, 1))]
    for start in starts:
        first.publish_start(start)
    folders = [JobFolder(second.job_dir(number)) for number in (0, 1)]
    assert [folders[0].read_start("0"), folders[0].read_start("1"), folders[1].read_start("0")] == starts
    assert folders[1].read_start("1") is None
    first.publish_end(0, JobEnd(True))
    assert folders[0].read_end() == JobEnd(True)


def test_an_end_that_cannot_be_told(pair: tuple[NodeRendezvous, NodeRendezvous], clock: Clock) -> None:
    """Then the sweep is over: the others would wait for the end of that job, and this one for them in the next."""
    first, second = pair
    Path(first.job_dir(3)).write_text("in the way")
    first.publish_end(3, JobEnd(True))
    assert "cannot be told of the end of job 3" in first.check()
    clock.now += 2
    assert "node 0" in second.check() and "cannot be told of the end of job 3" in second.check()


def test_leaving(pair: tuple[NodeRendezvous, NodeRendezvous], clock: Clock) -> None:
    """The others know who has left, and why, in one line; what is said later does not change that."""
    first, second = pair
    second.leave("This is wrong\nin  two lines.")
    second.leave("again")
    clock.now += 2
    said = first.check()
    assert said.startswith("node 1 (") and said.endswith("has left the sweep (This is wrong in two lines)")
    assert second.check() == ""


def test_silence(pair: tuple[NodeRendezvous, NodeRendezvous], clock: Clock) -> None:
    """A launching process that was killed gives no signs of life; one that is there does."""
    first, second = pair
    for _ in range(int(2 * HEARTBEAT_TIMEOUT_S)):
        clock.now += 1
        assert first.check() == second.check() == ""
    for _ in range(int(HEARTBEAT_TIMEOUT_S) + 10):
        clock.now += 1
        first.check()
    assert first.check().startswith("nothing has been heard of node 1 (")


LOST, ORDERED = StopReason.LAUNCHER_LOST, StopReason.ORDERED


@pytest.mark.parametrize(
    ("node", "report", "said"),
    [
        (0, None, ""),
        (0, GroupReport((), None, None), ""),
        (0, GroupReport((), StopReason.RANK_FAILED, 3, first_node=1), ""),
        (0, GroupReport((), LOST, None, "on node 1 (b)", first_node=1), "the launching process is gone on node 1 (b)"),
        (1, GroupReport((), LOST, None, "on node 0 (a)", first_node=0), "the launching process is gone on node 0 (a)"),
        (
            0,
            GroupReport((), ORDERED, None, "on node 1: SIGINT", first_node=1),
            "a node was stopped (on node 1: SIGINT)",
        ),
        (0, GroupReport((), ORDERED, None, "max_failures", first_node=0), ""),
        (1, GroupReport((), ORDERED, None, "max_failures", first_node=0), ""),
    ],
)
def test_what_keepers_tell(
    pair: tuple[NodeRendezvous, NodeRendezvous], node: int, report: GroupReport | None, said: str
) -> None:
    """They know at once that another node's launching process is gone, or was stopped."""
    pair[node].observe(report)
    assert pair[node].check() == said


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (StartError("This cannot be."), "This cannot be."),
        (KeyboardInterrupt(), "SIGINT"),
        (SystemExit(143), "SIGTERM"),
        (SystemExit(129), "SIGHUP"),
        (SystemExit(1), "SystemExit: 1"),
        (ValueError("broken"), "ValueError: broken"),
    ],
)
def test_why_it_ends(error: BaseException, why: str) -> None:
    """As a user knows it."""
    assert why_it_ends(error) == why


def test_a_node_of_a_cluster_that_does_not_come(tmp_path: Path, clock: Clock) -> None:
    """Where all are started together, one that has not come for long will not: its program may be missing there."""
    gathering = NodeRendezvous(str(tmp_path), 0, 2, arrive_s=600.0)
    assert gathering.check() == ""
    clock.now += 590.0
    assert gathering.check() == ""
    clock.now += 20.0
    assert gathering.check() == "node 1 has not come"


def test_a_node_of_a_cluster_that_comes_late(tmp_path: Path, clock: Clock) -> None:
    """All are there in time: nobody is missed then."""
    gathering = NodeRendezvous(str(tmp_path), 0, 2, arrive_s=600.0)
    NodeRendezvous(str(tmp_path), 1, 2, arrive_s=600.0)
    clock.now += 610.0
    assert gathering.check() == ""
