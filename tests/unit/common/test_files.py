"""A job's files: whole or not there, private where they are pickles, and read only when they can be trusted."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common import files
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import LauncherError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, make_job_folder
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Outcome, Payload, TaskId

ODD_NAMES = [
    "plain",
    "with space",
    "it's",
    'say "x"',
    "100%",
    "%20",
    "a,b=c",
    "${x}",
    "line\nbreak",
    "ünï",
    "\udcff\udc80",
]
RUN = "run-1"
OUTCOME = Outcome(completed=True, value=pickle.dumps(3), note="n", run_id=RUN)
PAYLOAD = Payload(
    overrides=("lr=0.1", "s=\udcff"),
    run_dir="/run",
    task=TaskId("__main__", "main", 0),
    task_name="app",
    sys_path=(),
    check_config=False,
    body=b"\0body",
)


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def names(folder: str | Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """The paths of a job whose folder is there and empty."""
    paths = JobPaths(str(tmp_path / "run"))
    make_job_folder(paths)
    return paths


def write_payload(paths: JobPaths) -> str:
    """Write the payload as a job's start does, and return its digest."""
    data = files.dump(PAYLOAD)
    files.write_private(paths.payload, data)
    return hashlib.sha256(data).hexdigest()


class Trap:
    """Leave a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


# --- where they are


def test_every_path_is_in_one_folder() -> None:
    """All files of ours lie in `.ddp` of the run directory, with one name a rank."""
    paths = JobPaths("/runs/0")
    assert paths.folder == "/runs/0/.ddp"
    assert [os.path.relpath(path, paths.folder) for path in (paths.payload, paths.facts)] == ["payload.pkl", "job.json"]
    of_rank = (paths.log, paths.outcome, paths.failure, paths.resolved_config)
    assert [os.path.relpath(path(1), paths.folder) for path in of_rank] == [
        "rank_1.log",
        "outcome_1.pkl",
        "failure_1.pkl",
        "config_1.json",
    ]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_odd_folder_names(tmp_path: Path, name: str) -> None:
    """A run directory may have any name that the file system takes: everything is written there and read back."""
    paths = JobPaths(os.path.join(tmp_path, name, "0"))
    make_job_folder(paths)
    digest = write_payload(paths)
    files.write_outcome(paths, 0, OUTCOME)
    files.write_text(paths.facts, name)
    assert files.read_payload(paths, digest) == PAYLOAD
    assert files.read_outcome(paths, 0, RUN) == OUTCOME
    assert Path(paths.facts).read_bytes() == os.fsencode(name)
    make_job_folder(paths)
    assert names(paths.folder) == ["earlier_0"]
    assert names(tmp_path) == [name]
    assert names(paths.run_dir) == [".ddp"]


# --- making the folder


def test_a_new_folder(tmp_path: Path) -> None:
    """The run directory is made with its parents, and nothing but our empty folder is in it."""
    paths = JobPaths(str(tmp_path / "a" / "b"))
    make_job_folder(paths)
    assert names(paths.run_dir) == [".ddp"]
    assert names(paths.folder) == []


def test_a_run_directory_that_is_in_use(tmp_path: Path) -> None:
    """What the user has in the run directory stays as it is."""
    (tmp_path / "model.pt").write_text("weights")
    make_job_folder(JobPaths(str(tmp_path)))
    assert names(tmp_path) == [".ddp", "model.pt"]
    assert (tmp_path / "model.pt").read_text() == "weights"


def test_earlier_jobs_move_aside(tmp_path: Path) -> None:
    """Each job finds an empty folder; what the earlier ones left lies within it, numbered in their order."""
    paths = JobPaths(str(tmp_path))
    for number in range(12):
        make_job_folder(paths)
        assert [name for name in names(paths.folder) if not name.startswith("earlier_")] == []
        files.write_text(paths.log(0), f"log of job {number}")
    for number in range(11):
        assert Path(paths.folder, f"earlier_{number}", "rank_0.log").read_text() == f"log of job {number}"
        assert names(Path(paths.folder, f"earlier_{number}")) == ["rank_0.log"]
    assert len(names(paths.folder)) == 12
    assert names(tmp_path) == [".ddp"]


def test_an_outcome_of_an_earlier_job_is_not_found(paths: JobPaths) -> None:
    """An outcome that an earlier job left is not taken for this one's."""
    files.write_outcome(paths, 0, OUTCOME)
    make_job_folder(paths)
    assert files.read_outcome(paths, 0, RUN) is None


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """A file where the run directory should be is an OSError, and stays."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        make_job_folder(JobPaths(str(tmp_path / "file" / "0")))
    assert (tmp_path / "file").read_text() == "mine"


# --- writing


def test_pickles_are_private(paths: JobPaths) -> None:
    """Payload and outcome are 0600, whatever the umask says."""
    earlier = os.umask(0)
    try:
        write_payload(paths)
        files.write_outcome(paths, 1, OUTCOME)
    finally:
        os.umask(earlier)
    assert mode(paths.payload) == mode(paths.outcome(1)) == 0o600


def test_texts_are_readable(paths: JobPaths) -> None:
    """What people read is 0644, and holds also bytes that are no UTF-8."""
    files.write_text(paths.facts, "ü\udcff")
    assert mode(paths.facts) == 0o644
    assert Path(paths.facts).read_bytes() == "ü".encode() + b"\xff"


def test_a_file_is_replaced_as_a_whole(paths: JobPaths) -> None:
    """Who has the old file open keeps it whole: the new one is another file under the same name."""
    files.write_text(paths.facts, "old")
    with open(paths.facts, encoding="utf-8") as reader:
        files.write_text(paths.facts, "new")
        assert reader.read() == "old"
    assert Path(paths.facts).read_text() == "new"
    assert names(paths.folder) == ["job.json"]


def test_a_link_is_not_written_through(paths: JobPaths, tmp_path: Path) -> None:
    """A link in the place of our file is replaced, and what it points to is not touched."""
    (tmp_path / "target").write_text("mine")
    os.symlink(tmp_path / "target", paths.outcome(0))
    files.write_outcome(paths, 0, OUTCOME)
    assert (tmp_path / "target").read_text() == "mine"
    assert files.read_outcome(paths, 0, RUN) == OUTCOME


def test_a_write_that_fails_leaves_nothing(paths: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, the old file is still whole and no temporary file is left."""
    files.write_text(paths.facts, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(paths.facts, "\ud800")

    def no_space(descriptor: int, mode: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdopen", no_space)
    with pytest.raises(OSError, match="No space"):
        files.write_private(paths.facts, b"new")
    monkeypatch.undo()
    assert Path(paths.facts).read_text() == "old"
    assert names(paths.folder) == ["job.json"]


def test_no_descriptor_is_left_open(paths: JobPaths) -> None:
    """Writing and reading, also of what is not there, close what they open."""
    before = names("/proc/self/fd")
    digest = write_payload(paths)
    files.read_payload(paths, digest)
    files.write_outcome(paths, 0, OUTCOME)
    Path(paths.outcome(2)).write_bytes(b"damaged")
    for rank in range(3):
        files.read_outcome(paths, rank, RUN)
    assert names("/proc/self/fd") == before


# --- the payload


def test_a_payload_comes_back(paths: JobPaths) -> None:
    """A payload is what was written, if its file has the digest that was announced."""
    digest = write_payload(paths)
    assert files.read_payload(paths, digest) == PAYLOAD


def test_a_payload_that_is_not_there(tmp_path: Path) -> None:
    """A payload that is gone is an error that names the path and what to do."""
    paths = JobPaths(str(tmp_path))
    with pytest.raises(LauncherError, match=r"No such file or directory: .*payload\.pkl.*start the sweep again"):
        files.read_payload(paths, "ab")


@pytest.mark.parametrize("damage", ["half", "other", "longer"])
def test_a_payload_that_is_not_the_announced_one(paths: JobPaths, tmp_path: Path, damage: str) -> None:
    """Of a payload with another digest nothing is unpickled; the error has both digests."""
    digest = write_payload(paths)
    mark = tmp_path / "mark"
    data = Path(paths.payload).read_bytes()
    trap = pickle.dumps(Trap(mark))
    Path(paths.payload).write_bytes({"half": data[: len(data) // 2], "other": trap, "longer": data + b"\0"}[damage])
    with pytest.raises(LauncherError, match="is not the payload of this job") as caught:
        files.read_payload(paths, digest)
    assert digest in str(caught.value)
    assert not mark.exists()
    pickle.loads(trap)
    assert mark.exists(), "the trap itself does not work"


# --- the outcome


def test_an_outcome_comes_back(paths: JobPaths) -> None:
    """An outcome is what was written, and belongs to its rank alone."""
    files.write_outcome(paths, 1, OUTCOME)
    assert files.read_outcome(paths, 1, RUN) == OUTCOME
    assert files.read_outcome(paths, 0, RUN) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        files.dump(OUTCOME)[:-5],
        files.dump(OUTCOME)[5:],
        b"no pickle at all",
        files.dump("no outcome"),
        files.dump(None),
        b"cbuiltins\nint\n(S'x'\ntR.",
    ],
    ids=["empty", "half", "headless", "text", "string", "None", "raises"],
)
def test_an_outcome_that_cannot_be_read(paths: JobPaths, data: bytes) -> None:
    """A damaged or foreign file is no outcome; the exit code then has the word."""
    Path(paths.outcome(0)).write_bytes(data)
    assert files.read_outcome(paths, 0, RUN) is None


def test_an_outcome_behind_a_link(paths: JobPaths, tmp_path: Path) -> None:
    """A symbolic link is not followed, not even to a good outcome."""
    files.write_outcome(paths, 1, OUTCOME)
    os.symlink(paths.outcome(1), paths.outcome(0))
    assert files.read_outcome(paths, 0, RUN) is None
    assert files.read_outcome(paths, 1, RUN) == OUTCOME


def test_an_outcome_of_somebody_else(paths: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not ours is not unpickled."""
    mark = tmp_path / "mark"
    Path(paths.outcome(0)).write_bytes(files.dump(Trap(mark)))
    monkeypatch.setattr("os.getuid", lambda: os.stat(paths.outcome(0)).st_uid + 1)
    assert files.read_outcome(paths, 0, RUN) is None
    assert not mark.exists()
    monkeypatch.undo()
    assert files.read_outcome(paths, 0, RUN) is None
    assert mark.exists(), "the trap itself does not work"


def test_an_outcome_of_another_sweep(tmp_path: Path) -> None:
    """What another sweep stored in a run directory that it took over says nothing about this job."""
    paths = files.JobPaths(str(tmp_path))
    files.make_job_folder(paths)
    files.write_outcome(paths, 0, Outcome(completed=True, run_id="theirs"))
    assert files.read_outcome(paths, 0, "ours") is None
    assert files.read_outcome(paths, 0, "theirs") == Outcome(completed=True, run_id="theirs")
