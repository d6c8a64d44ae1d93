"""`hydra-ddp` beside real sweeps of tests/apps/talk.py: live, stopped and killed ones, and those that are over."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.notes import finish
from support.runner import APPS

if TYPE_CHECKING:
    from support.runner import Ran, Runner

TALK = APPS / "talk.py"
CLI = ("-m", "hydra_plugins.hydra_ddp_subprocess_launcher.cli.main")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def sweep_argv(runner: Runner, *overrides: str, app: Path = TALK) -> list[str]:
    return [
        str(app),
        "-m",
        "hydra/launcher=ddp_subprocess",
        "hydra.launcher.nproc_per_node=2",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}",
        *overrides,
    ]


def talked(runner: Runner, *overrides: str) -> Ran:
    """Sweep talk.py to its end."""
    return runner.python(*sweep_argv(runner, *overrides), env={"TALK_DIR": str(runner.cwd)})


@contextmanager
def talking(runner: Runner, *overrides: str, app: Path = TALK) -> Iterator[subprocess.Popen[str]]:
    """Have a sweep run meanwhile."""
    argv = [sys.executable, *sweep_argv(runner, *overrides, app=app)]
    with runner.start(*argv, env={"TALK_DIR": str(runner.cwd)}, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def hydra_ddp(runner: Runner, *arguments: str, cwd: Path | None = None, named: bool = True) -> Ran:
    directory = ("-d", str(runner.cwd / "sweep")) if named else ()
    return runner.python(*CLI, arguments[0], *directory, *arguments[1:], cwd=cwd)


def journal(runner: Runner) -> str:
    path = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
    return path.read_text() if path.exists() else ""


def log(runner: Runner, job: int, rank: int = 0) -> str:
    path = runner.cwd / "sweep" / str(job) / ".ddp" / f"rank_{rank}.log"
    return path.read_text() if path.exists() else ""


def wait_for_lines(runner: Runner, *jobs: int) -> None:
    """Wait until the ranks of these jobs have said their last line."""
    lines = [f"line 2 of job {job} rank {rank}" for job in jobs for rank in range(2)]
    runner.wait_until(
        lambda: all(line in log(runner, job, rank) for line, (job, rank) in zip(lines, _places(jobs), strict=True)),
        60,
        f"{lines}",
    )


def _places(jobs: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(job, rank) for job in jobs for rank in range(2)]


@pytest.mark.sample
def test_a_live_sweep(runner: Runner) -> None:
    """Its state, its logs, the board as a picture, and a timeline of what runs; afterwards its table."""
    at_once = "hydra.launcher.max_parallel_jobs=2"
    with talking(runner, "x=0,1,2", "until=go", at_once) as process:
        wait_for_lines(runner, 0, 1)
        status = hydra_ddp(runner, "status")
        assert status.returncode == 0
        assert status.stderr == ""
        first, _, *rows, last = status.stdout.splitlines()
        assert first.startswith(f"Running: process {process.pid} on ")
        assert [row.split()[:3] for row in rows] == [["0", "x=0", "2"], ["1", "x=1", "2"]]
        assert [row.split("line ")[1] for row in rows] == [f"2 of job {job} rank 0" for job in range(2)]
        assert last.endswith(" 0/3 done, 2 running, 1 waiting")
        assert "\x1b" not in status.stdout
        assert hydra_ddp(runner, "logs", "2").stderr.startswith("hydra-ddp logs: Job 2 has not been started yet")
        assert hydra_ddp(runner, "logs", "1", "1").stdout == log(runner, 1, 1)
        picture = runner.cwd / "board.svg"
        assert hydra_ddp(runner, "status", "-o", str(picture)).returncode == 0
        assert "2&#160;running" in picture.read_text()
        (runner.cwd / "go").touch()
        assert finish(process)[0] == 0
    status = hydra_ddp(runner, "status")
    assert status.stdout.startswith("Ended at ")
    assert status.stdout.endswith("\n3 jobs: 3 completed, 0 failed\n")


def test_the_newest_sweep_is_the_default(runner: Runner) -> None:
    """With Hydra's own layout."""
    argv = ["-m", "hydra/launcher=ddp_subprocess", "x=7"]
    assert runner.python(TALK, *argv).returncode == 0
    logs = hydra_ddp(runner, "logs", "0", named=False)
    assert logs.stdout.splitlines()[0] == "line 0 of job 0 rank 0"
    assert re.fullmatch(r"Sweep: multirun/\S+/\S+\n", logs.stderr)
    (sweep_dir,) = runner.cwd.glob("multirun/*/*")
    assert hydra_ddp(runner, "logs", "0", named=False, cwd=sweep_dir).stdout == logs.stdout


def test_logs_are_followed_through_a_restart(runner: Runner) -> None:
    """To the end of the job, all lines of both starts in order, and nothing twice."""
    with talking(runner, "x=0,1", "fail_rank=1", "until=go", "hydra.launcher.max_restarts=1") as process:
        wait_for_lines(runner, 0)
        argv = [sys.executable, *CLI, "logs", "-d", runner.cwd / "sweep", "0", "1", "-f"]
        with runner.start(*argv) as follower:
            assert follower.stdout is not None
            assert follower.stderr is not None
            shown = follower.stdout.readline()
            (runner.cwd / "go").touch()
            shown += follower.stdout.read()
            errors = follower.stderr.read()
        assert finish(process)[0] == 1
    assert (follower.returncode, errors) == (0, "")
    earlier = (runner.cwd / "sweep" / "0" / ".ddp" / "earlier_0" / "rank_1.log").read_text()
    assert shown == earlier + log(runner, 0, 1)
    assert shown.count("line 0 of job 0 rank 1") == 2
    assert hydra_ddp(runner, "logs", "0", "1", "--attempt", "0").stdout == earlier
    assert hydra_ddp(runner, "timeline", "-o", str(runner.cwd / "t.svg")).returncode == 0
    assert ">failed, started again</text>" in (runner.cwd / "t.svg").read_text()


def test_all_ranks_are_followed_until_ctrl_c(runner: Runner) -> None:
    """Each line has its rank; a job that waits is waited for."""
    with talking(runner, "x=go0,go1", "until=${x}") as process:
        wait_for_lines(runner, 0)
        argv = [sys.executable, *CLI, "logs", "-d", runner.cwd / "sweep", "1", "all", "-f"]
        with runner.start(*argv) as follower:
            (runner.cwd / "go0").touch()
            assert follower.stdout is not None
            lines = [follower.stdout.readline() for _ in range(6)]
            follower.send_signal(signal.SIGINT)
            assert follower.stdout.read() == ""
            assert follower.wait() == 130
        assert process.poll() is None
        (runner.cwd / "go1").touch()
        assert finish(process)[0] == 0
    assert sorted(lines) == [
        f"[job 1 rank {rank}] line {n} of job 1 rank {rank}\n" for rank in (0, 1) for n in range(3)
    ]


def test_a_reader_that_goes_away(runner: Runner) -> None:
    """`| head` is no error, neither of a long log nor of one that is followed and says nothing more."""
    with talking(runner, "lines=20000", "until=go") as process:
        runner.wait_until(lambda: "line 19999 " in log(runner, 0), 60)
        program = f"{sys.executable} {' '.join(CLI)} logs -d {runner.cwd / 'sweep'} 0"
        for line in (
            f"{program} | head -n 1; echo ${{PIPESTATUS[0]}}",
            f"{program} -f | head -n 1; echo ${{PIPESTATUS[0]}}",
        ):
            ran = runner.run("bash", "-c", line)
            assert (ran.stdout, ran.stderr) == ("line 0 of job 0 rank 0\n0\n", "")
        full = runner.run("bash", "-c", f"{program} > /dev/full")
        assert full.returncode == 1
        assert full.stderr == "hydra-ddp logs: [Errno 28] No space left on device\n"
        assert process.poll() is None
        (runner.cwd / "go").touch()
        assert finish(process)[0] == 0


def test_commands_run_the_ranks_again(runner: Runner) -> None:
    """Pasted into a shell, all ranks at once: same job, same exit codes; each alone by `eval`, as a failure says."""
    failed = talked(runner, "x=3", "fail_rank=1")
    assert failed.returncode == 1
    lines = hydra_ddp(runner, "command", "0").stdout.splitlines()
    assert len(lines) == 2
    both = f"({lines[0]}) & first=$!\n({lines[1]}) & second=$!\n"
    # When both have said their last word.
    script = f"{both}wait $first; code=$?\nwait $second; second=$?; echo $code; echo $second\n"
    ran = runner.run("bash", "-c", script, env={"TALK_DIR": str(runner.cwd)})
    assert ran.stdout.splitlines()[-2:] == ["0", "1"]
    assert "line 2 of job 0 rank 0" in ran.stdout
    assert "line 2 of job 0 rank 1" in ran.stdout
    assert "ValueError: bad x=3" in ran.output
    assert hydra_ddp(runner, "command", "0", "1").stdout.splitlines() == lines[1:]
    (said,) = re.findall(r'Repeat rank 1: eval "\$\(\S*hydra-ddp (.*)\)"', failed.output)
    program = f"{sys.executable} {' '.join(CLI)}"
    again = runner.run("bash", "-c", f'eval "$({program} {said})"', env={"TALK_DIR": str(runner.cwd)})
    assert again.returncode == 1
    assert "ValueError: bad x=3" in again.output


def test_results(runner: Runner) -> None:
    """The jobs that are over, in order or sorted by any column, as a table, as CSV and as JSON."""
    with talking(runner, "x=9,10,2,7", "value='${x}'", "fail_x=[2]", "until=go", "wait_x=[9,7]") as process:
        wait_for_lines(runner, 0)
        none_yet = hydra_ddp(runner, "results")
        assert (none_yet.returncode, none_yet.stderr) == (0, "")
        assert len(none_yet.stdout.splitlines()) == 1
        assert json.loads(hydra_ddp(runner, "results", "--json").stdout) == []
        (runner.cwd / "go").touch()
        assert finish(process)[0] == 1

    def jobs(*options: str) -> list[str]:
        ran = hydra_ddp(runner, "results", *options)
        assert (ran.returncode, ran.stderr) == (0, "")
        header, *rows = ran.stdout.splitlines()
        assert header.split()[:2] == ["job", "x"]
        return [row.split()[0] for row in rows if row[:3].strip()]

    assert jobs() == ["0", "1", "2", "3"]
    assert jobs("--descending") == ["3", "2", "1", "0"]
    # By size, not as texts, and the one without a value last either way.
    assert jobs("--sort", "value") == ["3", "0", "1", "2"]
    assert jobs("--sort", "value", "--descending") == ["1", "0", "3", "2"]
    assert jobs("--sort", "x") == ["2", "3", "0", "1"]
    assert hydra_ddp(runner, "results", "--csv").stdout == (runner.cwd / "sweep/.ddp/results.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(hydra_ddp(runner, "results", "--csv", "--sort", "x").stdout)))
    assert [(row["job"], row["x"], row["status"], row["value"]) for row in rows] == [
        ("2", "2", "FAILED", ""),
        ("3", "7", "COMPLETED", "7"),
        ("0", "9", "COMPLETED", "9"),
        ("1", "10", "COMPLETED", "10"),
    ]
    found = json.loads(hydra_ddp(runner, "results", "--json", "--sort", "value").stdout)
    assert [(row["job"], row["overrides"]["x"], row["status"], row["value"]) for row in found] == [
        (3, "7", "COMPLETED", 7),
        (0, "9", "COMPLETED", 9),
        (1, "10", "COMPLETED", 10),
        (2, "2", "FAILED", None),
    ]
    assert "bad x=2" in found[-1]["cause"]
    assert found[0]["run_dir"] == str(runner.cwd / "sweep" / "3")
    unknown = hydra_ddp(runner, "results", "--sort", "loss")
    assert unknown.returncode == 2 and "loss" in unknown.stderr and "duration_s" in unknown.stderr
    assert hydra_ddp(runner, "results", "--csv", "--json").returncode == 2


@pytest.mark.sample
def test_stop(runner: Runner) -> None:
    """The running jobs are ended, no other one is started, and the words before tell so."""
    with talking(runner, "x=0,1", "until=never", "hydra.launcher.grace_period_s=7") as process:
        wait_for_lines(runner, 0)
        stop = hydra_ddp(runner, "stop")
        assert (stop.returncode, stop.stderr) == (0, "")
        assert stop.stdout == (
            f"Sending SIGTERM to process {process.pid}: 1 running job will get SIGTERM, and SIGKILL after 7 s "
            "(hydra.launcher.grace_period_s); no other job will start.\n"
        )
        assert finish(process)[0] == 143
    status = hydra_ddp(runner, "status")
    assert status.stdout.startswith("Stopped by SIGTERM at ")
    assert status.stdout.endswith("2 jobs: 0 completed, 1 failed, 1 never started\n")
    again = hydra_ddp(runner, "stop")
    assert again.returncode == 1
    assert "nothing to stop. Stopped by SIGTERM" in again.stderr


@contextmanager
def stubborn(runner: Runner) -> Iterator[subprocess.Popen[str]]:
    """Have a sweep run meanwhile whose ranks do not heed SIGTERM and have all the time."""
    app = runner.cwd / "stubborn.py"
    ignoring = "import signal\nif 'RANK' in os.environ:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    app.write_text(TALK.read_text().replace("import hydra\n", f"{ignoring}import hydra\n", 1))
    with talking(runner, "until=never", "hydra.launcher.grace_period_s=600", app=app) as process:
        wait_for_lines(runner, 0)
        yield process


def test_stop_now(runner: Runner) -> None:
    """Ranks that do not heed SIGTERM are killed long before the grace period is over; stop alone says what is up."""
    with stubborn(runner) as process:
        assert hydra_ddp(runner, "stop").returncode == 0
        runner.wait_until(lambda: "SweepStopped" in journal(runner))
        again = hydra_ddp(runner, "stop")
        assert "being stopped already, after SIGTERM" in again.stdout
        assert "; being stopped after SIGTERM." in hydra_ddp(runner, "status").stdout
        assert process.poll() is None
        now = hydra_ddp(runner, "stop", "--now")
        assert "1 running job will be killed at once" in now.stdout
        assert finish(process)[0] == 143


def test_stop_now_at_first(runner: Runner) -> None:
    """Both signals in one command."""
    with stubborn(runner) as process:
        assert hydra_ddp(runner, "stop", "--now").returncode == 0
        assert finish(process)[0] == 143


def test_a_killed_launching_process(runner: Runner) -> None:
    """Its jobs are lost, in words, in the table and in the timeline."""
    with talking(runner, "x=0,1", "until=never") as process:
        wait_for_lines(runner, 0)
        process.kill()
        process.wait()
    runner.assert_nothing_left(10)
    status = hydra_ddp(runner, "status", "--watch")
    assert status.returncode == 0
    assert status.stdout.startswith(f"Its launching process was killed (process {process.pid} on ")
    assert status.stdout.splitlines()[0].endswith("), while job 0 was running.")
    assert status.stdout.endswith("\n2 jobs: 0 completed, 0 failed, 1 lost, 1 never started\n")
    assert hydra_ddp(runner, "timeline", "-o", str(runner.cwd / "t.svg")).returncode == 0
    assert ">lost</text>" in (runner.cwd / "t.svg").read_text()
    info = json.loads(hydra_ddp(runner, "info", "--json").stdout)
    assert info["sweep"]["jobs"] == {"lost": 1, "never started": 1}


def test_a_directory_that_can_only_be_read(runner: Runner) -> None:
    """Somebody else's sweep: all but the timeline's default place works, and a live one is seen to be live."""
    with talking(runner, "until=go") as process:
        wait_for_lines(runner, 0)
        modes = {path: path.stat().st_mode for path in [runner.cwd / "sweep", *(runner.cwd / "sweep").rglob("*")]}
        folders = [path for path in modes if path.is_dir()]
        for path in folders:
            path.chmod(0o555)
        (runner.cwd / "sweep" / ".ddp" / "claim").chmod(0o444)
        try:
            assert hydra_ddp(runner, "status").stdout.startswith(f"Running: process {process.pid}")
            assert hydra_ddp(runner, "logs", "0").stdout == log(runner, 0)
            if os.geteuid() != 0:  # root may write everywhere
                assert "timeline.svg cannot be written: Permission" in hydra_ddp(runner, "timeline").stderr
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
        (runner.cwd / "go").touch()
        assert finish(process)[0] == 0


def test_watch_over_a_pipe(runner: Runner) -> None:
    """A new status when a job goes on, and none in between; the table at the end."""
    with talking(runner, "x=go0,go1", "until=${x}") as process:
        wait_for_lines(runner, 0)
        with runner.start(sys.executable, *CLI, "status", "--watch", "-d", runner.cwd / "sweep") as watcher:
            assert watcher.stdout is not None
            lines = []
            while not lines or "running" not in lines[-1]:
                lines.append(watcher.stdout.readline())
            (runner.cwd / "go0").touch()
            wait_for_lines(runner, 1)
            (runner.cwd / "go1").touch()
            assert finish(process)[0] == 0
            shown = "".join(lines) + watcher.stdout.read()
            assert watcher.wait() == 0
    assert "\x1b" not in shown
    states = re.findall(r"(\d/2 done.*?)(?:, \d+:\d\d left.*)?\n", shown)
    assert states[0] == "0/2 done, 1 running, 1 waiting"
    assert states[-1] == "2/2 done"
    assert len(states) <= 5  # Five changes there are: a start, an end and a start, an end, the end of the sweep.
    assert shown.endswith("2 jobs: 2 completed, 0 failed\n")


def test_watch_at_a_terminal(runner: Runner) -> None:
    """It is painted in place until the sweep is over, and the table stays."""
    pytest.importorskip("pexpect")
    from support.terminal import at_terminal

    with talking(runner, "x=go0,go1", "until=${x}") as process:
        wait_for_lines(runner, 0)
        with at_terminal(runner, [*CLI, "status", "--watch", "-d", runner.cwd / "sweep"], columns=100) as person:
            person.wait_to_see("Running: process", "line 2 of job 0 rank 0", "0/2 done, 1 running, 1 waiting")
            (runner.cwd / "go0").touch()
            person.wait_to_see("line 2 of job 1 rank 0", "1/2 done, 1 running")
            assert sum("Running: process" in line for line in person.all_lines) == 1
            (runner.cwd / "go1").touch()
            assert person.end() == 0
            text = "\n".join(person.all_lines)
        assert finish(process)[0] == 0
    assert "Running" not in text
    assert text.startswith("Ended at ")
    assert text.endswith("2 jobs: 2 completed, 0 failed")


def test_ctrl_c_leaves_the_terminal_clean(runner: Runner) -> None:
    """The board is gone, the cursor is visible, and the sweep goes on."""
    pytest.importorskip("pexpect")
    from support.terminal import at_terminal

    with talking(runner, "until=go") as process:
        wait_for_lines(runner, 0)
        with at_terminal(runner, [*CLI, "status", "--watch", "-d", runner.cwd / "sweep"]) as person:
            person.wait_to_see("0/1 done, 1 running")
            person.child.sendintr()
            assert person.end() == 130
            assert [line for line in person.all_lines if line not in ("", "^C")] == []
            assert b"\x1b[?25l" not in person.raw
        assert process.poll() is None
        (runner.cwd / "go").touch()
        assert finish(process)[0] == 0
