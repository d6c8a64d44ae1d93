"""A debug session: whom a signal is for, what rank 0 gets, the terminal as it was. With real pseudo-terminals."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import stat
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import ShowProgress
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import OptionError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.debug import DebugSession, debug_session
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.progress import Progress

INT, TERM, HUP, WINCH, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGUSR1
NOTHING: Any = None
DEBUG: Any = SimpleNamespace(debug=True)


@pytest.fixture
def terminal() -> Iterator[int]:
    """A terminal, as a process in it has it."""
    ends = os.openpty()
    yield ends[1]
    for end in ends:
        os.close(end)


@contextlib.contextmanager
def standard_descriptor(number: int, other: int | None) -> Iterator[None]:
    """Let a standard descriptor of this process be another one, or closed, while the block runs."""
    kept = os.dup(number)
    os.close(number) if other is None else os.dup2(other, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


# --- signals


@pytest.mark.parametrize(
    ("arrived", "receivers"),
    [
        pytest.param([(INT, 0)], [0], id="Ctrl-C"),
        pytest.param([(INT, 0), (INT, 1.1), (INT, 2.2)], [0, 0, 0], id="slowly"),
        pytest.param([(INT, 0), (INT, 0.9)], [0, None], id="twice"),
        pytest.param([(INT, 0), (INT, 1.1), (INT, 1.3)], [0, 0, None], id="the third soon after the second"),
        pytest.param([(INT, 0), (INT, 0.01), (INT, 2)], [0, 0, 0], id="passed on by a wrapper, too"),
        pytest.param([(INT, 0.04 * n) for n in range(4)], [0, 0, 0, None], id="held down"),
        pytest.param([(INT, 0), (INT, 0.5), (INT, 9)], [0, None, None], id="while it stops"),
        pytest.param([(TERM, 0), (INT, 9)], [None, None], id="after SIGTERM"),
        pytest.param([(HUP, 0), (INT, 9)], [None, None], id="after SIGHUP"),
        pytest.param([(WINCH, 0), (WINCH, 0.5)], [0, 0], id="window"),
        pytest.param([(USR1, 0), (INT, 1)], [None, 0], id="for all ranks"),
    ],
)
def test_whom_a_signal_is_for(terminal: int, arrived: list[tuple[int, float]], receivers: list[int | None]) -> None:
    """Ctrl-C is for rank 0 until it comes twice in a second, or the sweep is being stopped."""
    session = DebugSession((terminal,) * 3)
    assert [session.receiver(number, 1000 + after_s) for number, after_s in arrived] == receivers


def test_without_debug() -> None:
    """A batch that nobody debugs has its signals to itself, whatever the number of jobs."""
    with debug_session(SimpleNamespace(debug=False), 5) as session:  # type: ignore[arg-type]
        assert (session.descriptors, session.signals, session.receiver(INT, 0.0)) == ((), (), None)
        session.restore_terminal()


# --- the terminal


def test_rank_0_gets_the_standard_descriptors(terminal: int) -> None:
    """The copies are the same files as the originals, and are closed with the session."""
    with standard_descriptor(0, terminal), debug_session(DEBUG, 1) as session:
        assert [os.path.sameopenfile(copy, number) for number, copy in enumerate(session.descriptors)] == [True] * 3
        assert os.isatty(session.descriptors[0])
    for copy in session.descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(copy)


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("name", ["__stdin__", "__stdout__"])
def test_a_closed_standard_descriptor(monkeypatch: pytest.MonkeyPatch, name: str, reused: bool) -> None:
    """In its place rank 0 gets /dev/null, and not what has got its number since, such as a socket."""
    number = ("__stdin__", "__stdout__").index(name)
    ends = os.pipe()
    monkeypatch.setattr(sys, name, None)
    with standard_descriptor(number, ends[0] if reused else None), debug_session(DEBUG, 1) as session:
        found = os.fstat(session.descriptors[number])
    for end in ends:
        os.close(end)
    assert stat.S_ISCHR(found.st_mode)
    assert found.st_rdev == os.stat(os.devnull).st_rdev


def test_the_terminal_is_as_before(terminal: int) -> None:
    """What rank 0 left of the terminal's modes is set back when it has ended, and at the end."""
    before = termios.tcgetattr(terminal)
    with standard_descriptor(0, terminal):
        with debug_session(DEBUG, 1) as session:
            tty.setraw(terminal)
            session.restore_terminal()
            assert termios.tcgetattr(terminal) == before
            tty.setraw(terminal)
        assert termios.tcgetattr(terminal) == before
        with contextlib.suppress(KeyError), debug_session(DEBUG, 1):
            tty.setraw(terminal)
            raise KeyError
    assert termios.tcgetattr(terminal) == before


def test_the_terminal_is_as_before_for_a_process_in_its_background() -> None:
    """A terminal stops processes in its background that set its modes; the launching process may be one."""
    pid, master = pty.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            before = termios.tcgetattr(0)
            session = DebugSession((0, 1, 2))
            tty.setraw(0)
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                session.restore_terminal()
                os._exit(0)
            ended = os.WIFEXITED(os.waitpid(child, os.WUNTRACED)[1])
            code = 0 if ended and termios.tcgetattr(0) == before else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(master)


def test_a_terminal_that_went_away() -> None:
    """Nothing can be set back then, and nothing fails."""
    master, slave = os.openpty()
    with standard_descriptor(0, slave), debug_session(DEBUG, 1) as session:
        os.close(slave)
        tty.setraw(master)
        os.close(master)
        session.restore_terminal()


# --- what else is on it


@pytest.mark.parametrize(
    ("debug", "tee_ranks", "prefixes"),
    [
        (False, (0,), [""]),
        (False, None, ["[job 3 rank 0] ", "[job 3 rank 1] "]),
        (True, (0,), []),
        (True, None, ["[job 3 rank 1] "]),
        (True, (1,), ["[job 3 rank 1] "]),
    ],
)
def test_which_logs_are_shown(
    tmp_path: Path, debug: bool, tee_ranks: tuple[int, ...] | None, prefixes: list[str]
) -> None:
    """A log that is shown alone has no prefix, unless rank 0 is on the terminal beside it: it shows itself."""
    settings = SimpleNamespace(debug=debug, tee_ranks=tee_ranks, progress=ShowProgress.plain)
    context: Any = SimpleNamespace(settings=settings, task="")
    recorder: Any = SimpleNamespace(record=lambda event: None)
    plan: Any = SimpleNamespace(number=3, world_size=2)
    tees = Progress(context, recorder, NOTHING, {3: []}, 1).tees(plan, JobPaths(str(tmp_path)))
    assert [tee._prefix for tee in tees] == prefixes


# --- the number of jobs


@pytest.mark.parametrize("jobs", [2, 5])
def test_several_jobs_are_refused(jobs: int) -> None:
    """One terminal is for one rank 0: the error says how many jobs there are, and what to do."""
    with pytest.raises(OptionError, match=f"there are {jobs} jobs.*lr=0.1 instead of lr=0.1,0.01"):
        debug_session(DEBUG, jobs).__enter__()
