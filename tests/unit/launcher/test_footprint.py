"""What a sweeper writes is taken back, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.dry_run import DirSnapshot


def sweep(folder: Path) -> None:
    """Do what a sweeper does before it launches."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "multirun.yaml").write_text("new")


def test_new_directories_go(tmp_path: Path) -> None:
    """Of a directory that was not there nothing stays; a second time is once too many, and does no harm."""
    footprint = DirSnapshot.look(str(tmp_path / "a" / "b"))
    sweep(tmp_path / "a" / "b")
    footprint.restore()
    assert list(tmp_path.iterdir()) == []
    footprint.restore()
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_comes_back(tmp_path: Path) -> None:
    """A file that was there has its content, time and mode as before."""
    old = tmp_path / "multirun.yaml"
    old.write_bytes(b"old \xff")
    old.chmod(0o640)
    os.utime(old, ns=(1_000_000_001, 2_000_000_003))
    footprint = DirSnapshot.look(str(tmp_path))
    sweep(tmp_path)
    footprint.restore()
    status = old.stat()
    assert old.read_bytes() == b"old \xff"
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (2_000_000_003, 0o640)


def test_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    """Directories into which another file came stay, those within them that are empty do not."""
    footprint = DirSnapshot.look(str(tmp_path / "a" / "b"))
    sweep(tmp_path / "a" / "b")
    (tmp_path / "a" / "mine").touch()
    footprint.restore()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "mine"]


def test_nothing_was_written(tmp_path: Path) -> None:
    """Where the sweeper failed before it wrote, there is nothing to do."""
    DirSnapshot.look(str(tmp_path / "a")).restore()
    (tmp_path / "file").touch()
    DirSnapshot.look(str(tmp_path / "file" / "below")).restore()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one of the time when the sweep began, wherever the program goes."""
    monkeypatch.chdir(tmp_path)
    footprint = DirSnapshot.look("out")
    sweep(tmp_path / "out")
    monkeypatch.chdir("/")
    footprint.restore()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_put_back(tmp_path: Path) -> None:
    """A file that cannot be read would be lost: that is said before anything is written."""
    (tmp_path / "multirun.yaml").mkdir()
    with pytest.raises(StartError, match=r"could not put back .*multirun\.yaml"):
        DirSnapshot.look(str(tmp_path))
