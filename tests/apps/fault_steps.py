"""What faults.py and fault_wrapper.py share: do, at one moment of a rank's life, what the plan says for its job.

The variable FAULT_PLAN holds JSON: number of a job to its plan, a dict with

* `who` is hit: `rank`, `keeper`, `spawner`, `launcher`, or `grandchild` (one in each form that gets away from a group);
* `how`: `exception`, `exit`, `blocks` (every signal, and hangs), or the name of a signal;
* `when`: `start` (before the program's interpreter starts), `import`, `function`, `store` (the outcome is written but
  not in place), `after` (atexit) or `thread` (one that is no daemon);
* `by`: the rank that does it; `peers`: what the others do in the job, `hang` or `return`; `children`: whether
  grandchildren are made first.

Notes are files in the folder that BEHAVE_DIR names. Only the standard library, as the wrapper starts without site.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

NOTES = Path(os.environ["BEHAVE_DIR"])
RANK = int(os.environ.get("RANK", "-1"))
JOB = int(os.environ.get("HYDRA_DDP_JOB_NUM", "-1"))
PLAN: dict[str, Any] = json.loads(os.environ.get("FAULT_PLAN", "{}")).get(str(JOB), {})
AN_HOUR_S = 3600
EXIT_CODE = 5
# Ways in which a grandchild gets away from whoever looks for it.
FORMS = ("plain", "session", "daemon", "no_environment", "comm", "argv")
_PR_SET_NAME = 15


def note(name: str, **facts: object) -> None:
    """Write a file in one go, so that whoever waits for it never reads half of it."""
    part = NOTES / f".{name}.{os.getpid()}"
    part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), "job": JOB, **facts}))
    part.rename(NOTES / f"{name}.json")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def sleep_for_ever() -> None:
    while True:
        time.sleep(AN_HOUR_S)


def block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def process_of(who: str) -> int:
    """Return the pid of a process that this rank's life depends on."""
    pid = os.getpid()
    for name in ("rank", "keeper", "spawner", "launcher"):
        if name == who:
            return pid
        pid = _parent_of(pid)
    raise ValueError(who)


def do(how: str, pid: int) -> None:
    """Have the fault happen to process `pid`; the faults that are no signal happen to this one."""
    if how == "exception":
        raise RuntimeError(f"fault at {PLAN['when']}")
    if how == "exit":
        os._exit(EXIT_CODE)
    if how == "blocks":
        block_signals()
        sleep_for_ever()
    os.kill(pid, getattr(signal, how))


def make_grandchild(form: str, how: str) -> None:
    """Fork one that gets away in its own way; `how` is what becomes of it."""
    if os.fork():
        return
    if form in ("session", "daemon", "no_environment"):
        os.setsid()
    if form == "daemon" and os.fork():
        os._exit(0)
    note(f"pid_{JOB}_{RANK}_{form}")
    if how == "blocks":
        block_signals()
    elif how:
        try:
            do(how, os.getpid())
        finally:
            # Whatever it raised, this copy must not run the rest of the rank's program.
            os._exit(1)
    if form == "comm":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"kworker/u8:3", 0, 0, 0)
        sleep_for_ever()
    name = "[kworker/u8:3]" if form == "argv" else "sleep"
    os.execvpe("sleep", [name, str(AN_HOUR_S)], {} if form == "no_environment" else dict(os.environ))


def make_grandchildren(how: str = "") -> None:
    for form in FORMS:
        make_grandchild(form, how)
    for form in FORMS:
        wait_for(NOTES / f"pid_{JOB}_{RANK}_{form}.json")


def _wait_for_peers() -> None:
    """Have the others where the plan wants them: in the job's function, or done with it."""
    if PLAN["when"] == "function" and PLAN["peers"] == "hang":
        wait_for(NOTES / f"ready_{JOB}_{1 - RANK}.json")
    if PLAN["when"] in ("after", "thread"):
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[3]
        for rank in range(int(os.environ["WORLD_SIZE"])):
            wait_for(folder / f"outcome_{rank}.pkl")


def at(when: str) -> None:
    """Do what the plan says for this moment, if it is this rank's to do."""
    if PLAN.get("when") != when or PLAN["by"] != RANK:
        return
    _wait_for_peers()
    who, how = PLAN["who"], PLAN["how"]
    if who == "grandchild":
        make_grandchildren(how)
        note(f"fault_{JOB}")
        return
    if PLAN["children"]:
        make_grandchildren()
    target = process_of(who)
    note(f"fault_{JOB}", target=target)
    do(how, target)
    # A keeper that is slow to look would else find that all ranks had stored their outcome before the signal.
    if (who == "launcher" and how not in ("SIGSTOP", "blocks")) or (who, how, when) == ("keeper", "SIGTERM", "store"):
        sleep_for_ever()
