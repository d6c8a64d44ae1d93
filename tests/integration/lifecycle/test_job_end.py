"""`on_job_end` comes once a job, whatever ends the job, and with the state that `on_job_start` has left."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.notes import finish

if TYPE_CHECKING:
    from support.runner import Runner

RECORDER = """
import json, os, threading, time
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

class Recorder(Callback):
    def __init__(self, locked=False):
        self.seen, self.locked = [], locked
    def note(self, event, config, status=None):
        num = HydraConfig.get().job.num
        self.seen.append(event)
        line = dict(event=event, how=config.how, status=status, rank=os.environ.get("RANK"), num=num, seen=self.seen)
        with open(os.path.join(config.folder, "callbacks"), "a") as file:
            file.write(json.dumps(line) + "\\n")
    def on_job_start(self, config, **kwargs):
        self.note("start", config)
        if self.locked:
            self.lock = threading.Lock()
    def on_job_end(self, config, job_return, **kwargs):
        self.note("end", config, job_return.status.name)

class Broken(Callback):
    def on_job_start(self, **kwargs):
        raise ValueError("broken start")
    on_job_end = on_job_start
"""
APP = """
import os, signal, sys, time
from pathlib import Path
import hydra

rank = int(os.environ.get("RANK", -1))
if rank >= 0 and "how=early" in " ".join(sys.argv):
    signal.pause() if rank == 0 else sys.exit(3)

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    Path(cfg.folder, f"up_{cfg.how}_{rank}").touch()
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    how = cfg.how.split("_", 1)[1] if cfg.how.startswith("once_") else cfg.how
    if how == "good" or (how != cfg.how and again):
        return rank
    if how == "exits":
        sys.exit(0)
    while not all(Path(cfg.folder, f"up_{cfg.how}_{other}").exists() for other in (0, 1)):
        time.sleep(0.02)
    if (how == "other") == (rank == 0) or how == "waits":
        signal.pause()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "left":
        os._exit(0)
    raise ValueError("broken")

main()
"""


def arguments(runner: Runner, *overrides: str) -> list[str | Path]:
    (runner.cwd / "recorder.py").write_text(RECORDER)
    (runner.cwd / "app.py").write_text(APP)
    launcher = ["nproc_per_node=2", "max_parallel_jobs=4", "grace_period_s=1"]
    return [
        runner.cwd / "app.py",
        *("-m", "hydra/launcher=ddp_subprocess", f"hydra.sweep.dir={runner.cwd / 'sweep'}"),
        *(f"hydra.launcher.{option}" for option in launcher),
        "+hydra.callbacks.recorder._target_=recorder.Recorder",
        f"+folder={runner.cwd}",
        *overrides,
    ]


def called(runner: Runner, event: str) -> dict[str, list[dict[str, Any]]]:
    """The calls of one event, by job, in the order of the jobs."""
    found: dict[str, list[dict[str, Any]]] = {}
    lines = [json.loads(line) for line in (runner.cwd / "callbacks").read_text().splitlines()]
    for line in sorted(lines, key=lambda line: int(line["num"])):
        if line["event"] == event:
            found.setdefault(line["how"], []).append(line)
    return found


def statuses(runner: Runner) -> dict[str, list[str]]:
    return {how: [call["status"] for call in calls] for how, calls in called(runner, "end").items()}


def test_whatever_ends_a_job(runner: Runner) -> None:
    """Rank 0 that waits for a rank which failed, is killed, leaves, raises, exits, or has not got as far as its job."""
    hows = ["good", "other", "killed", "left", "raises", "exits", "early"]
    ran = runner.python(*arguments(runner, f"+how={','.join(hows)}"))
    assert ran.returncode != 0
    assert list(called(runner, "end")) == hows
    assert statuses(runner) == {how: ["COMPLETED" if how in ("good", "exits") else "FAILED"] for how in hows}
    for how, (call,) in called(runner, "end").items():
        assert call["num"] == hows.index(how)
        assert call["seen"] == ([] if how == "early" else ["start"]) + ["end"]
        assert (call["rank"] == "0") == (how in ("good", "raises"))


def test_jobs_that_are_started_again(runner: Runner) -> None:
    """`on_job_start` comes with each start, `on_job_end` once the job is over for good."""
    hows = ["once_raises", "once_other", "raises"]
    runner.python(*arguments(runner, f"+how={','.join(hows)}", "hydra.launcher.max_restarts=1"))
    assert {how: len(calls) for how, calls in called(runner, "start").items()} == dict.fromkeys(hows, 2)
    assert statuses(runner) == {"once_raises": ["COMPLETED"], "once_other": ["COMPLETED"], "raises": ["FAILED"]}


def test_a_sweep_that_is_stopped(runner: Runner) -> None:
    """Ctrl-C ends the job that runs, and with it comes `on_job_end`; jobs that were not started have none."""
    process = runner.start(sys.executable, *arguments(runner, "+how=waits,good", "hydra.launcher.max_parallel_jobs=1"))
    runner.wait_until(lambda: all((runner.cwd / f"up_waits_{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGINT)
    finish(process)
    assert statuses(runner) == {"waits": ["FAILED"]}


def test_callbacks_that_cannot_be_stored_or_raise(runner: Runner) -> None:
    """A callback with a lock ends as the sweep's start left it; one that raises changes nothing, wherever it is."""
    ran = runner.python(
        *arguments(runner, "+how=other,good", "+hydra.callbacks.recorder.locked=true"),
        "+hydra.callbacks.broken._target_=recorder.Broken",
    )
    assert statuses(runner) == {"other": ["FAILED"], "good": ["COMPLETED"]}
    assert called(runner, "end")["other"][0]["seen"] == ["end"]
    assert "1 completed, 1 failed" in ran.output


def test_jobs_through_submitit(runner: Runner) -> None:
    """The launching process ends the jobs of a cluster, too, whose rank 0 could not."""
    pytest.importorskip("submitit")
    given = [str(argument) for argument in arguments(runner, "+how=other,good")]
    given = [argument.replace("=ddp_subprocess", "=ddp_submitit_local") for argument in given]
    runner.python(*(argument for argument in given if "max_parallel_jobs" not in argument))
    assert statuses(runner) == {"other": ["FAILED"], "good": ["COMPLETED"]}
