"""The program's own source files: found among all that is imported, and watched for changes."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import OnCodeChange
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.job import program
from hydra_plugins.hydra_ddp_subprocess_launcher.job.program import SourceWatch, changed_sources, stamp_sources


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a script and two imported modules, one of them reached through a link."""
    for name in ("train.py", "model.py", "unused.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "link").symlink_to(tmp_path)
    for name, file in (("ut_model", tmp_path / "model.py"), ("ut_linked", tmp_path / "link" / "model.py")):
        module = ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    return tmp_path


def touch(file: Path, text: str) -> None:
    """Change a file as an editor does, with a new modification time."""
    stamp = file.stat().st_mtime_ns
    file.write_text(text)
    os.utime(file, ns=(stamp + 10_000_000, stamp + 10_000_000))


def test_the_programs_own_files(project: Path) -> None:
    """The main script and the imported files are stamped; what is installed, built in, or ours is not."""
    stamps = stamp_sources(str(project / "train.py"))
    assert {str(project / "train.py"), str(project / "model.py"), __file__} <= set(stamps)
    assert str(project / "unused.py") not in stamps
    others = (cloudpickle.__file__, pytest.__file__, os.__file__, logging.__file__, program.__file__)
    assert not set(map(os.path.realpath, others)) & set(map(os.path.realpath, stamps))
    status = (project / "model.py").stat()
    assert stamps[str(project / "model.py")] == (status.st_size, status.st_mtime_ns)


@pytest.mark.parametrize("main_script", [None, "gone.py", "."])
def test_without_a_main_script(project: Path, main_script: str | None) -> None:
    """A program without a script, or one that is a folder, has its imported files alone."""
    stamps = stamp_sources(None if main_script is None else str(project / main_script))
    assert str(project / "model.py") in stamps
    assert str(project / "train.py") not in stamps


def test_odd_modules(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """A module without a file, with None for one, or with one that is gone, is passed over."""
    for name, file in (("ut_none", None), ("ut_gone", str(project / "gone.py")), ("ut_so", str(project / "ext.so"))):
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ut_no_file", ModuleType("ut_no_file"))
    assert not {str(project / "gone.py"), str(project / "ext.so"), "", "None"} & set(stamp_sources(None))


def test_what_changed(project: Path) -> None:
    """Another size, another time and a file that is gone are changes; a file that is put back is none."""
    stamps = stamp_sources(str(project / "train.py"))
    assert changed_sources(stamps) == []
    first = (project / "train.py").stat()
    touch(project / "train.py", "# other\n")
    assert changed_sources(stamps) == [str(project / "train.py")]
    (project / "model.py").unlink()
    linked = str(project / "link" / "model.py")
    assert changed_sources(stamps) == sorted([linked, str(project / "model.py"), str(project / "train.py")])
    (project / "train.py").write_text("# train.py\n")
    os.utime(project / "train.py", ns=(first.st_atime_ns, first.st_mtime_ns))
    assert str(project / "train.py") not in changed_sources(stamps)


def test_warn(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each file that changed is named once, in the sweep's log."""
    watch = SourceWatch(str(project / "train.py"))
    watch.check(OnCodeChange.warn)
    assert caplog.messages == []
    touch(project / "train.py", "# other\n")
    watch.check(OnCodeChange.warn)
    watch.check(OnCodeChange.warn)
    assert len(caplog.messages) == 1
    assert f"changed since the sweep started: {project / 'train.py'}." in caplog.messages[0]
    touch(project / "model.py", "# another\n")
    watch.check(OnCodeChange.warn)
    assert len(caplog.messages) == 2
    assert str(project / "model.py") in caplog.messages[1] and "train.py" not in caplog.messages[1]


def test_fail_and_ignore(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`fail` refuses every job from the change on; `ignore` says nothing."""
    watch = SourceWatch(str(project / "train.py"))
    watch.check(OnCodeChange.fail)
    touch(project / "train.py", "# other\n")
    for _ in range(2):
        with pytest.raises(StartError, match=r"train\.py\. Jobs would no longer .*code_changed=fail"):
            watch.check(OnCodeChange.fail)
    watch.check(OnCodeChange.ignore)
    assert caplog.messages == []
