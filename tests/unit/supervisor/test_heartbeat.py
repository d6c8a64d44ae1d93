"""What nodes of a job tell each other through files, on a clock of the test's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupReport, RankExit, RendezvousDir, StopReason
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor.heartbeat import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    Peers,
    refresh_names,
    report_for_keeper,
)

BEGAN = 1000.0
WELL = GroupReport((RankExit(0, 0, 5.0, stopped=False),), None, None, began_at=50.0, finished=True)
FAILED = GroupReport((RankExit(2, 1, 3.0, stopped=False),), StopReason.RANK_FAILED, 2, began_at=70.0)


class Nodes:
    """The views of all nodes of one job, which come when they are asked for first."""

    def __init__(self, folder: Path, nnodes: int = 2) -> None:
        self.folder = folder
        self.nnodes = nnodes

    def come(self, node: int, now: float = BEGAN) -> Peers:
        return Peers(RendezvousDir(str(self.folder), node, self.nnodes), f"host-{node}", now)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path / "made" / "anew")


def beat(now: float, *peers: Peers) -> None:
    """Have each give a sign of life, and then each see those of the others."""
    for _ in range(2):
        for one in peers:
            one.look(now)


def test_they_meet(nodes: Nodes) -> None:
    """Whoever is missing is named; by host as soon as it has come."""
    first = nodes.come(0)
    first.look(BEGAN)
    assert (first.missing, first.host_of(1)) == (["node 1"], "")
    second = nodes.come(1)
    second.look(BEGAN)
    first.look(BEGAN + 1)
    assert first.missing == second.missing == []
    assert (first.host_of(1), second.host_of(0)) == ("host-1", "host-0")
    assert first.unfinished == ["node 1 (host-1)"]
    assert (first.failed, first.ended_well, first.lost(BEGAN + 1)) == ("", False, [])


def test_a_number_that_is_taken(nodes: Nodes) -> None:
    """Two processes cannot both be node 1."""
    nodes.come(1)
    with pytest.raises(FileExistsError):
        nodes.come(1)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Nodes(tmp_path / "file" / "folder").come(0)


def test_a_failure_on_one_node(nodes: Nodes) -> None:
    """It is known to the others while the group is still being ended, and its report to all when they have ended."""
    first, second = nodes.come(0), nodes.come(1)
    beat(BEGAN, first, second)
    second.tell_failure(FAILED)
    first.look(BEGAN + 1)
    assert (first.failed, first.why_failed) == ("node 1 (host-1)", "")
    assert first.unfinished == ["node 1 (host-1)"]
    own = GroupReport((RankExit(0, -15, 4.0, stopped=True),), StopReason.NODE_FAILED, None, "node 1", began_at=50.0)
    first.tell_failure(own)
    second.tell_end(FAILED)
    first.tell_end(own)
    beat(BEGAN + 2, first, second)
    assert first.unfinished == second.unfinished == []
    for merged in (first.merge(own), second.merge(FAILED)):
        assert (merged.reason, merged.cause, merged.detail) == (StopReason.RANK_FAILED, 2, "on node 1 (host-1)")
        assert [(ended.rank, ended.code) for ended in merged.exits] == [(2, 1), (0, -15)]
        assert (merged.hosts, merged.finished) == (("host-0", "host-1"), False)


def test_the_failure_that_was_told_first_is_the_cause(nodes: Nodes) -> None:
    """Whatever their clocks and numbers: a later one does not take its place."""
    first, second = nodes.come(0), nodes.come(1)
    own = GroupReport((), StopReason.RANK_FAILED, 0, began_at=1.0)
    second.tell_failure(FAILED)
    first.tell_failure(own)
    second.tell_end(FAILED)
    first.tell_end(own)
    beat(BEGAN, first, second)
    assert first.merge(own).cause == second.merge(FAILED).cause == 2


def test_a_first_failure_without_words(nodes: Nodes) -> None:
    """One that was lost before it could say what failed does not hide what another one has said."""
    first, second = nodes.come(0), nodes.come(1)
    (nodes.folder / "first_failure").write_text("0")
    second.tell_failure(FAILED)
    second.tell_end(FAILED)
    own = GroupReport((), StopReason.NODE_FAILED, None, "node 1")
    first.look(BEGAN)
    assert first.merge(own).cause == 2
    (nodes.folder / "first_failure").write_text("")
    assert first.merge(own).cause == 2


def test_only_the_first_word_about_a_failure_is_told(nodes: Nodes) -> None:
    first, second = nodes.come(0), nodes.come(1)
    first.tell_failure(GroupReport((), StopReason.ORDERED, None, "SIGINT"))
    first.tell_failure(GroupReport((), StopReason.LAUNCHER_LOST, None, "later"))
    second.look(BEGAN)
    assert second.why_failed == "SIGINT"


def test_all_end_well(nodes: Nodes) -> None:
    """A node whose ranks have ended is not lost, however long it is silent."""
    first, second = nodes.come(0), nodes.come(1)
    second.tell_end(WELL)
    beat(BEGAN, first, second)
    assert (first.ended_well, first.unfinished, first.failed) == (True, [], "")
    for second_s in range(1, 200):
        first.look(BEGAN + second_s)
    assert first.lost(BEGAN + 200) == []
    merged = first.merge(WELL)
    assert (merged.reason, merged.cause, merged.finished, merged.hosts) == (None, None, True, ("host-0", "host-1"))


def test_a_node_that_has_ended_and_gives_up(nodes: Nodes) -> None:
    """One whose ranks are gone, and that is stopped while it waits for the others, is heard."""
    first, second = nodes.come(0), nodes.come(1)
    first.tell_end(WELL)
    second.look(BEGAN)
    assert (second.ended_well, second.failed) == (True, "")
    stopped = GroupReport(WELL.exits, StopReason.ORDERED, None, "SIGINT", finished=True)
    first.tell_failure(stopped)
    second.look(BEGAN + 1)
    assert (second.ended_well, second.failed) == (False, "node 0 (host-0)")
    merged = second.merge(GroupReport((), StopReason.NODE_FAILED, None, "node 0"))
    assert (merged.reason, merged.detail) == (StopReason.ORDERED, "on node 0 (host-0): SIGINT")


def test_a_report_of_what_lingered(nodes: Nodes) -> None:
    """A node that was ended after its ranks had finished has not failed, and the report says why it was ended."""
    first, second = nodes.come(0), nodes.come(1)
    second.tell_end(
        GroupReport((), StopReason.TEARDOWN_TIMEOUT, None, "rank 3 still running", finished=True, left=True)
    )
    first.look(BEGAN)
    merged = first.merge(WELL)
    assert (merged.reason, merged.finished, merged.left) == (StopReason.TEARDOWN_TIMEOUT, True, True)


def test_silence(nodes: Nodes) -> None:
    """A node that gives signs of life is not lost; one that gives none for long is."""
    first, second = nodes.come(0), nodes.come(1)
    now = BEGAN
    while now < BEGAN + 3 * HEARTBEAT_TIMEOUT_S:
        now += HEARTBEAT_INTERVAL_S
        beat(now, first, second)
        assert first.lost(now) == []
    silent_since = now
    while not first.lost(now):
        now += HEARTBEAT_INTERVAL_S
        first.look(now)
        assert now < silent_since + 2 * HEARTBEAT_TIMEOUT_S
    assert now - silent_since > HEARTBEAT_TIMEOUT_S
    assert first.lost(now) == ["node 1 (host-1)"]
    merged = first.merge(GroupReport((), StopReason.NODE_LOST, None, "node 1 (host-1)"))
    assert (merged.reason, merged.detail, merged.finished) == (StopReason.NODE_LOST, "node 1 (host-1)", False)
    second.look(now)
    first.look(now)
    assert first.lost(now) == []


def test_ones_own_silence(nodes: Nodes) -> None:
    """Who could not look, as it was stopped or its file system did not answer, blames nobody for it."""
    first, second = nodes.come(0), nodes.come(1)
    beat(BEGAN, first, second)
    first.look(BEGAN + 10 * HEARTBEAT_TIMEOUT_S)
    assert first.lost(BEGAN + 10 * HEARTBEAT_TIMEOUT_S) == []


def test_one_that_has_not_come_is_not_lost(nodes: Nodes) -> None:
    """It may wait for its devices as long as it wants; nor is it waited for by one that ends before."""
    first = nodes.come(0)
    now = BEGAN
    while now < BEGAN + 2 * HEARTBEAT_TIMEOUT_S:
        now += HEARTBEAT_INTERVAL_S
        first.look(now)
    assert (first.lost(now), first.missing, first.unfinished) == ([], ["node 1"], [])
    stopped = GroupReport((), StopReason.ORDERED, None, "SIGINT")
    first.tell_failure(stopped)
    assert first.merge(stopped).detail == "on node 0 (host-0): SIGINT"
    assert first.merge(stopped).hosts == ("host-0", "")


def test_one_that_cannot_tell_falls_silent(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no signs of life any more, so that the others do not rely on it."""
    first, second = nodes.come(0), nodes.come(1)
    beat(BEGAN, first, second)
    file = nodes.folder / "node_0.jsonl"

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        first.tell_end(WELL)
    touched = file.stat().st_mtime_ns
    for place in range(10):
        first.look(BEGAN + place * HEARTBEAT_INTERVAL_S)
    assert file.stat().st_mtime_ns == touched


def test_a_full_disk_at_the_start(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, also where only a part of the line could be written."""
    monkeypatch.setattr(os, "write", lambda descriptor, data: 3)
    with pytest.raises(OSError, match=r"No space left on device: .*node_0\.jsonl"):
        nodes.come(0)


def test_lines_that_come_in_parts(nodes: Nodes) -> None:
    """A line counts when it is whole; one that will never be hides none of the others."""
    first = nodes.come(0)
    second = nodes.folder / "node_1.jsonl"
    second.write_text('{"here": {"ho')
    first.look(BEGAN)
    assert first.missing == ["node 1"]
    with second.open("a") as file:
        file.write('st": "late"}}\n{"failing": {"ex')
    first.look(BEGAN + 1)
    assert (first.host_of(1), first.failed) == ("late", "")
    report_for_keeper(RendezvousDir(str(nodes.folder), 1, 2), "late", FAILED)
    first.look(BEGAN + 2)
    assert (first.failed, first.unfinished) == ("node 1 (late)", [])


def test_in_the_place_of_a_keeper_that_never_came(nodes: Nodes) -> None:
    """The others need not wait for it, and know why."""
    first = nodes.come(0)
    lost = GroupReport((), StopReason.KEEPER_LOST, None)
    report_for_keeper(RendezvousDir(str(nodes.folder), 1, 2), "host-1", lost)
    first.look(BEGAN)
    assert (first.missing, first.failed, first.unfinished) == ([], "node 1 (host-1)", [])
    merged = first.merge(GroupReport((), StopReason.NODE_FAILED, None, "node 1 (host-1)"))
    assert (merged.reason, merged.detail) == (StopReason.KEEPER_LOST, "on node 1 (host-1)")


def test_every_reason_comes_through(nodes: Nodes) -> None:
    """Each field of a report reads as it was written."""
    first, second = nodes.come(0), nodes.come(1)
    told = GroupReport(
        (RankExit(3, -9, 1.5, stopped=True),), StopReason.PREEMPTED, 3, "“quoted”\nline", 12.5, finished=True, left=True
    )
    second.tell_failure(told)
    first.look(BEGAN)
    merged = first.merge(GroupReport((), StopReason.NODE_FAILED, None))
    assert merged.reason is StopReason.PREEMPTED
    assert merged.detail == "on node 1 (host-1): “quoted”\nline"
    words = [json.loads(line) for line in (nodes.folder / "node_1.jsonl").read_text().splitlines()]
    assert [list(word) for word in words] == [["here"], ["failing"]]


def test_files_are_private(nodes: Nodes) -> None:
    first = nodes.come(0)
    first.tell_failure(FAILED)
    assert {path.stat().st_mode & 0o777 for path in nodes.folder.iterdir()} == {0o600}


def test_refreshing_changes_nothing(tmp_path: Path) -> None:
    """Names are read anew by a change that is none; a folder that is not there yet is no error."""
    tmp_path.chmod(0o2750)
    before = tmp_path.stat()
    refresh_names(str(tmp_path))
    after = tmp_path.stat()
    assert after.st_mode == before.st_mode
    assert after.st_ctime_ns >= before.st_ctime_ns
    refresh_names(str(tmp_path / "nowhere"))
