"""The claim on a sweep directory: one live process has it, whoever was killed before."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.records import sweep_lock
from hydra_plugins.hydra_ddp_subprocess_launcher.records.sweep_lock import LockOwner, SweepLock, live_owner, read_owner
from support.runner import PATIENCE_S

HOLD = f"""
import sys, time
from {sweep_lock.__name__} import SweepLock
lock = SweepLock(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / ".ddp").mkdir()
    return str(tmp_path / ".ddp" / "claim")


@contextmanager
def another_process(path: str, code: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    """Have another process hold the claim."""
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_one_process_at_a_time(path: str) -> None:
    """A second process is refused in one sentence that names the first one, its host, its start and what to do."""
    with another_process(path) as process:
        with pytest.raises(StartError) as refused:
            SweepLock(path)
        said = str(refused.value)
        assert f"process {process.pid} on {os.uname().nodename}, since {time.strftime('%Y-')}" in said
        assert "hydra.sweep.dir" in said and "hydra-ddp status -d" in said
        holder = live_owner(path)
        assert holder is not None and holder.pid == process.pid and holder.here


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_a_kill(path: str, how: signal.Signals) -> None:
    """However its holder ends, the claim is free at once."""
    with another_process(path) as process:
        process.send_signal(how)
        process.wait()
        assert live_owner(path) is None
        SweepLock(path)


def test_let_go_of_with_the_object(path: str) -> None:
    """When the sweep is forgotten, the directory is free again, and nobody is named any more."""
    claim = SweepLock(path)
    assert read_owner(path) == LockOwner.this_process()
    del claim
    gc.collect()
    assert read_owner(path) is None
    with another_process(path):
        pass


def test_a_later_sweep_of_this_process(path: str) -> None:
    """A later sweep of the same process takes the directory over; the end of the earlier one does not free it."""
    first = SweepLock(path)
    second = SweepLock(path)
    del first
    gc.collect()
    holder = live_owner(path)
    assert holder is not None
    # A second may have passed since.
    assert replace(holder, since="") == replace(LockOwner.this_process(), since="")
    second.release()
    assert live_owner(path) is None


def test_looking_harms_nobody(path: str) -> None:
    """Who only looks again and again does not keep anybody from taking the claim."""
    looking = f"""
import sys
from {sweep_lock.__name__} import live_owner
print("held", flush=True)
while True:
    live_owner(sys.argv[1])
"""
    Path(path).write_text(json.dumps({"pid": 1, "host": "x", "since": "", "start": ""}))
    with another_process(path, looking), another_process(path, looking):
        for _ in range(20):
            SweepLock(path).release()
            Path(path).write_text(json.dumps({"pid": 1, "host": "x", "since": "", "start": ""}))


def test_a_child_that_was_forked_does_not_keep_it(path: str) -> None:
    """What the program forks, such as a data loader, does not hold the claim when the launching process is gone."""
    code = HOLD.replace(
        "print", "import os\npid = os.fork()\nif pid == 0:\n    time.sleep(600)\nprint('pid', pid)\nprint"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        assert process.stdout.readline() == "held\n"
        try:
            assert live_owner(path) is not None
            process.kill()
            process.wait()
            # The child lets go as the first thing that it does, when it is given a processor.
            deadline = time.monotonic() + PATIENCE_S
            while live_owner(path) is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert live_owner(path) is None
            SweepLock(path)
        finally:
            os.kill(child, signal.SIGKILL)


# --- file systems without locks


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the file system has no locks the file itself is the claim, and that is said."""
    SweepLock(path)
    assert "has no locks" in caplog.text


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_live_owner_is_refused(path: str) -> None:
    """A process of this machine that runs, and any of another machine, is taken for a holder."""
    with another_process(path) as process:
        with pytest.raises(StartError, match=f"process {process.pid} .*or delete .*claim if that process is gone"):
            SweepLock(path)
        process.kill()
        process.wait()
        SweepLock(path)
    Path(path).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-01-01 00:00:00", "start": ""}))
    with pytest.raises(StartError, match="process 1 on elsewhere, since 2026-01-01 00:00:00"):
        SweepLock(path)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_number_that_was_given_again(path: str) -> None:
    """A process that has the number of one that is gone is not taken for it."""
    mine = LockOwner.this_process()
    Path(path).write_text(json.dumps({"pid": os.getppid(), "host": mine.host, "since": "", "start": "another boot 1"}))
    assert live_owner(path) is None
    SweepLock(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_a_damaged_file(path: str, content: bytes) -> None:
    """What a crash left in the file keeps nobody out."""
    Path(path).write_bytes(content)
    assert live_owner(path) is None
    SweepLock(path)
