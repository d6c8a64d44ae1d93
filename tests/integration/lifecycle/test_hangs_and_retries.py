"""Ways to stop, hangs, restarts, root causes, broken directories and private files: what the fault matrix has not."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.notes import (
    Notes,
    alive,
    arguments,
    assert_nothing_left,
    behave_environment,
    finish,
    is_running,
    job_folder,
    keeper_of,
    let_go,
    misbehave,
    misbehaving,
    notes_of,
    state_of,
    write_app,
)

if TYPE_CHECKING:
    from support.runner import Runner

GRACE_S = 1
GRACE = f"hydra.launcher.grace_period_s={GRACE_S}"
RECORDING = "hydra/sweeper=recording"
AT_ONCE = "hydra.launcher.max_parallel_jobs"
# A rank that stored an error, and ranks that all stored a good outcome, are given this time before a word is said.
PATIENCE_S = 10
# What misbehave.py's `spam` prints, at the least: many times what a pipe holds.
SPAM_BYTES = 1_000_000


# --- ways to stop


class Shell:
    """An interactive shell on a terminal of its own, as a user has it."""

    def __init__(self, runner: Runner, env: dict[str, str]) -> None:
        self._runner = runner
        self.master, slave = os.openpty()
        # Not by `start_new_session`: `setsid` also makes the terminal the controlling one.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"],
            cwd=runner.cwd,
            env=runner.environment(**env, PS1="$ ", TERM="dumb"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        os.set_blocking(self.master, False)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self) -> str:
        try:
            while data := os.read(self.master, 1 << 16):
                self.shown += data.decode(errors="replace")
        except OSError:
            pass  # Nothing more now.
        return self.shown

    def wait_for(self, pattern: str) -> re.Match[str]:
        self._runner.wait_until(lambda: re.search(pattern, self.read()), what=f"{pattern!r} on the terminal")
        found = re.search(pattern, self.shown)
        assert found is not None
        return found

    def exit_code(self) -> int:
        """Return `$?`."""
        self.type("echo code=$?=\n")
        return int(self.wait_for(r"code=(\d+)=")[1])

    def close(self) -> None:
        """Take the terminal away."""
        os.close(self.master)


@contextmanager
def sweep_in_a_shell(runner: Runner, *overrides: str) -> Iterator[tuple[Shell, Notes, int]]:
    """Type the command of a sweep into a shell, and yield when its first two ranks are in their function."""
    shell = Shell(runner, behave_environment(runner))
    notes = notes_of(runner)
    try:
        shell.type(shlex.join([sys.executable, *arguments(runner, overrides, 2)]) + "\n")
        runner.wait_until(lambda: (shell.read(), len(notes.places()) == 2)[1], what="two bodies")
        yield shell, notes, state_of(state_of(keeper_of(notes))[1])[1]
    finally:
        shell.process.kill()
        shell.process.wait()


@pytest.mark.sample
def test_ctrl_z_and_fg_change_nothing(runner: Runner) -> None:
    """Ranks end while the launching process is stopped by Ctrl-Z, and `fg` collects the job and runs the next."""
    with sweep_in_a_shell(runner, "x=0,1", "+j0.r0=[wait:go,return:7]", "+j0.r1=wait:go", RECORDING) as (
        shell,
        notes,
        launcher,
    ):
        keeper = keeper_of(notes)
        shell.type("\x1a")
        runner.wait_until(lambda: state_of(launcher)[0] == "T", what="the stop")
        let_go(notes)
        runner.wait_until(lambda: (shell.read(), not is_running(keeper))[1], what="the end of job 0")
        assert state_of(launcher)[0] == "T"
        assert notes.places("end") == [(0, 0), (0, 1)]
        shell.type("fg\n")
        assert shell.exit_code() == 0
        assert notes.statuses() == ["COMPLETED", "COMPLETED"]
        assert notes.returns()[0]["value"] == "7"
        shell.close()


def test_ctrl_c_on_a_terminal_is_130(runner: Runner) -> None:
    """The Ctrl-C key ends the ranks of the job, and the shell sees 130, the code of an interrupted program."""
    with sweep_in_a_shell(runner, "x=0,1", "+all=hang", GRACE) as (shell, notes, _):
        shell.type("\x03")
        assert shell.exit_code() == 130
        assert not any(is_running(note["pid"]) for note in notes.ranks())
        assert notes.places() == [(0, 0), (0, 1)]
        shell.close()


def test_a_closed_terminal_ends_all(runner: Runner) -> None:
    """When the terminal goes away, with output on its way to it, ranks that ignore SIGTERM end as well."""
    with sweep_in_a_shell(runner, "x=0,1", "+all=[ignore,print:hello,hang]", GRACE) as (shell, notes, launcher):
        shell.close()
        runner.wait_until(lambda: not is_running(launcher), what="the end of the launching process")
        assert not any(is_running(note["pid"]) for note in notes.ranks())
        assert notes.places() == [(0, 0), (0, 1)]
    assert_nothing_left(runner)


@pytest.mark.parametrize("who", ["rank", "keeper", "spawner"])
def test_ctrl_c_while_somebody_is_stopped(runner: Runner, who: str) -> None:
    """A rank, keeper or spawner that stands still by SIGSTOP does not keep Ctrl-C from ending everything."""
    with misbehaving(runner, "+all=hang", GRACE) as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        keeper = keeper_of(notes)
        pids = {"rank": notes.read("body_0_1")["pid"], "keeper": keeper, "spawner": state_of(keeper)[1]}
        os.kill(pids[who], signal.SIGSTOP)
        runner.wait_until(lambda: state_of(pids[who])[0] == "T", what="the stop")
        os.kill(process.pid, signal.SIGINT)
        code, output = finish(process)
        assert code == 130, output
        assert_nothing_left(runner)


def test_ctrl_c_before_the_first_job_runs(runner: Runner) -> None:
    """While the first job is still being frozen nothing runs that could wake the launching process."""
    slow = (
        "from omegaconf import OmegaConf\nimport time\n\ndef slow():\n    behave.note('freezing')\n    time.sleep(1)\n"
    )
    app = write_app(runner, f"{slow}\nOmegaConf.register_new_resolver('slow', slow, use_cache=True)")
    argv = [
        app,
        "-m",
        "hydra/launcher=ddp_subprocess",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}",
        "x=0,1",
        "+y=${slow:}",
    ]
    with runner.start(sys.executable, *argv, env=behave_environment(runner)) as process:
        notes = notes_of(runner)
        runner.wait_until(lambda: notes.has("freezing"), what="the first job's config")
        process.send_signal(signal.SIGINT)
        code, output = finish(process)
        assert code == 130, output
        assert notes.places() == []


def test_ctrl_c_when_nobody_reads_the_output(runner: Runner) -> None:
    """A terminal that takes nothing more, as after Ctrl-S, keeps neither ranks nor Ctrl-C from their way."""
    with misbehaving(runner, "+r0=[spam,hang]", "+r1=hang", GRACE) as (process, _):
        log = job_folder(runner, 0) / "rank_0.log"
        runner.wait_until(lambda: log.exists() and log.stat().st_size >= SPAM_BYTES, what="a full pipe and more")

        def interrupted() -> bool:
            # The launching process may wait to say what it does: then the second one gets it out.
            process.send_signal(signal.SIGINT)
            time.sleep(1)
            return process.poll() is not None

        runner.wait_until(interrupted, what="the end")
        assert_nothing_left(runner)


def test_a_closed_stdout(runner: Runner) -> None:
    """Where there is no stdout at all, jobs run and are judged as ever."""
    argv = shlex.join([sys.executable, *map(str, arguments(runner, ("x=0,1", "+all=spam", RECORDING), 2))])
    ran = runner.run("sh", "-c", f"{argv} >&-", env=behave_environment(runner))
    assert ran.returncode == 0, ran.output
    assert notes_of(runner).statuses() == ["COMPLETED", "COMPLETED"]


def spawners_of(launcher: int) -> list[int]:
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [int(pid) for pid in children if b"spawner.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []


def test_a_spawner_that_stands_still_is_replaced(runner: Runner) -> None:
    """A spawner that is stopped from its start, and again whenever woken, is killed and keeps no job from its end."""
    with misbehaving(runner, "+r0=return:7", RECORDING) as (process, notes):
        while not (found := spawners_of(process.pid)):
            assert process.poll() is None
        (spawner,) = found
        # It may keep the job from its start, from its end, and the sweep from the spawner's own end.
        # So quick that it hardly gets to a job. It may be stopped within a fork, with the keeper's socket open.
        while is_running(spawner):
            if state_of(spawner)[0] != "T":
                os.kill(spawner, signal.SIGSTOP)
            time.sleep(0.001)
        finish(process)
        assert notes.statuses() == ["COMPLETED"]
        assert notes.returns()[0]["value"] == "7"


def test_all_ranks_killed_at_once(runner: Runner) -> None:
    """SIGKILL of every rank of a job is one failed job with that reason, and the next one runs."""
    with misbehaving(runner, "x=0,1", "+j0.all=hang", RECORDING) as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        for note in notes.all("body"):
            os.kill(note["pid"], signal.SIGKILL)
        finish(process)
        assert notes.statuses() == ["FAILED", "COMPLETED"]
        assert "SIGKILL" in notes.returns()[0]["text"]


def test_a_lost_spawner_and_then_a_lost_keeper(runner: Runner) -> None:
    """With nobody left to adopt them, grandchildren are found by their environment, and the next job runs."""
    steps = "+j0.r0=[wait:ready,above:2,above:1]"
    with misbehaving(runner, "x=0,1", steps, "+j0.r1=[note:ready,hang]", "+j1.r0=wait:go", RECORDING) as (
        process,
        notes,
    ):
        runner.wait_until(lambda: notes.places()[-1:] == [(1, 1)], what="job 1")
        left = [pid for pid in alive(runner, b"HYDRA_DDP_JOB_NUM=0") if is_running(pid)]
        assert left == []
        let_go(notes)
        finish(process)
        assert notes.statuses() == ["FAILED", "COMPLETED"]


def test_everybody_above_the_ranks_is_killed(runner: Runner) -> None:
    """SIGKILL of spawner, keeper and launching process, one right after the other, ends the ranks as well."""
    with misbehaving(runner, "+all=[ignore,hang]") as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        keeper = keeper_of(notes)
        for pid in (state_of(keeper)[1], keeper, process.pid):
            os.kill(pid, signal.SIGKILL)
        assert_nothing_left(runner)


def test_a_stopped_keeper_of_a_killed_launching_process(runner: Runner) -> None:
    """A keeper that stands still when the launching process is killed is woken to end its job all the same."""
    with misbehaving(runner, "+all=[ignore,hang]") as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        keeper = keeper_of(notes)
        os.kill(keeper, signal.SIGSTOP)
        runner.wait_until(lambda: state_of(keeper)[0] == "T", what="the stop")
        process.kill()
        assert_nothing_left(runner)


def test_a_stopped_spawner_of_a_killed_launching_process(runner: Runner) -> None:
    """A spawner that stands still when the launching process is killed is woken, and ends like everything else."""
    with misbehaving(runner, "+all=[ignore,hang]") as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        spawner = state_of(keeper_of(notes))[1]
        os.kill(spawner, signal.SIGSTOP)
        runner.wait_until(lambda: state_of(spawner)[0] == "T", what="the stop")
        process.kill()
        assert_nothing_left(runner)
        runner.wait_until(lambda: not is_running(spawner), what="the spawner's end")


# --- hangs


def test_a_timeout_shows_where_every_rank_was(runner: Runner) -> None:
    """When `timeout_min` ends a job each rank's log has its Python stacks, written before it got SIGTERM."""
    ran, notes = misbehave(
        runner,
        "x=0,1",
        "+j0.r0=[say_sigterm,hang]",
        "+j0.r1=[say_sigterm,wait:never]",
        "hydra.launcher.timeout_min=0.25",
        GRACE,
        RECORDING,
    )
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert "timeout_min" in notes.returns()[0]["text"]
    assert "ranks 0, 1 still running" in ran.output
    for rank, where in ((0, "in <lambda>"), (1, "in wait_for")):
        log = (job_folder(runner, 0) / f"rank_{rank}.log").read_text()
        assert re.search(rf'File ".*behave\.py", line \d+ {where}', log), log
        assert log.index(where) < log.index("SIGTERM came")


def test_a_rank_that_leaves_before_the_others_have_joined(runner: Runner) -> None:
    """Rank 1 exits with 0 and no outcome while rank 0 waits for it: the job fails at once, of rank 1."""
    ran, notes = misbehave(runner, "+r0=meet", GRACE, RECORDING, env={"MISBEHAVE_LEAVE": "1"})
    assert notes.statuses() == ["FAILED"]
    assert "rank 1 ended with exit code 0 but did not finish the job" in notes.returns()[0]["text"]
    assert "rank 0 was then ended by the launcher" in ran.output
    assert notes.places("end") == []


def test_a_rank_that_returns_while_the_others_wait_for_it(runner: Runner) -> None:
    """Rank 1 returns while rank 0 waits for it: with `exit_timeout_s` the job fails and rank 0 is named."""
    ran, notes = misbehave(runner, "+r0=meet", "hydra.launcher.exit_timeout_s=5", GRACE, RECORDING)
    assert notes.statuses() == ["FAILED"]
    assert "rank 0 still running" in notes.returns()[0]["text"]
    assert "exit_timeout_s" in ran.output
    assert notes.places("end") == [(0, 1)]


def test_one_of_three_ranks_without_an_outcome(runner: Runner) -> None:
    """Every rank exits with 0, but rank 2 left within the job: FAILED, and it is rank 2 that is named."""
    _, notes = misbehave(runner, "+r2=[wait:end_0_0,wait:end_0_1,sleep:0.5,exit:0]", RECORDING, nproc=3)
    assert notes.places("end") == [(0, 0), (0, 1)]
    assert notes.statuses() == ["FAILED"]
    said = notes.returns()[0]["text"]
    assert "rank 2 ended with exit code 0 but did not finish the job" in said
    assert "hydra.main" in said


def test_exit_timeout_after_every_outcome_completes(runner: Runner) -> None:
    """Rank 1 stored a good outcome and does not exit: `exit_timeout_s` ends it, and the job's value counts."""
    ran, notes = misbehave(
        runner, "+r0=return:7", "+r1=linger:3600", "hydra.launcher.exit_timeout_s=5", GRACE, RECORDING
    )
    assert notes.statuses() == ["COMPLETED"]
    assert notes.returns()[0]["value"] == "7"
    assert "rank 1 was ended by the launcher" in ran.output
    assert ran.returncode == 0


def test_ranks_that_are_done_but_do_not_exit(runner: Runner) -> None:
    """After ten seconds a line names who lingers after a good end, and who lingers after an error is ended."""
    ran, notes = misbehave(
        runner,
        "x=0,1,2",
        f"+j0.r1=linger:{PATIENCE_S + 2}",
        "+j1.r0=hang",
        "+j1.r1=[linger:3600,raise:lingering]",
        f"{AT_ONCE}=2",
        GRACE,
        RECORDING,
    )
    assert notes.statuses() == ["COMPLETED", "FAILED", "COMPLETED"]
    assert "#0 : every rank has finished, but rank 1 does not exit" in ran.output
    assert "ValueError: broken: lingering" in notes.returns()[1]["text"]
    assert "did not end until it was killed" in ran.output


# --- restarts


def attempts(notes: Notes, job: int, rank: int = 0) -> list[dict[str, str]]:
    return [note for note in notes.all(f"attempt_{job}") if note["rank"] == rank]


@pytest.mark.sample
def test_a_failed_group_is_started_again(runner: Runner) -> None:
    """`max_restarts` starts every rank again, on another port, counted in both variables, with earlier logs kept."""
    ran, notes = misbehave(
        runner,
        "x=0,1",
        "+j0.r0=[fail_until:0,return:7]",
        "+j0.r1=fail_until:2",
        "+j1.all=fail_until:0",
        "hydra.launcher.max_restarts=2",
        GRACE,
        RECORDING,
        env={"BEHAVE_AGAIN": "1"},
    )
    assert ran.returncode == 0, ran.output
    assert notes.statuses() == ["COMPLETED", "COMPLETED"]
    assert notes.returns()[0]["value"] == "7"
    for rank in (0, 1):
        tried = attempts(notes, 0, rank)
        assert [one["HYDRA_DDP_ATTEMPT"] for one in tried] == ["0", "1", "2"]
        assert [one["TORCHELASTIC_RESTART_COUNT"] for one in tried] == ["0", "1", "2"]
        assert {one["TORCHELASTIC_MAX_RESTARTS"] for one in tried} == {"2"}
        for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
            assert len({one[name] for one in tried}) == 3
    assert [one["HYDRA_DDP_ATTEMPT"] for one in attempts(notes, 1)] == ["0"]
    for number, folder in enumerate(("earlier_0", "earlier_1", ".")):
        log = (job_folder(runner, 0) / folder / "rank_1.log").read_text()
        assert f"attempt {number} of rank 1" in log
        assert (f"broken in attempt {number}" in log) == (number < 2)
    assert ran.output.count("restart 1 of 2") == ran.output.count("restart 2 of 2") == 1
    assert not (job_folder(runner, 1) / "earlier_0").exists()


def test_restarts_have_an_end(runner: Runner) -> None:
    """With `max_restarts=1` a job that always fails is FAILED after two attempts, with the last one's error."""
    ran, notes = misbehave(
        runner, "+all=fail_until:9", "hydra.launcher.max_restarts=1", GRACE, RECORDING, env={"BEHAVE_AGAIN": "1"}
    )
    assert ran.returncode != 0
    assert notes.statuses() == ["FAILED"]
    assert "broken in attempt 1" in notes.returns()[0]["text"]
    assert [one["HYDRA_DDP_ATTEMPT"] for one in attempts(notes, 0)] == ["0", "1"]
    earlier = job_folder(runner, 0) / "earlier_0"
    assert "broken in attempt 0" in "".join(path.read_text() for path in earlier.glob("rank_?.log"))
    assert not (job_folder(runner, 0) / "earlier_1").exists()


@pytest.mark.parametrize("step", ["above:1", "hang", "exit:0", "kill:SIGSEGV"])
def test_what_is_restarted(runner: Runner, step: str) -> None:
    """A lost keeper, a hang up to a limit, an end without an outcome and a crash are all worth another start."""
    _, notes = misbehave(
        runner,
        "+r0=[fail_until:0,return:7]",
        f"+r1=[fail_until:0,first:{step}]",
        "hydra.launcher.max_restarts=1",
        *(["hydra.launcher.exit_timeout_s=5"] if step == "hang" else []),
        GRACE,
        RECORDING,
        env={"BEHAVE_AGAIN": "1"},
    )
    assert notes.statuses() == ["COMPLETED"]
    assert [one["HYDRA_DDP_ATTEMPT"] for one in attempts(notes, 0, rank=1)] == ["0", "1"]


def test_no_restart_after_ctrl_c(runner: Runner) -> None:
    """Ctrl-C ends a job for good, however many restarts it has left."""
    with misbehaving(runner, "+all=[fail_until:0,hang]", "hydra.launcher.max_restarts=3", GRACE) as (process, notes):
        runner.wait_until(lambda: len(notes.all("attempt_0")) == 2, what="the first attempt")
        os.kill(process.pid, signal.SIGINT)
        code, output = finish(process)
        assert code == 130, output
        assert {one["HYDRA_DDP_ATTEMPT"] for one in notes.all("attempt_0")} == {"0"}
        assert "restart 1 of" not in output


# --- root causes


def test_the_cause_is_the_rank_that_failed_first(runner: Runner) -> None:
    """Rank 1 fails, rank 0 fails of it and ends sooner: rank 1 is blamed, and the exception is rank 1's."""
    ran, notes = misbehave(
        runner,
        "+r0=[wait:first,sleep:0.3,raise:consequence]",
        "+r1=[linger:1,note:first,raise:cause]",
        GRACE,
        RECORDING,
    )
    assert notes.statuses() == ["FAILED"]
    assert "broken: cause" in notes.returns()[0]["text"]
    assert "rank 1: ValueError: broken: cause" in ran.output
    assert "consequence" not in notes.returns()[0]["text"]
    # By which the launcher ended rank 1, so that it is no news.
    assert "SIGTERM" not in ran.output


@pytest.mark.parametrize("kind", ["text", "dict"])
def test_torchruns_error_file_is_read(runner: Runner, kind: str) -> None:
    """What torch's `record` or the user's own code wrote into TORCHELASTIC_ERROR_FILE is in the message."""
    ran, notes = misbehave(
        runner, "+r0=hang", f"+r1=[print:last_words,'error_file:{kind} of the error']", GRACE, RECORDING
    )
    assert notes.statuses() == ["FAILED"]
    said = notes.returns()[0]["text"]
    assert f"{kind} of the error" in ran.output
    assert "rank 1" in said
    # A dict has a traceback to show; without one the log has the last word.
    assert (f"Traceback of {kind} of the error" if kind == "dict" else "last_words") in said


def test_the_message_has_the_last_lines_of_the_log(runner: Runner) -> None:
    """A rank that ends without a word of Python has its log's last lines in the message, and nobody else's."""
    _, notes = misbehave(
        runner, "+r0=[print:not_me,note:ready,hang]", "+r1=[wait:ready,print:my_last_words,exit:4]", GRACE, RECORDING
    )
    said = notes.returns()[0]["text"]
    assert "exit code 4" in said
    assert "my_last_words" in said
    assert "not_me" not in said


# --- directories that break


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of one megabyte."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        # A test may have put more mounts on top of it.
        while os.path.ismount(folder):
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def disks(runner: Runner) -> Iterator[tuple[Path, Path]]:
    """Jobs 1 and 2 of the sweep have small disks as their run directories."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("mounting needs root on Linux")
    with small_disk(runner.cwd / "sweep" / "1") as first, small_disk(runner.cwd / "sweep" / "2") as second:
        yield first, second


def assert_only_1_and_2_failed(runner: Runner, notes: Notes, reason: str) -> None:
    assert notes.statuses() == ["COMPLETED", "FAILED", "FAILED", "COMPLETED"]
    assert [result["value"] for result in notes.returns()] == ["10", "", "", "13"]
    for job in (1, 2):
        assert reason in notes.returns()[job]["text"]
    for job in (0, 3):
        assert sorted(path.name for path in job_folder(runner, job).glob("outcome_*")) == [
            "outcome_0.pkl",
            "outcome_1.pkl",
        ]


def test_a_full_disk(runner: Runner, disks: tuple[Path, Path]) -> None:
    """A disk that a job fills, and one that was full before, fail these jobs with the reason, and no other."""
    (disks[1] / "large").write_bytes(bytes(1 << 20))
    ran, notes = misbehave(
        runner, "x=0,1,2,3", "+j0.r0=return:10", "+j1.r0=[fill,return:11]", "+j3.r0=return:13", GRACE, RECORDING
    )
    assert_only_1_and_2_failed(runner, notes, "No space left on device")
    assert ran.returncode != 0


def test_a_value_that_is_too_large_for_the_disk(runner: Runner, disks: tuple[Path, Path]) -> None:
    """A job whose outcome does not fit has failed of that, and a restart that cannot be written changes no reason."""
    _, notes = misbehave(
        runner, "x=0,1,2", "+j1.r0=big:8000000", "+j2.r0=[fill,raise]", "hydra.launcher.max_restarts=1", GRACE,
        RECORDING, env={"BEHAVE_AGAIN": "1"},
    )  # fmt: skip
    assert notes.statuses() == ["COMPLETED", "FAILED", "FAILED"]
    assert "its outcome cannot be stored: No space left on device" in notes.returns()[1]["text"]
    said = notes.returns()[2]["text"]
    # On the full disk rank 1 may be the first that cannot store that it is done.
    assert re.search("rank [01] failed with exit code 1", said) and "No space left on device" in said


def test_a_read_only_directory(runner: Runner, disks: tuple[Path, Path]) -> None:
    """A run directory that becomes read-only while the job runs, and one that was so before, fail with the reason."""

    def make_read_only(folder: Path) -> None:
        # Its log is open for writing, which a plain remount refuses; over a bind mount it is not asked.
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        # Busy for as long as somebody has a file of the new mount open for writing.
        remount = ["mount", "-o", "remount,bind,ro", str(folder)]
        runner.wait_until(
            lambda: subprocess.run(remount, capture_output=True, check=False).returncode == 0, what="the remount"
        )

    make_read_only(disks[1])
    steps = ["+j0.r0=return:10", "+j1.all=[wait:go,return:11]", "+j3.r0=return:13"]
    with misbehaving(runner, "x=0,1,2,3", *steps, GRACE, RECORDING) as (process, notes):
        runner.wait_until(lambda: notes.places()[-1:] == [(1, 1)], what="the bodies of job 1")
        make_read_only(disks[0])
        let_go(notes)
        finish(process)
    assert_only_1_and_2_failed(runner, notes, "Read-only file system")


def test_a_run_directory_that_is_removed(runner: Runner) -> None:
    """A job whose run directory is deleted under it fails with the reason, and the sweep goes on."""
    ran, notes = misbehave(runner, "x=0,1,2", "+j1.r0=[wait:body_1_1,remove]", "+r0=return:7", GRACE, RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED", "COMPLETED"]
    assert "its files were deleted while the job ran" in notes.returns()[1]["text"]
    assert [notes.returns()[job]["value"] for job in (0, 2)] == ["7", "7"]
    assert ran.returncode != 0


# --- private files


def test_private_files_under_umask_0(runner: Runner) -> None:
    """Payloads and outcomes are 0600 whatever the umask, as unpickling runs code."""
    argv = shlex.join([sys.executable, *arguments(runner, ("x=0,1", "+j1.r0=raise"), 2)])
    runner.run("sh", "-c", f"umask 0; exec {argv}", env=behave_environment(runner))
    for job in (0, 1):
        private = [job_folder(runner, job) / name for name in ("payload.pkl", ("outcome_0.pkl", "failure_0.pkl")[job])]
        assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600, 0o600]
    for path in (runner.cwd / "sweep").rglob("*.pkl*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_changed_payload_is_not_loaded(runner: Runner) -> None:
    """A payload that somebody changed before a rank reads it fails the job by its digest, and runs no code of it."""
    trap = runner.cwd / "trap.py"
    trap.write_text(
        "import os, pathlib, pickle, sys\n"
        "class Trap:\n"
        f"    def __reduce__(self): return (os.mkdir, ({str(runner.cwd / 'trapped')!r},))\n"
        "folder = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[3]\n"
        "if os.environ['HYDRA_DDP_JOB_NUM'] == '0':\n"
        "    open(os.path.join(folder, 'payload.pkl'), 'wb').write(pickle.dumps(Trap()))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    _, notes = misbehave(runner, "x=0,1", f"hydra.launcher.wrapper=[{sys.executable},-S,-E,{trap}]", GRACE, RECORDING)
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert "SHA-256" in notes.returns()[0]["text"]
    assert not (runner.cwd / "trapped").exists()


@pytest.mark.parametrize("how", ["link", "damage", "owner"])
def test_an_outcome_is_taken_from_ourselves_only(runner: Runner, how: str) -> None:
    """An outcome behind a link, of another owner, or damaged is not taken: the job has failed."""
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("giving files away needs root")
    _, notes = misbehave(runner, "x=0,1", f"+j0.r0=[spoil:{how},return:7]", "+j1.r0=return:8", RECORDING)
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert "rank 0" in notes.returns()[0]["text"]
    assert notes.returns()[1]["value"] == "8"


def listening_sockets(pids: list[int]) -> set[str]:
    """Return the inodes of the TCP sockets on which these processes listen."""
    listening = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    held = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                held.add(os.readlink(entry))
            except OSError:
                continue  # Closed meanwhile.
    return listening & held


def test_nothing_of_ours_listens(runner: Runner) -> None:
    """While a job runs neither launcher, spawner, keeper nor rank listens on a port: that is rank 0's alone to do."""
    with misbehaving(runner, "+all=wait:go") as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        pids = list(alive(runner))
        assert len(pids) == 5
        assert listening_sockets(pids) == set()
        let_go(notes)
        assert finish(process)[0] == 0


def test_secrets_are_not_written_down(runner: Runner) -> None:
    """job.json names variables that look like secrets, but has not their values; ranks have them."""
    (runner.cwd / "conf").mkdir()
    secrets = {"HF_TOKEN": "s3cret-a", "my_api_key": "s3cret-b", "DB_PASSWORD": "s3cret-c", "CLIENT_SECRET": "s3cret-d"}
    settings = {"hydra": {"job": {"env_set": {**secrets, "HARMLESS": "shown"}}}, "x": 0}
    (runner.cwd / "conf" / "config.yaml").write_text(json.dumps(settings))
    app = write_app(runner, config="config_path='conf', config_name='config'")
    environment = behave_environment(runner, WANDB_API_KEY="s3cret-e")
    ran = runner.sweep(app, env=environment)
    assert ran.returncode == 0, ran.output
    text = (job_folder(runner, 0) / "job.json").read_text()
    assert json.loads(text)["environment"]["HARMLESS"] == "shown"
    assert "s3cret" not in text
    assert all(name in text for name in secrets)
    seen = notes_of(runner).environment(0, 0)
    assert {name: seen[name] for name in secrets} == secrets
