"""A program whose rank ends in the way of `way`, and leaves something open that only its end can write."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

# Hydra 1.4 warns of the argument.
VERSION_BASE: Any = {"version_base": None} if hasattr(hydra.version, "base_at_least") else {}


class Deleted:
    many: list[list[int]]

    def __del__(self) -> None:
        os.write(2, b"deleted\n")


def fail() -> None:
    raise ValueError("failed")


def fail_twice() -> None:
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("failed again") from error


def run_thread() -> None:
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread done"))).start()


def run_daemon() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def run_busy() -> None:
    def count() -> None:
        while True:
            pass

    threading.Thread(target=count, daemon=True).start()
    # So many that to look at them takes longer than a thread's turn.
    KEPT.many = [[number] for number in range(300_000)]


def fail_with_hook() -> None:
    sys.excepthook = lambda kind, error, trace: print("hook", kind, error, trace is not None)
    fail()


def exit_in_hook() -> None:
    sys.excepthook = lambda kind, error, trace: sys.exit(9)
    fail()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail_at_exit() -> None:
    atexit.register(fail)


def close_stdout() -> None:
    os.close(1)
    print("nobody reads this")


WAYS = {
    "well": lambda: None,
    "fail": fail,
    "fail_twice": fail_twice,
    "code": lambda: sys.exit(3),
    "negative": lambda: sys.exit(-1),
    "text": lambda: sys.exit("said at the end"),
    "none": sys.exit,
    "interrupt": interrupt,
    "at_once": lambda: os._exit(7),
    "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "syntax": lambda: exec("a b"),
    "thread": run_thread,
    "daemon": run_daemon,
    "busy": run_busy,
    "hook": fail_with_hook,
    "hook_exit": exit_in_hook,
    "at_exit": fail_at_exit,
    "stdout": close_stdout,
}
KEPT = Deleted()
PLAN = dict(part.split("=") for part in os.environ["WAYS"].split())
WAY = WAYS[PLAN[os.environ["HYDRA_DDP_JOB_NUM"]]] if "RANK" in os.environ else WAYS["well"]
if "RANK" in os.environ:
    OPEN = Path(f"open_{os.environ['HYDRA_DDP_JOB_NUM']}").open("w")  # noqa: SIM115
    OPEN.write("written at the end")
sys.stdout.write("started without a newline")
atexit.register(lambda: print("at exit"))


@hydra.main(config_path=None, **VERSION_BASE)
def main(cfg: DictConfig) -> None:
    print("in the job")


WAY()

if __name__ == "__main__":
    main()
