"""The board, as a person at a terminal sees it: drawn once, whatever is printed, resized, stopped or killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len

from support.notes import state_of, write_talk
from support.runner import APPS, NOISE_S
from support.terminal import Person, at_terminal

if TYPE_CHECKING:
    from support.runner import Runner

TALK = APPS / "talk.py"
HEADER = "last line of rank 0"


def arguments(*overrides: str, at_once: int = 2, nproc: int = 2, app: Path = TALK) -> list[str]:
    return [
        str(app),
        "-m",
        "hydra/launcher=ddp_subprocess",
        f"hydra.launcher.nproc_per_node={nproc}",
        f"hydra.launcher.max_parallel_jobs={at_once}",
        "hydra.sweep.dir=sweep",
        *overrides,
    ]


@contextmanager
def watching(
    runner: Runner, *overrides: str, at_once: int = 2, nproc: int = 2, app: Path = TALK, **options: Any
) -> Iterator[Person]:
    with at_terminal(runner, arguments(*overrides, at_once=at_once, nproc=nproc, app=app), **options) as person:
        yield person


def go(runner: Runner) -> None:
    (runner.cwd / "go").touch()


def board_of(person: Person) -> list[str]:
    """Return the lines of the board, from its header or first row to the end of the screen."""
    lines = person.shown
    starts = [place for place, line in enumerate(lines) if HEADER in line or re.match(r"#\d+  ", line)]
    return lines[starts[0] :] if starts else []


@pytest.mark.sample
def test_what_a_person_sees_at_80_columns(runner: Runner) -> None:
    """A row a running job, the bar with all counts below, the end of each job above; at the end only the table."""
    with watching(runner, "x=1,2,3", "until=go", "fail_rank=null", "say=step") as person:
        person.wait_to_see(HEADER, "step 2 of job 0 rank 0", "step 2 of job 1 rank 0")
        header, first, second, summary = board_of(person)
        assert header.split() == ["job", "overrides", "ranks", "time", *HEADER.split()]
        assert re.fullmatch(r"  0  x=1 +2  0:\d\d  step 2 of job 0 rank 0", first)
        assert re.fullmatch(r"  1  x=2 +2  0:\d\d  step 2 of job 1 rank 0", second)
        assert summary.endswith(" 0/3 done, 2 running, 1 waiting")
        assert summary.startswith(">" * 13 + "·" * 7 + " ")
        go(runner)
        assert person.end() == 0
    text = "\n".join(person.all_lines)
    assert HEADER not in text and "waiting" not in text
    for number in range(3):
        end = f"#{number} : x={number + 1} until=go fail_rank=null say=step : completed after"
        assert end in text.replace("\n", "")
    # The path of the results may need several lines.
    rest = person.shown[[line.startswith("3 jobs: 3 completed, 0 failed") for line in person.shown].index(True) + 1 :]
    assert re.fullmatch(r"Results: .*/results\.csvafter the sweep", "".join(rest))


def test_what_a_person_sees_at_40_columns(runner: Runner) -> None:
    """Where there is no room for a table a job has two lines; nothing is broken into the next line."""
    long = "say='a line that is much longer than forty columns are'"
    with watching(runner, "x=1,2,3", "until=go", long, columns=40) as person:
        person.wait_until(
            lambda: sum(line.startswith("    a line that is") for line in person.shown) == 2, "to see both jobs' lines"
        )
        board = board_of(person)
        assert re.fullmatch(r"#0  x=1 +0:\d\d", board[0])
        assert re.fullmatch(r"    a line that is.*…", board[1])
        assert re.fullmatch(r"#1  x=2 +0:\d\d", board[2])
        assert set(board[4]) == {">", "·"}
        assert board[5] == "0/3 done, 2 running, 1 waiting"
        assert len(board) == 6
        go(runner)
        assert person.end() == 0


@pytest.mark.parametrize(("columns", "lines"), [(44, 24), (30, 12), (120, 40), (80, 8), (20, 5)])
def test_after_a_resize(runner: Runner, columns: int, lines: int) -> None:
    """The board fits the new size, and stands there once."""
    with watching(runner, "x=1,2,3", "until=go") as person:
        person.wait_to_see(HEADER, "line 2 of job 1 rank 0")
        person.resize(columns, lines)
        last = {44: "0/3 done, 2 running, 1 waiting", 30: "waiting", 20: "running, 1 waiting"}.get(columns)
        person.wait_until(
            lambda: person.shown[-1:] == [last] if last else person.sees(HEADER, "0/3 done, 2 running, 1 waiting"),
            "to see the board in the new size",
        )
        assert sum("0/3 done" in line for line in person.all_lines) == 1
        if lines > 8:
            assert "\n".join(person.shown).count("x=1") == 1
        go(runner)
        assert person.end() == 0
    assert "3 jobs: 3 completed, 0 failed" in "".join(person.all_lines)


def test_many_resizes(runner: Runner) -> None:
    """Who drags a window about finds one board in the end, and nothing left of the others."""
    with watching(runner, "x=1,2,3", "until=go") as person:
        person.wait_to_see(HEADER)
        for columns in (79, 60, 45, 33, 50, 90, 41, 80):
            person.resize(columns, 24)
            person.wait_until(lambda: sum("0/3 done" in line for line in person.shown) == 1, "one board")
        person.wait_to_see(HEADER)
        assert sum("0/3 done" in line for line in person.all_lines) == 1
        go(runner)
        assert person.end() == 0


def test_ctrl_c_leaves_the_terminal_clean(runner: Runner) -> None:
    """After Ctrl-C the board is gone, the cursor is at the start of a line below all, and the modes are back."""
    with watching(runner, "x=1,2,3", "until=never", "hydra.launcher.grace_period_s=5") as person:
        before = termios.tcgetattr(person.child.child_fd)
        person.wait_to_see(HEADER)
        person.child.sendintr()
        assert person.end() == 130
        assert termios.tcgetattr(person.child.child_fd) == before
    text = "\n".join(person.all_lines)
    assert HEADER not in text and "0/3 done" not in text and "^C" not in text
    assert "Stopped by SIGINT: 3 of 3 jobs did not complete" in text
    assert person.screen.cursor.x == 0 and not person.screen.cursor.hidden
    assert person.screen.cursor.y == len(person.shown)
    runner.assert_nothing_left()


def test_a_kill_leaves_a_usable_terminal(runner: Runner) -> None:
    """Whoever kills the launching process finds the cursor visible, at the start of a line, below the board."""
    with watching(runner, "x=1,2", "until=never") as person:
        person.wait_to_see(HEADER)
        person.child.kill(signal.SIGKILL)
        assert person.end() == 137
    assert not person.screen.cursor.hidden
    assert person.screen.cursor.x == 0 and person.screen.cursor.y == len(person.shown)
    runner.assert_nothing_left()


def test_no_color(runner: Runner) -> None:
    """With NO_COLOR nothing has colours or other attributes; without it, something has."""
    colors = re.compile(rb"\x1b\[[0-9;]*m")
    for variables, colored in (({"NO_COLOR": "1"}, False), ({}, True)):
        with watching(runner, "x=1,2", env=variables) as person:
            assert person.end() == 0
        assert HEADER.encode() in person.raw
        assert bool(colors.search(person.raw)) == colored


def test_the_lines_of_rank_0_above_the_board(runner: Runner) -> None:
    """When one job runs at a time, what rank 0 prints scrolls by above the board, each line once and whole."""
    with watching(runner, "x=1,2", "lines=40", "until=go", at_once=1) as person:
        lines = [f"line {number} of job 0 rank 0" for number in range(40)]
        person.wait_until(lambda: [line for line in person.all_lines if line.startswith("line ")] == lines, "all lines")
        person.wait_until(lambda: len(board_of(person)) == 3, "the board")
        person.wait_until(lambda: board_of(person)[1].endswith("line 39 of job 0 rank 0"), "the last line")
        assert board_of(person)[-1].endswith("0/2 done, 1 running, 1 waiting")
        go(runner)
        assert person.end() == 0
    assert [line for line in person.all_lines if line.startswith("line ")] == [
        f"line {number} of job {job} rank 0" for job in (0, 1) for number in range(40)
    ]


@pytest.mark.sample
def test_several_streams_have_prefixes(runner: Runner) -> None:
    """With `tee_ranks=all` each line on the terminal is one line of one rank, with its job and rank before it."""
    with watching(runner, "x=1,2", "lines=200", "hydra.launcher.tee_ranks=all", lines=50, columns=100) as person:
        assert person.end() == 0
    lines = [line for line in person.all_lines if "line " in line and HEADER not in line]
    expected = {
        f"[job {job} rank {rank}] line {n} of job {job} rank {rank}"
        for job in (0, 1)
        for rank in (0, 1)
        for n in range(200)
    }
    assert set(lines) == expected and len(lines) == len(expected)


def test_a_bar_that_is_redrawn(runner: Runner) -> None:
    """Of a bar that is redrawn by carriage returns the last state is shown, once, above the board."""
    with watching(runner, "x=1", "say='1%\r50%\r100%'", "lines=2", at_once=1) as person:
        assert person.end() == 0
    assert [line for line in person.all_lines if "%" in line and "completed" not in line] == [
        f"100% {number} of job 0 rank 0" for number in range(2)
    ]


LOUD = """
import hashlib, os, sys
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    sha = hashlib.sha256()
    with open(1, "wb", buffering=0, closefd=False) as out:
        for number in range(1600):
            piece = (f"{number} rank {os.environ['RANK']} ".encode() * 10_000)[:65_536]
            sha.update(piece)
            while piece:
                piece = piece[out.write(piece) :]
    return sha.hexdigest() if os.environ["RANK"] == "0" else None

if __name__ == "__main__":
    main()
"""


def test_every_byte_is_in_the_files(runner: Runner) -> None:
    """Of 100 MB that each of two ranks prints the logs have every byte, whatever the terminal shows."""
    app = runner.cwd / "app.py"
    app.write_text(LOUD)
    options = ("+x=1", "hydra.launcher.tee_ranks=all", "hydra.output_subdir=null")
    with watching(runner, *options, at_once=1, app=app, columns=100) as person:
        assert person.end(timeout_s=120) == 0
    for rank in (0, 1):
        sha, size = hashlib.sha256(), 0
        with (runner.cwd / "sweep" / "0" / ".ddp" / f"rank_{rank}.log").open("rb") as log:
            for number in range(1600):
                piece = log.read(65_536)
                assert piece == (f"{number} rank {rank} ".encode() * 10_000)[:65_536]
                sha.update(piece)
                size += len(piece)
            assert log.read() == b"" and size == 1600 * 65_536
        if rank == 0:
            assert sha.hexdigest() in (runner.cwd / "sweep" / ".ddp" / "results.csv").read_text()


def test_logging_after_the_sweep(runner: Runner) -> None:
    """What the program logs when the sweep is over appears once, and standard output is what it was."""
    program = (
        "before = sys.stdout, sys.stderr\n"
        "main()\n"
        "logging.getLogger('mine').info('all is over')\n"
        "assert before == (sys.stdout, sys.stderr)\n"
        "print('as it was')"
    )
    app = write_talk(runner, "import logging", program=program)
    with watching(runner, "x=1,2", app=app, columns=100) as person:
        assert person.end() == 0
    assert sum("all is over" in line for line in person.all_lines) == 1
    assert person.shown[-1] == "as it was"


def test_wide_characters(runner: Runner) -> None:
    """Characters that take two columns break no line of the board, and move none of its columns."""
    with watching(
        runner, "+name='数字の名前','名前'", "say='数字数字数字数字数字数字数字数字'", "until=go", columns=72
    ) as person:
        person.wait_to_see("0/2 done", "数")
        # A wide character is followed by an empty cell.
        screen = [line.replace("\0", "") for line in person.shown]
        rows = [line for line in screen if re.match(r"  [01]  ", line)]
        assert len(rows) == 2
        assert all(cell_len(line) <= 72 for line in screen)
        go(runner)
        assert person.end() == 0


@pytest.mark.sample
def test_output_that_is_no_terminal_has_no_escapes(runner: Runner) -> None:
    """With standard output in a file the board is on the terminal, and the file has lines alone."""
    command = " ".join([sys.executable, *arguments("x=1,2", "until=go", at_once=1)])
    with at_terminal(runner, ["-c", f"import os; os.system({command + ' > out.txt'!r})"]) as person:
        person.wait_to_see(HEADER)
        go(runner)
        person.end()
    text = (runner.cwd / "out.txt").read_text()
    assert "\x1b" not in text and HEADER not in text
    assert "line 0 of job 0 rank 0\n" in text and "2 jobs: 2 completed, 0 failed" in text


CHATTING = r"""
def chat():
    # While logging is configured, a line may come twice or never.
    while not os.path.exists("sweep/0/.ddp/rank_0.log"):
        time.sleep(0.01)
    for n in range(50):
        print(f"print {n} " + "p" * 30)
        sys.stderr.write(f"error {n} " + "e" * 30 + "\n")
        logging.getLogger("mine").warning("log %d", n)
        time.sleep(0.01)
if "RANK" not in os.environ:
    threading.Thread(target=chat, daemon=True).start()
main()
"""


def test_what_the_program_prints_comes_above(runner: Runner) -> None:
    """Prints, warnings and log lines of the launching process, also those of threads, stay whole beside the board."""
    app = write_talk(runner, "import logging, threading, time", program=CHATTING)
    with watching(runner, "x=1,2", "until=go", app=app, columns=100) as person:
        person.wait_to_see("log 49", HEADER)
        assert sum(HEADER in line for line in person.all_lines) == 1
        for number in range(50):
            assert person.all_lines.count(f"print {number} " + "p" * 30) == 1
            assert person.all_lines.count(f"error {number} " + "e" * 30) == 1
            assert sum(line.endswith(f"log {number}") for line in person.all_lines) == 1
        go(runner)
        assert person.end() == 0


def test_stopped_and_continued(runner: Runner) -> None:
    """After a stop (Ctrl-Z) what a shell has written stays, and the board is drawn anew below it."""
    with watching(runner, "x=1,2", "until=go") as person:
        person.wait_to_see(HEADER)
        os.kill(person.child.pid, signal.SIGSTOP)
        person.wait_until(lambda: state_of(person.child.pid)[0] == "T", "to be stopped")
        person.look()
        person.feed(b"[1]+  Stopped    python train.py\r\n$ fg\r\npython train.py\r\n")
        os.kill(person.child.pid, signal.SIGCONT)
        person.wait_until(lambda: sum("0/2 done" in line for line in person.shown) == 2, "a second board")
        go(runner)
        assert person.end() == 0
    assert "$ fg" in person.all_lines


def test_in_the_background_nothing_is_drawn(runner: Runner) -> None:
    """With `&` the shell has the terminal, so there is no board; brought to the foreground there is one."""
    command = " ".join(["python", *arguments("x=1,2", "until=go")])
    shell = ["-c", "import os; os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with at_terminal(runner, shell, columns=100, env={"PS1": "$ ", "PATH": path}) as person:
        person.wait_to_see("$")
        person.child.sendline(f"{command} &")
        person.wait_to_see("Launching 2 jobs")
        runner.wait_until((runner.cwd / "sweep/1/.ddp/rank_0.log").exists)
        person.child.sendline("echo still here $((40 + 2))")
        person.wait_to_see("still here 42")
        assert HEADER.encode() not in person.raw
        person.child.sendline("fg")
        person.wait_to_see(HEADER)
        go(runner)
        person.wait_to_see("2 jobs: 2 completed")
        person.child.sendline("exit")
        person.end()


@pytest.mark.parametrize("style", ["plain", "none"])
def test_no_board_where_none_is_wanted(runner: Runner, style: str) -> None:
    """`progress=plain` and `none` draw nothing on a terminal either."""
    with watching(runner, "x=1,2", f"hydra.launcher.progress={style}", columns=100) as person:
        assert person.end() == 0
    assert b"\x1b[" not in person.raw
    lines = [line for line in person.all_lines if "#0 : x=1" in line or "#1 : x=2" in line]
    assert len(lines) == (4 if style == "plain" else 0)


def test_without_a_terminal(runner: Runner) -> None:
    """Without one there is a line when a job starts and one when it ends, in the basic launcher's form."""
    ran = runner.python(*arguments("x=1,2", at_once=1))
    assert ran.returncode == 0
    lines = [line.partition("[HYDRA] ")[2] for line in ran.stdout.splitlines() if "[HYDRA] \t#" in line]
    assert [re.sub(r"after [\d.]+ s", "after some time", line) for line in lines] == [
        "\t#0 : x=1",
        "\t#0 : x=1 : completed after some time: 0.5",
        "\t#1 : x=2",
        "\t#1 : x=2 : completed after some time: 0.5",
    ]
    assert "\x1b" not in ran.output


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_terminals_that_cannot_move_their_cursor(runner: Runner, terminal: str) -> None:
    """On a terminal that says it can do nothing there are plain lines."""
    with watching(runner, "x=1", env={"TERM": terminal}, columns=100) as person:
        assert person.end() == 0
    assert b"\x1b[" not in person.raw
    assert any(line.endswith("#0 : x=1") for line in person.all_lines)


# --- programs that change their streams


COPIES = """
import threading, time

class Copy:
    def __init__(self, stream):
        self.stream = stream
        self.file = open("copy.txt", "a", buffering=1)
    def write(self, text):
        self.file.write(text)
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()

class Delegating(Copy):
    def __getattr__(self, name):
        return getattr(self.stream, name)

def patched(text, write=sys.stdout.write):
    with open("copy.txt", "a") as file:
        file.write(text)
    return write(text)

def chat():
    for n in range(60):
        print("said", n)
        time.sleep(0.02)
"""
COPYING = """
if "RANK" not in os.environ:
    {change}
    threading.Thread(target=chat, daemon=True).start()
main()
"""
CHANGES = {
    "copied": "sys.stdout = Copy(sys.stdout)",
    "delegating": "sys.stdout = Delegating(sys.stdout)",
    "patched": "sys.stdout.write = patched",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_that_copies_its_output(runner: Runner, change: str) -> None:
    """Who puts something of his own before the terminal gets every line, and so does the terminal, beside one board."""
    app = write_talk(runner, COPIES, program=COPYING.format(change=CHANGES[change]))
    with watching(runner, "x=1,2", "until=go", app=app, columns=100) as person:
        person.wait_to_see("said 59", HEADER)
        assert sum(HEADER in line for line in person.all_lines) == 1
        go(runner)
        assert person.end() == 0
    copied = (runner.cwd / "copy.txt").read_text().splitlines()
    for number in range(60):
        assert person.all_lines.count(f"said {number}") == 1
        assert copied.count(f"said {number}") == 1
    for number in range(2):
        assert sum(f"#{number} : x={number + 1} until=go : completed" in line for line in copied) == 1
    assert not any(HEADER in line for line in [*copied, *person.all_lines])


LATE_HANDLER = """
import logging
from omegaconf import OmegaConf

def resolve(x):
    if not logging.getLogger("late").handlers:
        logging.getLogger("late").addHandler(logging.StreamHandler())
    logging.getLogger("late").warning("late %s", x)
    return x

OmegaConf.register_new_resolver("late", resolve, use_cache=True)
"""


def test_batches_and_handlers_made_meanwhile(runner: Runner) -> None:
    """Over many batches one board at a time is drawn, whoever holds a stream from before; one table shows all jobs."""
    app = write_talk(runner, LATE_HANDLER)
    overrides = ("x=1,2,3,4", "+y='${late:${x}}'", "hydra.sweeper.max_batch_size=2", "every_s=0.2")
    with watching(runner, *overrides, app=app, columns=100, env={"PYTHONWARNINGS": "ignore"}) as person:
        assert person.end() == 0
    lines = person.all_lines
    assert not any(HEADER in line for line in lines)
    for number in range(1, 5):
        assert f"late {number}" in lines
    assert sum("4 jobs: 4 completed, 0 failed" in line for line in lines) == 1
    assert sum(line.startswith("job  overrides") for line in lines) == 1


def test_a_very_long_line(runner: Runner) -> None:
    """A rank that prints without ever ending its line costs little, and its job ends with it."""
    say = "'" + "x" * 200_000 + "'"
    app = runner.cwd / "app.py"
    app.write_text(
        "import sys\nimport hydra\n"
        "@hydra.main(version_base=None, config_path=None)\n"
        "def main(cfg):\n"
        f"    for _ in range(100):\n        sys.stdout.write({say})\n        sys.stdout.flush()\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    with watching(runner, "+x=1", at_once=1, nproc=1, app=app, columns=100) as person:
        pid = person.child.pid
        seconds = 0.0
        while person.child.isalive():
            person.look()
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            time.sleep(0.02)
        assert person.end() == 0
    assert seconds < 10 + NOISE_S
    assert (runner.cwd / "sweep/0/.ddp/rank_0.log").stat().st_size == 20_000_000
    assert any("MB left out" in line for line in person.all_lines)


def test_a_terminal_that_nobody_reads(runner: Runner) -> None:
    """While the terminal takes nothing (Ctrl-S, a hung connection) jobs start and end, and one SIGTERM works."""
    with watching(runner, "x=range(6)", "lines=300", "hydra.launcher.tee_ranks=all") as person:
        # Nobody looks from here on: the terminal is full soon.
        runner.wait_until((runner.cwd / "sweep/5/.ddp/outcome_0.pkl").exists)
        assert person.end() == 0
    with watching(runner, "x=range(6)", "lines=3000", "until=never", "hydra.launcher.tee_ranks=all") as person:
        runner.wait_until((runner.cwd / "sweep/1/.ddp/rank_0.log").exists)
        # The terminal is full by then.
        time.sleep(1)
        person.child.kill(signal.SIGTERM)
        runner.wait_until(lambda: state_of(person.child.pid)[0] in ("", "Z"), what="the end")
    runner.assert_nothing_left()


TEE = """
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()
"""
EXTRAS = {
    "nothing": "",
    "isatty": "    def isatty(self):\n        return True",
    "fileno": "    def isatty(self):\n        return True\n    def fileno(self):\n        return self.stream.fileno()",
    "no encoding": "    encoding = None\n    def fileno(self):\n        return self.stream.fileno()",
    "not implemented": "    def fileno(self):\n        raise NotImplementedError",
    "none": "    def fileno(self):\n        return None",
}


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_streams_that_lack_something(runner: Runner, name: str, extras: str) -> None:
    """A program's own stream need not have more than `write` and `flush`, on a terminal and into a pipe."""
    program = f"if 'RANK' not in os.environ:\n    sys.{name} = Tee(sys.{name})\nmain()"
    argv = arguments("x=1,2", app=write_talk(runner, TEE + EXTRAS[extras], program=program))
    with at_terminal(runner, argv, columns=100) as person:
        assert person.end() == 0
    assert any("2 jobs: 2 completed, 0 failed" in line for line in person.all_lines)
    ran = runner.python(*argv)
    assert ran.returncode == 0 and "2 jobs: 2 completed, 0 failed" in ran.stdout
