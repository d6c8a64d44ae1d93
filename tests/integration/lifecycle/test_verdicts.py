"""What counts as the end of a job, whatever its ranks do to their streams, files and values, and who is told what."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from support.notes import (
    arguments,
    assert_nothing_left,
    behave_environment,
    descendants,
    finish,
    job_folder,
    misbehave,
    misbehaving,
    notes_of,
    write_app,
)

if TYPE_CHECKING:
    from support.runner import Runner

GRACE = "hydra.launcher.grace_period_s=5"
NO_GRACE = "hydra.launcher.grace_period_s=0"
RECORDING = "hydra/sweeper=recording"
# Long enough for all ranks to start on a busy machine.
SOON = "hydra.launcher.timeout_min=0.25"


# --- what came too late


@pytest.mark.sample("hydra.launcher.timeout_min=0.25")
@pytest.mark.parametrize("limit", [SOON, "hydra.launcher.exit_timeout_s=10"])
def test_a_value_that_was_returned_for_a_limit(runner: Runner, limit: str) -> None:
    """A job that is ended by a limit has failed, also when its ranks then return what they have by then."""
    rest = "+r1=return:1" if "exit" in limit else "+r1=until_sigterm"
    ran, notes = misbehave(runner, "+r0=until_sigterm", rest, limit, GRACE, RECORDING)
    assert notes.statuses() == ["FAILED"]
    assert re.split("[.=]", limit)[2] in notes.returns()[0]["text"]
    assert (0, 0) in notes.places("end")
    assert ran.returncode != 0


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_a_value_is_loaded(runner: Runner, name: str, code: int) -> None:
    """A signal that comes while the last job of a batch is looked at ends the sweep like any other."""
    with misbehaving(runner, "x=0,1", "hydra.sweeper.max_batch_size=1", "+r0=slow") as (process, notes):
        runner.wait_until(lambda: notes.has("loading"), what="the value")
        process.send_signal(getattr(signal, name))
        assert finish(process)[0] == code
        assert notes.places() == [(0, 0), (0, 1)]


@pytest.mark.parametrize("both", [("SIGTERM", "SIGHUP"), ("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT")], ids=str)
def test_two_signals_in_a_row(runner: Runner, both: tuple[str, str]) -> None:
    """Two signals together, as service managers and wrappers send them, leave the ranks the time to end."""
    with misbehaving(runner, "+all=until_sigterm", GRACE) as (process, notes):
        runner.wait_until(lambda: notes.has("works_0") and notes.has("works_1"), what="two working ranks")
        for name in both:
            process.send_signal(getattr(signal, name))
            time.sleep(0.03)
        code, output = finish(process)
        assert code in (129, 130, 143), output
        assert "killing" not in output
        assert notes.places("end") == [(0, 0), (0, 1)]
        assert_nothing_left(runner)


def test_an_impatient_user(runner: Runner) -> None:
    """A second signal while the launching process is busy with a user's value ends it, and blames no value for it."""
    with misbehaving(runner, "+r0=slow", env={"BEHAVE_LOAD_S": "20"}) as (process, notes):
        runner.wait_until(lambda: notes.has("loading"), what="the value")
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(1.2)
        code, output = finish(process)
        assert code == 143, output
        assert "lost" not in output


def test_sigterm_to_every_process_of_a_job(runner: Runner) -> None:
    """A signal to all below the launching process, as from a batch system, leaves the ranks their grace."""
    with misbehaving(runner, "x=0,1", "+j0.all=save", GRACE, RECORDING) as (process, notes):
        runner.wait_until(lambda: notes.has("works_0") and notes.has("works_1"), what="two working ranks")
        # Those above the ranks first: they must not take them along.
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGTERM)
        finish(process)
    assert notes.has("saved_0") and notes.has("saved_1")
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert "its keeper got a signal (SIGTERM)" in notes.returns()[0]["text"]


# --- what is no failure


def test_an_error_that_was_handled(runner: Runner) -> None:
    """An error file, as `record` leaves one for an error that the job then handles, ends no job."""
    steps = ["+r0=[handled,return:7]", "+r1=[handled,wait:end_0_0,sleep:2]"]
    _, notes = misbehave(runner, *steps, GRACE, RECORDING)
    assert notes.statuses() == ["COMPLETED"]
    assert notes.returns()[0]["value"] == "7"


@pytest.mark.parametrize("how", ["detached", "closed", "bad", "silenced", "taken"])
def test_a_spoilt_stderr(runner: Runner, how: str) -> None:
    """Whatever a program did to its stderr, its value and its error arrive, and no other rank is ended for it."""
    # Python ends rank 1 with 120 where its stderr cannot be flushed, while rank 0 still works.
    good = (f"+j0.r1=[stderr:{how},return:7]", f"+j0.r0=[wait:end_0_1,sleep:1,stderr:{how},return:7]")
    ran, notes = misbehave(runner, "x=0,1", *good, f"+j1.all=[stderr:{how},raise]", RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED"]
    assert notes.returns()[0]["value"] == "7"
    assert notes.returns()[1]["type"] == "ValueError"
    assert ("rank 1 ended with exit code 120, as its last output could not be written" in ran.output) == (how == "bad")


def test_stderr_that_was_detached_before_the_job(runner: Runner) -> None:
    """Nor what it did before `main()`."""
    app = write_app(
        runner, "import io, misbehave\nsys.stderr = io.TextIOWrapper(sys.stderr.detach(), encoding='utf-8')"
    )
    argv = [app, *arguments(runner, ("+all=return:7",), 2)[1:]]
    ran = runner.python(*argv, env=behave_environment(runner))
    assert ran.returncode == 0, ran.output
    assert notes_of(runner).places("end") == [(0, 0), (0, 1)]


# --- where it hung


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        ("hang", [NO_GRACE]),
        ("hang", ['hydra.launcher.wrapper=[sh,-c,\'"$0" "$@"; exit $?\']']),
        ("[stderr:silenced,hang]", []),
        ("[stderr:taken,hang]", []),
        ("[stderr:detached,hang]", []),
        ("stop", []),
    ],
    ids=["no grace", "wrapper", "silenced", "taken", "detached", "stopped"],
)
def test_stacks_come_into_the_log(runner: Runner, steps: str, options: list[str]) -> None:
    """On a time limit each rank's log has its stacks, and no file of the user's, whatever else is unusual."""
    ran, notes = misbehave(runner, f"+all={steps}", SOON, "hydra.launcher.grace_period_s=1", *options, RECORDING)
    assert notes.statuses() == ["FAILED"]
    for rank in (0, 1):
        log = (job_folder(runner, 0) / f"rank_{rank}.log").read_text()
        assert re.search(r'File ".*behave\.py", line \d+ in run_step', log), log
    assert "Python stacks" in notes.returns()[0]["text"], ran.output
    taken = notes.folder / "of_the_user"
    assert not taken.exists() or "run_step" not in taken.read_text()


# --- values, errors and texts of all kinds


def test_a_value_that_quits(runner: Runner) -> None:
    """A value or an error whose loading calls `sys.exit` costs itself, and no other job."""
    _, notes = misbehave(runner, "x=0,1,2", "+j0.r0=quits", "+j1.r1=raise_quitting", "+j2.r0=return:7", RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED", "COMPLETED"]
    assert "lost value" in notes.returns()[0]["value"]
    assert "QuittingError: its own words" in notes.returns()[1]["text"]
    assert notes.returns()[2]["value"] == "7"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_words_that_the_terminal_cannot_show(runner: Runner, encoding: str) -> None:
    """A message or value that the output's encoding lacks is shown with escapes, and the table is complete."""
    ran, _ = misbehave(
        runner, "x=0,1", "+j0.r1=raise_odd", f"+j1.r0='return:\"{'é€' * 60}\"'",
        env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert "Logging error" not in ran.output
    assert "broken: \\udcff" in ran.output
    assert "2 jobs: 1 completed, 1 failed" in ran.output


# --- directories that go away


def test_a_working_directory_that_is_deleted(runner: Runner) -> None:
    """What was done before counts; jobs that cannot start there any more fail with that reason."""
    folder = runner.cwd / "work"
    folder.mkdir()
    argv = arguments(runner, ("x=0,1,2", f"+j0.r0=[rmtree:{folder},return:7]", RECORDING), 1)
    ran = runner.run(sys.executable, *argv, env=behave_environment(runner), cwd=folder)
    notes = notes_of(runner)
    assert notes.statuses() == ["COMPLETED", "FAILED", "FAILED"], ran.output
    assert notes.returns()[0]["value"] == "7"
    assert f"No such file or directory: {folder}" in notes.returns()[1]["text"]
    assert "Traceback" not in ran.output


def test_a_job_that_empties_its_run_directory(runner: Runner) -> None:
    """What ranks store after that counts; where one had stored before, the message says that the files were deleted."""
    steps = ["+j0.r0=[wait:body_0_1,empty,note:emptied,return:7]", "+j0.r1=wait:emptied"]
    late = ["+j1.r0=[wait:end_1_1,sleep:1,empty]"]
    _, notes = misbehave(runner, "x=0,1", *steps, *late, GRACE, RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED"]
    assert "its files were deleted while the job ran" in notes.returns()[1]["text"]
