"""What others put into every process, such as a thread, and processes of a job that are not its ranks."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.runner import Runner

# A library that starts a thread when it is loaded, as an allocator with a background thread does.
THREAD = """
#include <pthread.h>
#include <unistd.h>
static void *idle(void *nothing) { for (;;) sleep(3600); return 0; }
__attribute__((constructor)) static void start(void) { pthread_t thread; pthread_create(&thread, 0, idle, 0); }
"""
RETURNS = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return cfg.x

main()
"""


def write(runner: Runner, text: str) -> Path:
    app = runner.cwd / "app.py"
    app.write_text(text)
    return app


def results(runner: Runner) -> dict[int, tuple[bool, object]]:
    """Whether each job of the sweep completed, and its value."""
    journal = (runner.cwd / "sweep" / ".ddp" / "journal.jsonl").read_text().splitlines()
    ended = [event for event in map(json.loads, journal) if event["event"] == "JobEnded"]
    return {event["job"]: (event["completed"], event["value"]) for event in ended}


@pytest.fixture(scope="module")
def threaded_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library that has a thread of its own."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "thread.c").write_text(THREAD)
    library = folder / "libthread.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "thread.c", "-lpthread"], check=True)
    return library


@pytest.mark.parametrize("preload", ["null", "[json]"])
def test_a_library_with_a_thread(runner: Runner, threaded_library: Path, preload: str) -> None:
    """A thread in every process, and a library that cannot be loaded, which the linker complains of, change nothing."""
    env = {"LD_PRELOAD": f"{threaded_library}:/no/such/library.so"}
    ran = runner.sweep(write(runner, RETURNS), "+x=1,2", f"hydra.launcher.preload={preload}", env=env)
    assert ran.returncode == 0, ran.output
    assert results(runner) == {0: (True, 1), 1: (True, 2)}


def test_a_debugger_that_injects_itself_into_every_process(runner: Runner) -> None:
    """Under debugpy, which has threads in spawner, keepers and ranks, a sweep runs as without it."""
    pytest.importorskip("debugpy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ran = runner.python(
        "-Xfrozen_modules=off",
        *("-m", "debugpy", "--listen", f"127.0.0.1:{port}"),
        *(write(runner, RETURNS), "-m", "hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2"),
        *(f"hydra.sweep.dir={runner.cwd / 'sweep'}", "+x=1"),
    )
    assert ran.returncode == 0, ran.output
    assert results(runner) == {0: (True, 1)}


# A process that the rank starts comes out of the job's function, or runs the program again, before the rank returns.
FORKS = """
import atexit, multiprocessing, os, subprocess, sys, threading
import hydra

def fork():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return child == 0

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    if cfg.how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=sys.exit)
        process.start()
        process.join()
    elif cfg.how == "thread":
        thread = threading.Thread(target=lambda: fork() and sys.exit(0))
        thread.start()
        thread.join()
    elif cfg.how == "same command":
        assert subprocess.run([sys.executable, *sys.orig_argv[1:]]).returncode != 0
    elif fork():
        if cfg.how == "two":
            fork()
        if cfg.how == "raise":
            raise ValueError("in a fork")
        if cfg.how == "bad exit":
            sys.exit(1)
        if cfg.how == "exit":
            atexit.register(print, "fork ends")
            sys.exit(0)
        return "fork"
    return "rank"

main()
"""
RECORDER = """
from hydra.experimental.callback import Callback

class Recorder(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        with open("ended", "a") as ended:
            ended.write(f"{config.how}: {job_return.status.name}, {job_return._return_value}\\n")
"""
HOW = ["return", "two", "raise", "exit", "bad exit", "thread", "multiprocessing", "same command"]


@pytest.mark.parametrize("options", [["preload=null"], ["preload=[json]"]], ids=["new", "forked"])
def test_only_the_rank_speaks_for_its_job(runner: Runner, options: list[str]) -> None:
    """What a process that the rank forked or started does in the job's function, or after it, is not the job's end."""
    (runner.cwd / "recorder.py").write_text(RECORDER)
    ran = runner.sweep(
        write(runner, FORKS),
        f"+how={','.join(f'{chr(39)}{how}{chr(39)}' for how in HOW)}",
        "+hydra.callbacks.recorder._target_=recorder.Recorder",
        "hydra.launcher.max_parallel_jobs=4",
        *(f"hydra.launcher.{option}" for option in options),
        nproc=1,
    )
    assert ran.returncode == 0, ran.output
    assert results(runner) == dict.fromkeys(range(len(HOW)), (True, "rank"))
    assert sorted((runner.cwd / "ended").read_text().splitlines()) == sorted(f"{how}: COMPLETED, rank" for how in HOW)
    folders = [runner.cwd / "sweep" / str(job) / ".ddp" for job in range(len(HOW))]
    assert not [file for folder in folders for file in folder.rglob("*") if file.name.startswith(("failure", "error"))]
    # What it says is not lost.
    assert "ValueError: in a fork" in (folders[HOW.index("raise")] / "rank_0.log").read_text()
    assert "fork ends" in (folders[HOW.index("exit")] / "rank_0.log").read_text()


def test_a_fork_in_a_job_that_is_entered_by_its_function(runner: Runner) -> None:
    """Where a rank runs the pickled function, a fork of it does not speak for it either."""
    launcher = ["hydra.launcher.entry=function"]
    ran = runner.sweep(write(runner, FORKS), "+how=exit,raise", *launcher, nproc=2)
    assert ran.returncode == 0, ran.output
    assert results(runner) == {0: (True, "rank"), 1: (True, "rank")}
