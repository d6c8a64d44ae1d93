"""The files by which the first node tells of a job's starts and its end."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import LauncherError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import FORMAT
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupReport, StopReason
from hydra_plugins.hydra_ddp_subprocess_launcher.groups import rendezvous
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import JobEnd, JobFolder, report_for_keeper
from support.starts import launch_spec


def test_starts_and_the_end(tmp_path: Path) -> None:
    """Each start has a key of its own, and its meeting's folder is there before it is known."""
    folder = JobFolder(str(tmp_path / "0"))
    assert (folder.read_start("0"), folder.read_end()) == (None, None)
    meeting = str(tmp_path / "0" / "run-1")
    start = launch_spec("/run", 2, rendezvous_dir=meeting)
    folder.publish_start("0", start)
    assert (folder.read_start("0"), folder.read_start("1")) == (start, None)
    assert os.path.isdir(meeting)
    end = JobEnd(False, "rank 1 failed", start, GroupReport((), StopReason.RANK_FAILED, 1))
    folder.publish_end(end)
    assert folder.read_end() == end
    folder.refresh()


def test_the_last_start(tmp_path: Path) -> None:
    """Its file tells by its looks alone whether there is news."""
    folder = JobFolder(str(tmp_path / "0"))
    assert folder.find_last_start() is None
    starts = [launch_spec("/run", 2, run_id) for run_id in ("first", "second", "again")]
    folder.publish_start("0.0", starts[0])
    first = folder.find_last_start()
    assert first is not None and first.read() == starts[0]
    assert folder.find_last_start() == first
    os.utime(first.path, ns=(1, 1))
    folder.publish_start("0.1", starts[1])
    second = folder.find_last_start()
    assert second is not None and second.read() == starts[1]
    folder.publish_start("0.1", starts[2])
    again = folder.find_last_start()
    assert again is not None and again != second and again.read() == starts[2]
    Path(again.path).write_text("torn")
    assert again.read() is None


def test_the_end_of_a_job_that_was_never_started(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path / "0"))
    folder.publish_end(JobEnd(False, "it does not compose"))
    assert folder.read_end() == JobEnd(False, "it does not compose")


@pytest.mark.parametrize("text", ["", "torn", "\x80\x04N"])
def test_what_is_no_start(tmp_path: Path, text: str) -> None:
    """A damaged file tells nothing."""
    for name in ("start_0.pkl", "end.pkl"):
        (tmp_path / name).write_text(text, encoding="latin-1")
    folder = JobFolder(str(tmp_path))
    assert (folder.read_start("0"), folder.read_end()) == (None, None)


def test_a_start_of_another_version(tmp_path: Path) -> None:
    """It is refused, not taken for none: this node would wait for ever for a start that is there."""
    for name in ("start_0.pkl", "end.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps({"format": FORMAT + 1, "content": None}))
    folder = JobFolder(str(tmp_path))
    for read in (lambda: folder.read_start("0"), folder.read_end):
        with pytest.raises(LauncherError, match="another version"):
            read()


def test_private_files(tmp_path: Path) -> None:
    """They are pickles, which run code when they are read."""
    folder = JobFolder(str(tmp_path))
    folder.publish_start("0", launch_spec("/run", 1))
    folder.publish_end(JobEnd(True))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    (tmp_path / "link.pkl").symlink_to(tmp_path / "end.pkl")
    (tmp_path / "end.pkl").rename(tmp_path / "moved")
    (tmp_path / "end.pkl").symlink_to(tmp_path / "moved")
    assert folder.read_end() is None


MET = GroupReport((), None, None, hosts=("a", "b"))
NOT_MET = GroupReport((), StopReason.START_FAILED, 2, "Read-only file system")


@pytest.mark.parametrize(
    ("report", "told"), [(MET, None), (NOT_MET, StopReason.START_FAILED), (None, StopReason.KEEPER_LOST)]
)
def test_who_tells_for_a_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: GroupReport | None, told: StopReason | None
) -> None:
    """Only where it could not do so itself; and nothing is told of a job on one node."""
    said: list[GroupReport] = []
    monkeypatch.setattr(rendezvous.heartbeat, "report_for_keeper", lambda meeting, host, report: said.append(report))
    report_for_keeper(launch_spec("/run", 1), 0, report)
    assert said == []
    report_for_keeper(launch_spec("/run", 1, rendezvous_dir=str(tmp_path)), 0, report)
    assert [one.reason for one in said] == ([] if told is None else [told])


def test_nobody_can_tell(tmp_path: Path) -> None:
    """Then the others are left to the silence of this node."""
    (tmp_path / "file").write_text("")
    report_for_keeper(launch_spec("/run", 1, rendezvous_dir=str(tmp_path / "file" / "m")), 0, None)
