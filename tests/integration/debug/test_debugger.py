"""`debug`: a person at a terminal, and a debugger in rank 0. The terminals are real."""

from __future__ import annotations

import io
import os
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.notes import assert_one_clear_error
from support.runner import APPS, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Runner

pexpect = pytest.importorskip("pexpect")
DEBUGGED = APPS / "debugged.py"
PROMPT = "(Pdb) "
CTRL_C, CTRL_E, CTRL_Z, BACKSPACE, LEFT, UP = "\x03", "\x05", "\x1a", "\x7f", "\x1b[D", "\x1b[A"
# Longer than that two Ctrl-C count as two alone.
APART_S = 1.2


def arguments(runner: Runner, *overrides: str) -> list[str]:
    launcher = ["hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2", "hydra.launcher.debug=true"]
    return [str(DEBUGGED), "-m", *launcher, f"hydra.sweep.dir={runner.cwd / 'sweep'}", *overrides]


@contextmanager
def at_a_prompt(runner: Runner, *overrides: str, shell: bool = False) -> Iterator[Any]:
    """Have a job on a terminal of its own, with rank 0 at its breakpoint.

    What is given has two attributes more: `screen`, all that was shown, and `modes`, those that the terminal had. With
    `shell` the program runs below one with job control, which says when it is back.
    """
    below = ["sh", "-mc", '"$@"; code=$?; echo the shell is back; exit $code', "sh"] if shell else []
    command, *rest = [*below, sys.executable, *arguments(runner, *overrides)]
    child = pexpect.spawn(
        command,
        rest,
        env=runner.environment(TERM="xterm"),
        cwd=str(runner.cwd),
        timeout=PATIENCE_S,
        encoding="utf-8",
        dimensions=(24, 300),
    )
    try:
        child.modes = termios.tcgetattr(child.child_fd)
        child.screen = child.logfile_read = io.StringIO()
        child.expect_exact(PROMPT)
        runner.wait_until(lambda: termios.tcgetattr(child.child_fd) != child.modes, what="a prompt with line editing")
        yield child
    finally:
        child.close(force=True)


def answer(child: Any, typed: str, expected: str) -> None:
    child.send(typed)
    child.expect_exact(expected)
    child.expect_exact(PROMPT)


def end_of(child: Any) -> tuple[int, str]:
    """Wait for the end, with the terminal as it was; return the exit code as a shell shows it, and what was shown."""
    child.expect_exact(pexpect.EOF)
    child.wait()
    assert termios.tcgetattr(child.child_fd) == child.modes
    code = child.exitstatus if child.signalstatus is None else 128 + child.signalstatus
    return code, child.screen.getvalue()


def pid_of(runner: Runner, rank: int) -> int:
    return int((runner.cwd / "sweep" / "0" / f"pid_{rank}").read_text())


def log_of(runner: Runner, rank: int) -> str:
    return (runner.cwd / "sweep" / "0" / ".ddp" / f"rank_{rank}.log").read_text()


# --- at the prompt


@pytest.mark.sample
def test_a_debugger_in_rank_0(runner: Runner) -> None:
    """Rank 0 is stepped through, its variables are printed and changed, and the job completes with its value."""
    with at_a_prompt(runner, "hydra.launcher.tee_ranks=all") as child:
        if sys.version_info >= (3, 13):
            # From here on, Python stops at the line of `breakpoint()` and not at the next one.
            answer(child, "n\n", "touch()")
        answer(child, "n\n", "return f")
        answer(child, "p text\n", "'first'")
        answer(child, "!text = 'second'\n", "")
        child.send("c\n")
        code, screen = end_of(child)
    assert code == 0
    assert "completed  'second is the value'" in screen
    assert screen.count("[job 0 rank 1] waiting for rank 0") == 1
    # Once, and as it is: rank 0 writes to the terminal itself.
    assert screen.count("-> return f") == 1
    assert "[job 0 rank 0]" not in screen
    assert log_of(runner, 0) == "The output of this rank went to the terminal (hydra.launcher.debug=true).\n"
    # Hydra 1.4 warns first.
    assert log_of(runner, 1).endswith("waiting for rank 0\n")


def test_a_line_can_be_edited(runner: Runner) -> None:
    """Backspace, arrow keys and the history do what they do without a launcher."""
    with at_a_prompt(runner) as child:
        answer(child, f"p texx{BACKSPACE}t{LEFT * 4}('a' + {CTRL_E})\n", "'afirst'")
        answer(child, f"{UP}[:2]\n", "'af'")
        child.send("c\n")
        assert end_of(child)[0] == 0


def test_ctrl_c_is_for_rank_0(runner: Runner) -> None:
    """At the prompt it drops the line, in a statement and in running code it interrupts; the job goes on."""
    busy = runner.cwd / "busy"
    with at_a_prompt(runner) as child:
        answer(child, f"p tex{CTRL_C}", "--KeyboardInterrupt--")
        time.sleep(APART_S)
        child.send(f"!import time; open({str(busy)!r}, 'w').close(); time.sleep(1000)\n")
        runner.wait_until(busy.exists)
        answer(child, CTRL_C, "*** KeyboardInterrupt")
        answer(child, "p text\n", "'first'")
        child.send("c\n")
        code, screen = end_of(child)
    assert code == 0
    assert "'first is the value'" in screen


def test_ctrl_c_twice_stops_the_sweep(runner: Runner) -> None:
    """One can always get out: the exit code is that of Ctrl-C, and nothing is left."""
    with at_a_prompt(runner) as child:
        # Twice within a second, which a busy machine may not manage at once.
        for _ in range(50):
            child.send(CTRL_C)
            if child.expect_exact(["--KeyboardInterrupt--", "SIGINT: stopping 1 running job "]) == 1:
                break
        code, screen = end_of(child)
        runner.assert_nothing_left()
    assert code == 130
    assert "Stopped by SIGINT: 1 of 1 job did not complete" in screen


def test_sigterm_stops_the_sweep(runner: Runner) -> None:
    """All other signals to stop are the sweep's, as always."""
    with at_a_prompt(runner) as child:
        os.kill(child.pid, signal.SIGTERM)
        assert end_of(child)[0] == 143
        runner.assert_nothing_left()


def test_ctrl_z_does_not_bring_the_shell_back(runner: Runner) -> None:
    """Rank 0 would go on to read from the terminal beside the shell."""
    with at_a_prompt(runner, shell=True) as child:
        answer(child, f"{CTRL_Z}p text\n", "'first'")
        assert "the shell is back" not in child.screen.getvalue()
        child.send("c\n")
        code, screen = end_of(child)
    assert code == 0
    assert "\r\n1 job: 1 completed, 0 failed\r\n" in screen
    assert screen.endswith("/results.csv\r\nthe shell is back\r\n")


def test_rank_0_learns_of_the_window_size(runner: Runner) -> None:
    """The terminal tells the launching process that its window changed, and it passes that on."""
    with at_a_prompt(runner) as child:
        answer(child, "!import os, signal\n", "")
        answer(child, "!signal.signal(signal.SIGWINCH, lambda *_: print('now', *os.get_terminal_size(0)))\n", "")
        child.setwinsize(33, 77)
        child.expect_exact("now 77 33")
        child.send("c\n")
        assert end_of(child)[0] == 0


# --- bad ends


def test_another_rank_fails(runner: Runner) -> None:
    """The job has failed, and rank 0 is taken off the prompt."""
    with at_a_prompt(runner, "fails=true") as child:
        (runner.cwd / "sweep" / "0" / "fail").touch()
        code, screen = end_of(child)
        runner.assert_nothing_left()
    assert code == 1
    assert "ValueError: rank 1 is done with waiting" in screen
    assert "rank 0 was then ended by the launcher" in screen


def test_rank_0_is_killed(runner: Runner) -> None:
    """The report has no last lines of a log that tells nothing."""
    with at_a_prompt(runner) as child:
        os.kill(pid_of(runner, 0), signal.SIGKILL)
        code, screen = end_of(child)
        runner.assert_nothing_left()
    assert code == 1
    assert "rank 0 was killed by signal 9 (SIGKILL)" in screen
    assert "Last lines" not in screen
    assert "went to the terminal" not in screen


def test_the_launching_process_is_killed(runner: Runner) -> None:
    """A rank at a prompt ends as any other."""
    with at_a_prompt(runner) as child:
        os.kill(child.pid, signal.SIGKILL)
        runner.assert_nothing_left()


# --- without a terminal


def test_commands_from_a_pipe(runner: Runner) -> None:
    """What is typed may come from a pipe."""
    ran = runner.run("sh", "-c", 'printf "!text = 1\\nc\\n" | exec "$@"', "sh", sys.executable, *arguments(runner))
    assert ran.returncode == 0, ran.output
    assert "completed  '1 is the value'" in ran.output


@pytest.mark.parametrize("redirected", ["</dev/null", "<&-"])
def test_nothing_to_read_from(runner: Runner, redirected: str) -> None:
    """A debugger that finds no input quits, as without a launcher; so does one whose launching process has no stdin."""
    ran = runner.run("sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, *arguments(runner))
    assert ran.returncode == 1
    assert "BdbQuit" in ran.output
    assert PROMPT in ran.stdout
    runner.assert_nothing_left()


# --- what does not go together


def test_several_jobs(runner: Runner) -> None:
    """One error that names their number and what to do, before anything is started."""
    ran = runner.python(*arguments(runner, "text=a,b,c"))
    assert_one_clear_error(ran, "hydra.launcher.debug=true", "there are 3 jobs", "Choose one")
    assert not list((runner.cwd / "sweep").glob("[0-9]*"))


def test_a_time_limit(runner: Runner) -> None:
    """Options that contradict each other are one error."""
    ran = runner.python(*arguments(runner, "hydra.launcher.timeout_min=5"))
    assert_one_clear_error(ran, "debug=true contradicts hydra.launcher.timeout_min=5")
