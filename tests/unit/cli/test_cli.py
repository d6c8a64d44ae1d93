"""`hydra-ddp` on sweep directories that are made up: what it finds, says and refuses."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.cli import info, main
from hydra_plugins.hydra_ddp_subprocess_launcher.cli.main import Tail
from hydra_plugins.hydra_ddp_subprocess_launcher.cli.sweep_view import SweepReader, in_words, newest_sweep, numbers
from hydra_plugins.hydra_ddp_subprocess_launcher.common import quoting
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import (
    Event,
    JobEnded,
    JobsAdded,
    JobStarted,
    JobState,
    SweepBegan,
    SweepStopped,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import Journal
from hydra_plugins.hydra_ddp_subprocess_launcher.records.sweep_lock import LockOwner
from support.fake_nvml import FakeDevice, FakeNvml


def make_sweep(folder: Path, *more: Event) -> SweepPaths:
    """Write what a sweep of four jobs leaves: 0 completed, 1 failed, 2 was started, 3 was not."""
    paths = SweepPaths(str(folder))
    os.makedirs(paths.folder)
    Path(paths.claim).touch()
    journal = Journal(paths.journal)
    argv = ("python", "train.py", "-m", "wandb.api_key=hunter2", "x=0,1,2,3")
    journal.append(SweepBegan(1.0, 1, "somewhere", quoting.masked(argv), "/", "0.1.0", 15.0))
    journal.append(JobsAdded(2.0, 0, tuple((f"x={number}",) for number in range(4)), 2))
    for number in range(3):
        journal.append(JobStarted(3.0 + number, number, 0, 2, ("0", "1"), str(folder / str(number))))
        (folder / str(number) / ".ddp").mkdir(parents=True)
        for rank in range(2):
            log = folder / str(number) / ".ddp" / f"rank_{rank}.log"
            log.write_bytes(f"one of {number}.{rank}\n".encode() + b"two\rthree")
    journal.append(JobEnded(10.0, 0, True, 0.5, "0.5", "", 7.0))
    journal.append(JobEnded(11.0, 1, False, None, "", "rank 1: ValueError: bad", 7.0))
    for event in more:
        journal.append(event)
    return paths


@contextmanager
def held(paths: SweepPaths, holder: LockOwner) -> Iterator[None]:
    """Let somebody have the claim on a sweep."""
    with open(paths.claim, "w") as claim:
        claim.write(json.dumps(asdict(holder)))
        claim.flush()
        fcntl.flock(claim, fcntl.LOCK_EX)
        yield


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    return make_sweep(tmp_path / "sweep")


# Where the sweep is


def test_the_sweep_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the current directory, else the newest below ./multirun; it is said on stderr, in one line."""
    monkeypatch.chdir(tmp_path)
    old = make_sweep(tmp_path / "multirun" / "2026-11-29" / "12-00-00")
    new = make_sweep(tmp_path / "multirun" / "2026-11-28" / "12-00-00")
    os.utime(old.journal, (1, 1))
    assert main.main(["logs", "0"]) == 0
    assert capsys.readouterr().err == "Sweep: multirun/2026-11-28/12-00-00\n"
    assert newest_sweep(str(tmp_path)) == new
    monkeypatch.chdir(old.sweep_dir)
    assert main.main(["logs", "0"]) == 0
    assert capsys.readouterr().err == "Sweep: .\n"
    # One that was named goes without saying.
    assert main.main(["logs", "-d", new.sweep_dir, "0"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["status", "-d", "nowhere"], 2, "nowhere does not exist. Name a sweep directory"),
        (["status", "-d", "file"], 2, "file is no directory"),
        (["status", "-d", "."], 2, "There is no sweep in"),
        (["status", "-d", "."], 2, "There is one below it: "),
        (["status"], 2, "none below its multirun/. Name the sweep directory: -d DIR"),
        (["logs", "-d", "sweep", "9"], 2, "There is no job 9"),
        (["logs", "-d", "sweep", "9"], 2, "its jobs are 0-3"),
        (["logs", "-d", "sweep", "9", "-f"], 2, "There is no job 9"),
        (["logs", "-d", "sweep", "3"], 1, "Job 3 was never started"),
        (["logs", "-d", "sweep", "3", "-f"], 1, "Job 3 was never started"),
        (["logs", "-d", "sweep", "0", "2"], 2, "Job 0 has no rank 2: its ranks are 0-1"),
        (["logs", "-d", "sweep", "0", "2", "-f"], 2, "Job 0 has no rank 2: its ranks are 0-1"),
        (["logs", "-d", "sweep", "0", "--attempt", "1"], 1, "has no earlier attempt 1"),
        (["logs", "-d", "sweep", "0", "--attempt", "1", "-f"], 2, "exclude each other"),
        (["command", "-d", "sweep", "0"], 1, "job.json cannot be read: No such file"),
        (["command", "-d", "sweep", "3"], 1, "Job 3 was never started"),
        (["command", "-d", "sweep", "0", "7"], 2, "Job 0 has no rank 7"),
        (["stop", "-d", "sweep"], 1, "No sweep runs in"),
        (["status", "-d", "sweep", "-o", "board.png"], 2, "Name a file that ends in .svg"),
        (["status", "-d", "sweep", "-o", "nowhere/board.svg"], 1, "cannot be written: No such file"),
        (["status", "-d", "sweep", "-o", "board.svg", "--watch"], 2, "exclude each other"),
        (["timeline", "-d", "sweep", "-o", "timeline.txt"], 2, "Name a file that ends in .svg, .pdf, .png"),
    ],
)
def test_errors_say_what_and_what_next(
    sweep: SweepPaths,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    """In one line on stderr, which names the command; nothing is on stdout."""
    folder = Path(sweep.sweep_dir).parent
    (folder / "file").touch()
    monkeypatch.chdir(folder)
    assert main.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hydra-ddp {arguments[0]}: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["fly"], ["logs"], ["logs", "first"], ["logs", "0", "some"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the usage."""
    with pytest.raises(SystemExit) as error:
        main.main(arguments)
    assert error.value.code == 2
    assert "usage: hydra-ddp" in capsys.readouterr().err


def test_a_log_that_has_gone(sweep: SweepPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing log and a missing run directory are told apart."""
    folder = Path(sweep.sweep_dir) / "0" / ".ddp"
    (folder / "rank_1.log").unlink()
    assert main.main(["logs", "-d", sweep.sweep_dir, "0", "1"]) == 1
    assert "There is no log of rank 1 of job 0 yet" in capsys.readouterr().err
    (folder / "rank_0.log").unlink()
    folder.rmdir()
    assert main.main(["logs", "-d", sweep.sweep_dir, "0", "0"]) == 1
    assert "the run directory of job 0 was moved or deleted" in capsys.readouterr().err


def test_a_journal_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is a folder, as a test that runs as root can read all files."""
    (tmp_path / ".ddp" / "journal.jsonl").mkdir(parents=True)
    assert main.main(["status", "-d", str(tmp_path)]) == 1
    assert "journal.jsonl cannot be read: Is a directory" in capsys.readouterr().err


# What has become of it


def test_a_sweep_that_ended(sweep: SweepPaths) -> None:
    """Nobody has its claim: what had not ended by then is lost, what waited was never started."""
    snapshot = SweepReader(sweep).look()
    assert [job.state for job in snapshot.record.jobs.values()] == [
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.LOST,
        JobState.NEVER_STARTED,
    ]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(11))
    assert in_words(snapshot) == f"Ended at {at}, while job 2 was running."


def test_a_sweep_that_was_stopped(tmp_path: Path) -> None:
    """The signal is named."""
    ends = (SweepStopped(12, "SIGINT"), JobEnded(13, 2, False, None, "", "stopped", 1.0))
    snapshot = SweepReader(make_sweep(tmp_path / "sweep", *ends)).look()
    assert in_words(snapshot).startswith("Stopped by SIGINT at ")
    assert in_words(snapshot).endswith(":13.")


def test_a_sweep_whose_launching_process_was_killed(sweep: SweepPaths) -> None:
    """Its name is in the claim, which nobody has locked."""
    Path(sweep.claim).write_text(json.dumps(asdict(LockOwner.this_process())))
    words = in_words(SweepReader(sweep).look())
    assert words.startswith(f"Its launching process was killed (process {os.getpid()} on ")
    assert words.endswith(", while job 2 was running.")
    Path(sweep.claim).write_text(json.dumps(asdict(LockOwner(7, "elsewhere", "yesterday"))))
    assert "does not show here what is locked on elsewhere" in in_words(SweepReader(sweep).look())


def test_a_live_sweep(sweep: SweepPaths) -> None:
    """Its claim is locked: what runs runs."""
    with held(sweep, LockOwner(7, "elsewhere", "2026-11-30 12:00:00")):
        snapshot = SweepReader(sweep).look()
    assert in_words(snapshot) == "Running: process 7 on elsewhere, since 2026-11-30 12:00:00."
    assert snapshot.record.jobs[2].state is JobState.RUNNING
    assert snapshot.record.jobs[3].state is JobState.WAITING


def test_a_watch_sees_what_is_added(sweep: SweepPaths) -> None:
    """The journal is read again when it has grown, and after another one has taken its place."""
    watch = SweepReader(sweep)
    assert watch.look().record.jobs[2].state is JobState.LOST
    Journal(sweep.journal).append(JobEnded(14.0, 2, True, 1, "1", "", 1.0))
    assert watch.look().record.jobs[2].state is JobState.COMPLETED
    os.rename(sweep.journal, f"{sweep.journal}.old")
    Journal(sweep.journal).append(JobsAdded(2.0, 0, (("x=9",),), 1))
    assert list(watch.look().record.jobs) == [0]


def test_status_of_a_sweep_that_is_over(sweep: SweepPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Words, the bar, and a row for each job, lost ones and those that were never started, too; no escape codes."""
    assert main.main(["status", "-d", sweep.sweep_dir]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("Ended at ")
    assert lines[1].endswith(" 1/4 done, 1 failed")
    assert [line.split()[:3] for line in lines[4:8]] == [
        ["0", "x=0", "completed"],
        ["1", "x=1", "FAILED"],
        ["2", "x=2", "lost"],
        ["3", "x=3", "never"],
    ]
    assert lines[-1] == "4 jobs: 1 completed, 1 failed, 1 lost, 1 never started"
    assert "\x1b" not in out


def test_a_picture_of_the_board(sweep: SweepPaths, tmp_path: Path) -> None:
    """It is an SVG with the jobs that run and their last lines."""
    picture = tmp_path / "board.svg"
    with held(sweep, LockOwner(7, "elsewhere", "now")):
        assert main.main(["status", "-d", sweep.sweep_dir, "-o", str(picture)]) == 0
    text = picture.read_text(encoding="utf-8").replace("&#160;", " ")
    assert text.startswith("<svg")
    assert "three" in text
    assert "1/4 done" in text


@pytest.mark.parametrize(
    ("given", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1, 7], "0-2, 7"), (range(0, 60, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, …")],
)
def test_numbers(given: list[int], text: str) -> None:
    """Runs of numbers are shortened."""
    assert numbers(given) == text


# Logs


def test_logs_are_what_was_written(sweep: SweepPaths, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Byte by byte when it is one rank; each line with its rank, and in its last state, when it is all of them."""
    with open(Path(sweep.sweep_dir) / "1" / ".ddp" / "rank_0.log", "ab") as log:
        log.write(b"\xff")
    assert main.main(["logs", "-d", sweep.sweep_dir, "1"]) == 0
    assert capfdbinary.readouterr().out == b"one of 1.0\ntwo\rthree\xff"
    assert main.main(["logs", "-d", sweep.sweep_dir, "1", "all"]) == 0
    assert capfdbinary.readouterr().out.splitlines() == [
        b"[job 1 rank 0] one of 1.0",
        b"[job 1 rank 0] three\xff",
        b"[job 1 rank 1] one of 1.1",
        b"[job 1 rank 1] three",
    ]


def test_logs_of_an_earlier_start(sweep: SweepPaths, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """They are where the launcher has moved them; a wrong number is answered with those that are there."""
    earlier = Path(sweep.sweep_dir) / "0" / ".ddp" / "earlier_4"
    earlier.mkdir()
    (earlier / "rank_1.log").write_text("before")
    assert main.main(["logs", "-d", sweep.sweep_dir, "0", "1", "--attempt", "4"]) == 0
    assert capfdbinary.readouterr().out == b"before"
    assert main.main(["logs", "-d", sweep.sweep_dir, "0", "1", "--attempt", "0"]) == 1
    assert b"there are 4." in capfdbinary.readouterr().err


def test_a_tail_goes_on_in_the_file_that_follows(tmp_path: Path) -> None:
    """What was written into the first one last is not lost, nor is a line that was not ended."""
    log = tmp_path / "rank_0.log"
    tail = Tail(str(log), b"> ")
    assert b"".join(tail.pieces()) == b""
    with open(log, "wb") as first:
        first.write(b"a\nb")
        first.flush()
        assert b"".join(tail.pieces()) == b"> a\n"
        first.write(b"c\nd")
    log.rename(tmp_path / "earlier")
    assert b"".join(tail.pieces()) == b"> bc\n"
    log.write_bytes(b"e\nf")
    assert b"".join(tail.pieces()) == b"> d\n> e\n"
    assert tail.end() == b"> f\n"


def test_a_tail_keeps_little_of_a_progress_bar(tmp_path: Path) -> None:
    """Of a line that is redrawn only the last state is shown."""
    log = tmp_path / "rank_0.log"
    log.write_bytes(b"1%\r2%\r" * 100_000 + b"3%\r\nend")
    tail = Tail(str(log), b"> ")
    assert b"".join(tail.pieces()) == b"> 3%\r\n"
    assert tail.end() == b"> end\n"


# Stopping


def test_a_sweep_on_another_host_is_stopped_there(sweep: SweepPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """The command for that is on a line of its own."""
    with held(sweep, LockOwner(os.getpid(), "else where", "now")):
        assert main.main(["stop", "-d", sweep.sweep_dir]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == [f"ssh 'else where' hydra-ddp stop -d {sweep.sweep_dir}"]


def test_a_process_that_is_not_the_launching_one_gets_no_signal(
    sweep: SweepPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number was given to another process since, or is that of another container."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        mine = LockOwner.this_process()
        with held(sweep, LockOwner(other.pid, mine.host, "now", mine.start)):
            assert main.main(["stop", "-d", sweep.sweep_dir]) == 1
        assert "cannot be seen from here" in capsys.readouterr().err
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


# What a command costs


@pytest.mark.parametrize("arguments", [["logs", "0"], ["command", "0"], ["stop"], ["info"]])
def test_hydra_is_not_imported_where_it_is_not_needed(sweep: SweepPaths, arguments: list[str]) -> None:
    """It takes longer than all the rest."""
    (Path(sweep.sweep_dir) / "0" / ".ddp" / "job.json").write_text(
        json.dumps(
            {"environment": {}, "rank_environments": [{}, {}], "environment_removed": [], "cwd": "/", "argv": ["true"]}
        )
    )
    code = (
        "import sys\n"
        f"from {main.__package__} import main\n"
        f"code = main.main({[arguments[0], '-d', sweep.sweep_dir, *arguments[1:]]!r})\n"
        "heavy = [name for name in ('hydra', 'omegaconf', 'rich', 'torch', 'matplotlib') if name in sys.modules]\n"
        "sys.exit(repr(heavy) if heavy else code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == (1 if arguments == ["stop"] else 0), ran.stderr
    assert not ran.stderr.startswith("["), ran.stderr


# The timeline as a picture


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_a_timeline_is_drawn_the_same_each_time(
    sweep: SweepPaths, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without dates and random names in it; the file's name is printed."""
    pytest.importorskip("matplotlib")
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for picture in (first, second):
        assert main.main(["timeline", "-d", sweep.sweep_dir, "-o", str(picture)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_what_a_timeline_shows(sweep: SweepPaths) -> None:
    """It lies in the sweep directory, and names the jobs, how they ended, the devices and the start."""
    pytest.importorskip("matplotlib")
    assert main.main(["timeline", "-d", sweep.sweep_dir]) == 0
    text = Path(sweep.timeline).read_text()
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1))
    for words in ("completed", "failed", "lost", "device", f"4 jobs on 2 devices, started {began}"):
        assert f">{words}</text>" in text
    # Not to scale: what is lost reaches to the last sign of life, decades after the made-up start.
    assert ">2</text>" in text


def test_a_timeline_without_matplotlib(
    sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main.main(["timeline", "-d", sweep.sweep_dir]) == 1
    assert capsys.readouterr().err.endswith('pip install "hydra-ddp-subprocess-launcher[timeline]"\n')


# Info


def test_a_report_hides_secrets(sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the command line, and of the environment, of which it has only what hides devices."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    environ = {"NCCL_DEBUG": "hunter2", "HOME": "/", "CUDA_VISIBLE_DEVICES": "1"}
    found = info.collect(environ, SweepReader(sweep).look())
    assert found.visible_devices == {"CUDA_VISIBLE_DEVICES": "1"}
    assert found.driver is None
    assert found.sweep is not None
    assert found.sweep.argv == ("python", "train.py", "-m", "wandb.api_key=***", "x=0,1,2,3")
    assert found.sweep.jobs == {"completed": 1, "FAILED": 1, "lost": 1, "never started": 1}
    assert found.sweep.first_causes == ("job 1: rank 1: ValueError: bad",)
    for text in (info.as_text(found), info.as_json(found)):
        assert "hunter2" not in text
        assert "rank 1: ValueError: bad" in text


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--token", "abc", "lr=1"], ["--token", "***", "lr=1"]),
        (["--password=abc"], ["--password=***"]),
        (["+hydra.job.env_set.HF_TOKEN=abc"], ["+hydra.job.env_set.HF_TOKEN=***"]),
        (["llm={url:x, api_key: abc}"], ["llm=***"]),
        (["model=keypoint_rcnn", "train.py"], ["model=keypoint_rcnn", "train.py"]),
    ],
)
def test_masked(argv: list[str], shown: list[str]) -> None:
    """Values are hidden by their names; a harmless value that has such a word in it is not."""
    assert list(quoting.masked(argv)) == shown


def test_a_report_has_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVML does not tell is said to be unknown."""
    fake = FakeNvml([FakeDevice("GPU-a"), FakeDevice("GPU-b")], fails="nvmlDeviceGetName")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = info.collect({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None)
    assert found.driver == "580.1"
    assert [device.uuid for device in found.devices] == ["GPU-a", "GPU-b"]
    text = info.as_text(found)
    assert "device 1: unknown, GPU-b, 80.0 GB of 80.0 GB free\n" in text
    assert "NVIDIA driver: 580.1\n" in text
    assert "sweep: none here (-d DIR)\n" in text
    assert "nvmlShutdown" in fake.calls


def test_info_needs_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is for people for whom nothing works."""
    monkeypatch.chdir(tmp_path)
    assert main.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sweep"] is None
    assert report["versions"]["hydra-core"]
    assert report["versions"]["python"]
    assert main.main(["info", "-d", "nowhere"]) == 2
