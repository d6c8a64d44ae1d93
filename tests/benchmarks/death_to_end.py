"""How long after the death of one rank the other is gone, with this launcher and with torchrun, in one run.

    python tests/benchmarks/death_to_end.py

Rank 1 of two gets SIGKILL; rank 0 sleeps. The fault is the same for all: this process sends it, and watches rank 0 by
a descriptor, so that nothing but the launcher's own time is measured. Needs torch for torchrun's figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from timing import Command, started

APP = Path(__file__).parent / "death_app.py"
PATIENCE_S = 60.0
# What is asked of this launcher, and of its share of torchrun's time.
TARGET_S = 0.3
TARGET_SHARE = 0.5


@dataclass(frozen=True)
class Setting:
    """One way to run the two ranks.

    Attributes:
        name: For the table.
        argv: Command, given an output folder.
        busy: Whether to strike while the launching process computes.
    """

    name: str
    argv: Callable[[str], list[str]]
    busy: bool = False


def ours(folder: str, jobs: str = "0") -> list[str]:
    options = ["-m", "hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2"]
    return [sys.executable, str(APP), *options, f"hydra.sweep.dir={folder}", f"job={jobs}"]


def torchrun(folder: str) -> list[str]:
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [sys.executable, *options, str(APP), f"hydra.run.dir={folder}"]


OURS = Setting("ours", ours)
OURS_BUSY = Setting("ours, launching process busy", lambda folder: ours(folder, "0,1"), busy=True)
TORCHRUN = Setting("torchrun", torchrun)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{path.name} did not appear")
        time.sleep(0.002)


def death_to_end(setting: Setting) -> float:
    """Return the seconds from the death of rank 1 to the end of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder)
        command = Command(setting.argv(str(notes / "out")), {"DEATH_DIR": folder})
        with started([command], notes) as (process,):
            for name in ("pid_0", "pid_1", *(["busy"] if setting.busy else [])):
                _wait_for(notes / name, process)
            if not setting.busy:
                # Any moment of torchrun's rounds, which take 0.1 s, shall be as likely as another.
                time.sleep(random.uniform(0.5, 0.6))
            victim, survivor = (int((notes / f"pid_{rank}").read_text()) for rank in (1, 0))
            return _strike(victim, survivor, lambda: setting.busy and (notes / "idle").exists())


def _strike(victim: int, survivor: int, came_too_late: Callable[[], bool]) -> float:
    watch = os.pidfd_open(survivor)
    try:
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        ended = select.select([watch], [], [], PATIENCE_S)[0]
        took = time.monotonic() - began
        if not ended or came_too_late():
            raise RuntimeError("rank 0 did not end in time")
        return took
    finally:
        os.close(watch)


def measure(settings: list[Setting], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by setting; the settings take turns, so that all meet the same machine."""
    times: dict[str, list[float]] = {setting.name: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            times[setting.name].append(death_to_end(setting))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with_torch = importlib.util.find_spec("torch") is not None
    times = measure([OURS, OURS_BUSY, *([TORCHRUN] if with_torch else [])], rounds)
    for name, seconds in times.items():
        print(f"{name:30} median {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s, {rounds} rounds")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    met = all(medians[setting.name] < TARGET_S for setting in (OURS, OURS_BUSY))
    if with_torch:
        share = max(medians[OURS.name], medians[OURS_BUSY.name]) / medians[TORCHRUN.name]
        print(f"share of torchrun's time: {share:.2f}")
        met = met and share <= TARGET_SHARE
    print("target met" if met else f"target missed: < {TARGET_S} s and at most {TARGET_SHARE} of torchrun's")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
