"""What is stored for other processes: it comes back as it was, and another version's is refused."""

from __future__ import annotations

import dataclasses
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import LauncherError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import (
    FORMAT,
    JobPaths,
    dump,
    find_outcome,
    load,
    make_job_folder,
    read_own_pickle,
    read_stored,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import (
    GroupReport,
    JobEnd,
    Limits,
    Outcome,
    Payload,
    RankExit,
    RankOptions,
    StopReason,
    TaskId,
)
from support.starts import launch_spec

SPEC = launch_spec(
    "/run",
    2,
    overrides=("x=1", "y=[1,2]"),
    env_set={"kind": "a variable with the name of our own key", "B": "\udcff"},
    devices=("0", "1"),
    limits=Limits(1.0, 2.0, None),
    rank_options=RankOptions((10, 12)),
    hosts=("a", "b"),
)
EXITS = (RankExit(0, 0, 1.5, stopped=False), RankExit(1, -9, 2.5, stopped=True))
REPORT = GroupReport(EXITS, StopReason.RANK_FAILED, 1, "said", 3.0, finished=False, left=True, hosts=("a", "b"))
OUTCOME = Outcome(True, pickle.dumps({"loss": 0.5}), remote={"kind": "StopReason", "more": (1, [2])}, run_id="run")
PAYLOAD = Payload(("x=1",), "/run", TaskId("app", "main", 1), "app", ("/a",), check_config=True, body=b"\0\x80")
VALUES = [
    SPEC,
    REPORT,
    GroupReport((), None, None),
    JobEnd(False, "rank 1 failed", SPEC, REPORT),
    JobEnd(True),
    OUTCOME,
    PAYLOAD,
    dataclasses.replace(PAYLOAD, task=None),
    *[GroupReport((), reason, None) for reason in StopReason],
    *EXITS,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_it_comes_back(value: object) -> None:
    """Whatever it holds, and of the same kinds down to the last part."""
    found = load(dump(value), "here")
    assert found == value and type(found) is type(value)
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        assert type(getattr(found, field.name)) is type(getattr(value, field.name)), field.name


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_no_class_of_ours_is_named(value: object) -> None:
    """Only then can a version whose classes lie elsewhere read what says which format it is."""
    names = [argument for opcode, argument, _ in pickletools.genops(dump(value)) if opcode.name == "GLOBAL"]
    strings = [argument for opcode, argument, _ in pickletools.genops(dump(value)) if "UNICODE" in opcode.name]
    assert names == [] and not any("hydra_plugins" in text for text in strings)


OF_ANOTHER = {
    "later": pickle.dumps({"format": FORMAT + 1, "content": {"kind": "Something", "new": 1}}),
    "earlier, plain": pickle.dumps({"format": FORMAT - 1, "content": None}),
    "without a format": pickle.dumps({"content": 1}),
    "a class that is gone": b"\x80\x04\x8c\x08no_such_\x8c\x05Class\x93)\x81.",
    "a class that has moved": (b"cthe_module_that_was_renamed\nOutcome\n)\x81."),
    "a class of today": pickle.dumps(OUTCOME),
}


@pytest.mark.parametrize("data", OF_ANOTHER.values(), ids=OF_ANOTHER.keys())
def test_what_another_version_has_written(tmp_path: Path, data: bytes) -> None:
    """It is refused with what to do, and not taken for nothing: a job that has completed would be run again."""
    paths = JobPaths(str(tmp_path))
    make_job_folder(paths)
    Path(paths.outcome(0)).write_bytes(data)
    for read in (lambda: read_stored(paths.outcome(0)), lambda: find_outcome(paths, 0, "run")):
        with pytest.raises(LauncherError) as raised:
            read()
        assert all(word in str(raised.value) for word in (paths.outcome(0), "another version", "hydra.sweep.dir"))


def test_an_outcome_of_another_version_that_has_moved_aside(tmp_path: Path) -> None:
    """Where a later job has put it, likewise."""
    paths = JobPaths(str(tmp_path))
    os.makedirs(paths.earlier(0))
    (Path(paths.earlier(0)) / "outcome_0.pkl").write_bytes(OF_ANOTHER["later"])
    with pytest.raises(LauncherError, match="another version"):
        find_outcome(paths, 0, "run")


@pytest.mark.parametrize("data", [b"", b"torn", dump(OUTCOME)[:-20]], ids=["empty", "no pickle", "torn"])
def test_what_is_damaged_tells_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    assert read_stored(str(tmp_path / "file")) is None
    assert read_own_pickle(str(tmp_path / "file")) is None


def test_what_is_not_there(tmp_path: Path) -> None:
    assert read_stored(str(tmp_path / "file")) is None
    assert read_own_pickle(str(tmp_path)) is None


def test_a_plain_value_stays(tmp_path: Path) -> None:
    """Dicts and lists of the user's are not looked into."""
    value: Any = {"a": [1, {"kind": "b"}]}
    assert load(dump(value), "here") == value
