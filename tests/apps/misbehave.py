"""behave.py with more ways to misbehave: towards the job's files, its own end, and the launcher that waits for it."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import behave
import hydra
from omegaconf import DictConfig

ATTEMPT = int(os.environ.get("HYDRA_DDP_ATTEMPT", "0"))
# Folder of this rank's job, as torchrun's variable tells it.
JOB_FOLDER = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "0/1/2/3")).parents[3]


def fail_until(attempt: str) -> None:
    """Note this attempt, see every rank of the group do so, and fail in the attempts before the given one."""
    names = ("HYDRA_DDP_ATTEMPT", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    facts = {name: os.environ[name] for name in (*names, *counts)}
    name = f"attempt_{os.environ['HYDRA_DDP_JOB_NUM']}_{ATTEMPT}"
    behave.note(f"{name}_{behave.RANK}", **facts)
    print(f"attempt {ATTEMPT} of rank {behave.RANK}", flush=True)
    for rank in range(int(os.environ["WORLD_SIZE"])):
        # Who fails before the others are here ends them before they note anything.
        behave.wait_for(f"{name}_{rank}")
    if int(attempt) > ATTEMPT:
        raise ValueError(f"broken in attempt {ATTEMPT}")


def in_first_attempt(step: str) -> None:
    if ATTEMPT == 0:
        behave.run_step(step, DictConfig({}))


def write_error_file(message: str) -> NoReturn:
    """End as torch's `record` has it: a text for a crash in C++, a dict for an exception."""
    extra = {"py_callstack": f"Traceback of {message}", "timestamp": str(int(time.time()))}
    content = message if message.startswith("text") else {"message": message, "extraInfo": extra}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": content}))
    os._exit(1)


def linger(seconds: str) -> None:
    """Do not end with the program: a thread that is no daemon goes on."""
    threading.Thread(target=time.sleep, args=(float(seconds),)).start()


def say_sigterm() -> None:
    def handler(_number: int, _frame: object) -> None:
        print("SIGTERM came", flush=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, handler)


def fill() -> None:
    """Write until the disk that has the run directory is full."""
    with open(JOB_FOLDER / "large", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def spoil_outcome(how: str) -> None:
    """When this rank has stored its outcome, make it one that must not be taken."""
    path = JOB_FOLDER / f"outcome_{behave.RANK}.pkl"

    def spoil() -> None:
        if how == "link":
            path.rename(JOB_FOLDER / "elsewhere")
            path.symlink_to(JOB_FOLDER / "elsewhere")
        elif how == "owner":
            os.chown(path, 65534, 65534)
        else:
            path.write_bytes(b"no pickle")

    atexit.register(spoil)


def kill_above(levels: str) -> None:
    """Kill the process so many levels above this rank: 1 is its keeper."""
    pid = os.getpid()
    for _ in range(int(levels)):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


class Stopped(Exception):
    """Raised by the handler of a program that stops early when it is told to."""


def until_sigterm() -> float:
    """Work until SIGTERM comes, and return what there is by then."""

    def handler(_number: int, _frame: object) -> NoReturn:
        raise Stopped

    signal.signal(signal.SIGTERM, handler)
    behave.note(f"works_{behave.RANK}")
    with contextlib.suppress(Stopped):
        time.sleep(behave.AN_HOUR_S)
    return 0.5


def save_on_sigterm() -> None:
    """Work until SIGTERM comes, and then take a second for a checkpoint."""

    def handler(_number: int, _frame: object) -> None:
        time.sleep(1)
        behave.note(f"saved_{behave.RANK}")
        os._exit(1)

    signal.signal(signal.SIGTERM, handler)
    behave.note(f"works_{behave.RANK}")
    time.sleep(behave.AN_HOUR_S)


class SlowToLoad:
    """A value that takes a while to be loaded, as one does whose module imports torch."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_slowly, ()


def load_slowly() -> int:
    behave.note("loading")
    time.sleep(float(os.environ.get("BEHAVE_LOAD_S", "1")))
    return 7


class Quits:
    """A value or error whose loading ends the program, as a module does that reads the command line."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (9,)


class QuittingError(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (9,)


def raise_quitting() -> NoReturn:
    raise QuittingError("its own words")


class BadStream:
    """A stream that raises what no stream raises."""

    def write(self, _text: str) -> NoReturn:
        raise ZeroDivisionError

    flush = write


def spoil_stderr(how: str) -> None:
    if how == "detached":
        sys.stderr = io.TextIOWrapper(sys.stderr.detach(), encoding="utf-8")
    elif how == "closed":
        sys.__stderr__.close()
    elif how == "bad":
        sys.stderr = BadStream()
    elif how == "silenced":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    else:
        # The next file that is opened gets the number of stderr.
        os.close(2)
        os.open(behave.NOTES / "of_the_user", os.O_WRONLY | os.O_CREAT)


def empty_directory() -> None:
    shutil.rmtree(JOB_FOLDER.parent)
    JOB_FOLDER.parent.mkdir()


behave.STEPS.update(
    {
        "big": lambda size: bytes(int(size)),
        "empty": empty_directory,
        "handled": lambda: Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"message": "handled"}'),
        "quits": Quits,
        "raise_quitting": raise_quitting,
        "raise_odd": lambda: behave.raise_error("\udcff €"),
        "rmtree": shutil.rmtree,
        "save": save_on_sigterm,
        "slow": SlowToLoad,
        "stderr": spoil_stderr,
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "until_sigterm": until_sigterm,
        "above": kill_above,
        "error_file": write_error_file,
        "fail_until": fail_until,
        "fill": fill,
        "first": in_first_attempt,
        "linger": linger,
        "remove": lambda: shutil.rmtree(JOB_FOLDER.parent),
        "say_sigterm": say_sigterm,
        "spam": lambda: print(*["x" * 79] * 12_500, sep="\n", flush=True),
        "spoil": spoil_outcome,
    }
)


@hydra.main(version_base=None, config_path=None, config_name="behave")
def main(cfg: DictConfig) -> Any:
    return behave.act(cfg)


if "MISBEHAVE_LEAVE" in os.environ and os.environ.get("RANK") in os.environ["MISBEHAVE_LEAVE"].split(","):
    # As a program does that thinks that there is nothing to do for it.
    sys.exit(0)

if __name__ == "__main__":
    main()
