"""Where the launching process's own words go when no board is shown: in order, whole, and waiting for no reader."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from support.notes import seconds_until
from support.runner import APPS, NOISE_S, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Runner

# Bytes from which on a pipe that takes 4096 is as good as full.
FULL = 3000
GRACE_S = 3
# As of _terminal.py, for logs, what waits of them, standard output and standard error, one after the other.
STOPPED_S = 4 * 2.0

APP = """
import logging, os, sys, threading, time
sys.path.insert(0, {apps!r})
import hydra, talk
from pathlib import Path

{before}

@hydra.main(version_base=None, config_path=None, config_name="talk")
def main(cfg):
{body}

if __name__ == "__main__":
{start}
    main()
"""
LAUNCHING = "    if 'RANK' not in os.environ:\n        threading.Thread(target=chat, daemon=True).start()"


def write_app(
    runner: Runner, *, before: str = "", body: str = "    return talk.main.__wrapped__(cfg)", start: str = ""
) -> Path:
    app = runner.cwd / "app.py"
    app.write_text(APP.format(apps=str(APPS), before=before, body=body, start=start))
    return app


def arguments(*overrides: str, nproc: int = 2) -> list[str]:
    return [
        "-m",
        "hydra/launcher=ddp_subprocess",
        f"hydra.launcher.nproc_per_node={nproc}",
        f"hydra.launcher.grace_period_s={GRACE_S}",
        "hydra.sweep.dir=sweep",
        *overrides,
    ]


@contextmanager
def unread(
    runner: Runner, app: Path, *overrides: str, together: bool = False, nproc: int = 2
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run a sweep into pipes that hold little, and that nobody reads."""
    process = subprocess.Popen(
        [sys.executable, str(app), *arguments(*overrides, nproc=nproc)],
        cwd=runner.cwd,
        env=runner.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
    )
    assert process.stdout is not None
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with process:
            try:
                yield process, process.stdout
            finally:
                process.kill()
    finally:
        runner.wait_until(lambda: not runner.alive(), timeout_s=GRACE_S + 5, what="the end of all ranks")


def waiting_bytes(pipe: IO[bytes]) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])


# --- nobody reads


@pytest.mark.parametrize("together", [True, False], ids=["one pipe", "two pipes"])
@pytest.mark.parametrize("style", ["plain", "none"])
def test_one_sigterm_ends_a_sweep_that_nobody_reads(runner: Runner, style: str, together: bool) -> None:
    """With a full pipe the launching process goes on looking at signals: one SIGTERM ends the ranks and itself."""
    options = ("x=1,2", "lines=3000", "until=never", "hydra.launcher.tee_ranks=all", f"hydra.launcher.progress={style}")
    app = write_app(runner)
    with unread(runner, app, *options, together=together) as (process, pipe):
        runner.wait_until(lambda: waiting_bytes(pipe) >= FULL, what="a full pipe")
        runner.wait_until((runner.cwd / "sweep/0/.ddp/rank_1.log").exists, what="rank 1")
        process.send_signal(signal.SIGTERM)
        seconds = seconds_until(lambda: process.poll() is not None, at_most_s=GRACE_S + STOPPED_S + NOISE_S + 5)
        assert process.poll() == 128 + signal.SIGTERM, f"after {seconds:.1f} s"


CHAT = """
def chat():
    for n in range(1000):
        sys.{name}.write(f"said {{n}} " + "s" * 40 + "\\n")
        logging.getLogger("mine").warning("log %d", n)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_callback_that_says_much_holds_up_nothing(runner: Runner, name: str) -> None:
    """What the program prints and logs between two jobs waits for the reader; signals and jobs do not."""
    before = CHAT.format(name=name) + (
        "from omegaconf import OmegaConf\n"
        "def resolve(x):\n"
        "    if 'RANK' not in os.environ and x == 2:\n"
        "        chat()\n"
        "        Path('said').touch()\n"
        "    return x\n"
        "OmegaConf.register_new_resolver('said', resolve, use_cache=True)\n"
    )
    app = write_app(runner, before=before)
    options = ("x=1,2,3", "+y='${said:${x}}'", "until=never", "hydra.launcher.progress=plain")
    with unread(runner, app, *options) as (process, _):
        runner.wait_until((runner.cwd / "said").exists, what="all to be said")
        process.send_signal(signal.SIGTERM)
        seconds_until(lambda: process.poll() is not None, at_most_s=GRACE_S + STOPPED_S + NOISE_S + 5)
        assert process.poll() == 128 + signal.SIGTERM


def test_a_sweep_that_nobody_reads_ends_by_itself(runner: Runner) -> None:
    """When all jobs are done what nobody reads is given up after a while, and the exit code tells as ever."""
    before = "import hydra_plugins.hydra_ddp_subprocess_launcher.display.terminal as terminal\n"
    before += "terminal._PATIENCE_S = 1.0\n"
    app = write_app(runner, before=before)
    # The table has more than there is room for in a pipe that is nearly full.
    options = ("x=1,2,3", f"+long={'l' * 600}", "lines=500", "hydra.launcher.progress=plain")
    with unread(runner, app, *options) as (process, _):
        seconds_until(lambda: process.poll() is not None, at_most_s=40)
        assert process.poll() == 0
    assert (runner.cwd / "sweep/.ddp/results.csv").read_text().count("COMPLETED") == 3


def test_one_sigterm_ends_many_batches_that_nobody_reads(runner: Runner) -> None:
    """The table of a sweep in several batches, which comes when the process ends, waits for nobody either."""
    long = f"+long={'l' * 600}"
    options = (
        "x=1,2,3",
        long,
        "lines=500",
        "until=never",
        "hydra.sweeper.max_batch_size=2",
        "hydra.launcher.progress=plain",
    )
    app = write_app(runner)
    with unread(runner, app, *options, together=True) as (process, pipe):
        runner.wait_until(lambda: waiting_bytes(pipe) >= FULL, what="a full pipe")
        process.send_signal(signal.SIGTERM)
        seconds_until(lambda: process.poll() is not None, at_most_s=GRACE_S + 2 * STOPPED_S + NOISE_S + 5)
        assert process.poll() == 128 + signal.SIGTERM


# --- somebody reads slowly


@pytest.mark.sample
def test_a_slow_reader_gets_everything_in_order(runner: Runner) -> None:
    """Who reads slowly gets each line of the ranks and of the launching process, whole, and in the order of events."""
    app = write_app(runner)
    options = ("x=1,2", "lines=1500", "hydra.launcher.progress=plain")
    got = b""
    with unread(runner, app, *options, together=True) as (process, pipe):
        while data := os.read(pipe.fileno(), 2000):
            got += data
            time.sleep(0.005)
        assert process.wait(PATIENCE_S) == 0
    lines = got.decode().splitlines()
    marks = []
    for job in (0, 1):
        ranks = [line for line in lines if line.endswith(f" of job {job} rank 0")]
        assert ranks == [f"line {number} of job {job} rank 0" for number in range(1500)]
        starts = [place for place, line in enumerate(lines) if f"#{job} : x={job + 1} lines=1500" in line]
        assert len(starts) == 2
        marks += [starts[0], lines.index(ranks[0]), lines.index(ranks[-1]), starts[1]]
    assert marks == sorted(marks)
    assert marks[-1] < lines.index("2 jobs: 2 completed, 0 failed")


# --- whole lines


HALVES = """
def chat():
    # When the launching process has shown the first half.
    while not os.path.exists("begun"):
        time.sleep(0.02)
    logging.getLogger("mine").warning("comes between")
    print("and this")
    Path("between").touch()

def halves():
    if os.environ["RANK"] != "0":
        return
    print("half ", end="", flush=True)
    while not os.path.exists(os.path.join(HERE, "between")):
        time.sleep(0.02)
    print("a line", flush=True)

HERE = os.getcwd()
"""


@pytest.mark.parametrize("into", ["one pipe", "two pipes", "a file", "two files"])
def test_no_line_is_torn(runner: Runner, into: str) -> None:
    """A rank's line that is half written when the launching process logs is whole in the end, and so is the other."""
    app = write_app(runner, before=HALVES, body="    halves()", start=LAUNCHING)
    redirection = {"one pipe": "2>&1", "two pipes": "", "a file": "> out 2>&1", "two files": "> out 2> err"}[into]
    argv = [sys.executable, str(app), *arguments("x=1", "hydra.launcher.progress=plain")]
    with runner.start("sh", "-c", f"exec {shlex.join(argv)} {redirection}") as process:
        assert process.stdout is not None
        got = b""
        if "file" in into:
            out = runner.cwd / "out"
            runner.wait_until(lambda: out.exists() and "half " in out.read_text(), what="the first half")
        while "pipe" in into and b"half " not in got:
            got += os.read(process.stdout.fileno(), 65536)
        (runner.cwd / "begun").touch()
        rest, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    lines = ((runner.cwd / "out").read_text() if "file" in into else got.decode() + rest).splitlines()
    assert lines.count("half a line") == 1
    assert lines.count("and this") == 1
    assert sum(line.startswith("[") and line.endswith("comes between") for line in lines) == 1


# --- what is not needed


def test_rich_is_not_loaded_where_no_board_is_shown(runner: Runner) -> None:
    """Without a board, rich is not loaded while jobs run, nor by a dry run at all."""
    before = (
        "from omegaconf import OmegaConf\n"
        "def loaded(x):\n"
        "    if 'RANK' not in os.environ:\n"
        "        Path(f'loaded_{x}').write_text(str('rich' in sys.modules))\n"
        "    return x\n"
        "OmegaConf.register_new_resolver('loaded', loaded, use_cache=True)\n"
    )
    app = write_app(runner, before=before)
    for options in (("hydra.launcher.progress=plain",), ("hydra.launcher.progress=none",), ("+z=1",)):
        dry = ["hydra.launcher.dry_run=true"] if options == ("+z=1",) else []
        ran = runner.python(app, *arguments("x=1,2", "+y='${loaded:${x}}'", *options, *dry, nproc=1))
        assert ran.returncode == 0, ran.output
        assert [(runner.cwd / f"loaded_{x}").read_text() for x in (1, 2)] == ["False", "False"]
