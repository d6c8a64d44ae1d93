"""A Hydra program with many behaviours, picked by config keys, that notes what each of its processes saw and did.

`all` is what every rank does, `r0`, `r1`, … what one rank does; `j<num>.all` and `j<num>.r<k>` do so in one job only.
A behaviour is a step or a list of steps; a step is `name` or `name:argument` (see STEPS). The value of the last step is
the value of the job. Notes are files in the folder that the variable BEHAVE_DIR names.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

NOTES = Path(os.environ["BEHAVE_DIR"])
# A process that Hydra starts for a rank has this variable in the environment it was started with.
RANK = int(os.environ.get("RANK", "0"))
AN_HOUR_S = 3600


class Kind(Enum):
    """An enum of `__main__`, to see that values of the user's own types come back."""

    GOOD = "good"


class TwoArgumentsError(Exception):
    """Cannot be rebuilt from its `args` alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class NoTextError(Exception):
    """Fails when it is printed."""

    def __str__(self) -> NoReturn:
        raise RuntimeError("no text for this one")


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def note(name: str, **facts: object) -> None:
    """Write a file in one go, so that whoever waits for it never reads half of it."""
    NOTES.mkdir(parents=True, exist_ok=True)
    part = NOTES / f".{name}.{os.getpid()}"
    part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), "rank": RANK, **facts}, default=str))
    part.rename(NOTES / f"{name}.json")


def wait_for(name: str) -> None:
    while not (NOTES / f"{name}.json").exists():
        time.sleep(0.01)


def start_environment() -> dict[str, str]:
    """What the process was started with, whatever Python code changed since."""
    parts = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(part).partition("=")[::2] for part in parts if part)


def raise_error(kind: str = "plain") -> NoReturn:
    if kind == "two":
        raise TwoArgumentsError("first", "second")  # raises two
    if kind == "notext":
        raise NoTextError  # raises notext
    if kind == "locked":
        raise LockedError("has a lock")  # raises locked
    if kind == "group":
        raise ExceptionGroup("several", [ValueError("one of them")])  # raises group  # noqa: F821
    if kind == "chain":
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise OSError("the effect") from cause  # raises chain
    raise ValueError(f"broken: {kind}")  # raises plain


def make_children(seconds: str) -> None:
    """Start `sleep` in the four ways in which grandchildren get away from whoever looks for them."""
    sleep = ["sleep", seconds]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.Popen(["env", "-i", *sleep], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("env", ["env", "-i", *sleep])
        os._exit(0)
    while len(find_processes(seconds)) < 4:
        time.sleep(0.01)


def find_processes(argument: str) -> list[int]:
    """Return the pids of all processes, zombies left out, that have this very argument."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # It ended meanwhile.
    return found


def block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def ignore_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def note_signal(number: str) -> None:
    """Count how often a signal comes, in the file's name, so that a second one is seen."""
    seen: list[int] = []

    def handler(_number: int, _frame: object) -> None:
        seen.append(1)
        note(f"signal_{number}_{HydraConfig.get().job.num}_{RANK}", count=len(seen))
        if number == "SIGTERM":
            sys.exit(1)

    signal.signal(getattr(signal, number), handler)


def exit_late(code: str) -> None:
    """End with this code after the outcome of this rank was stored, and after rank 1 has ended if there is one."""

    def leave() -> None:
        for path in NOTES.glob("body_*_1.json"):
            pid = json.loads(path.read_text())["pid"]
            while pid != os.getpid() and Path(f"/proc/{pid}").exists():
                time.sleep(0.01)
        os._exit(int(code))

    atexit.register(leave)


def exit_at_once(code: str) -> None:
    atexit.register(os._exit, int(code))


def leave(code: str) -> NoReturn:
    sys.exit(ast.literal_eval(code) if code[0].isdigit() or code == "None" else code)


def give(value: str) -> object:
    special: dict[str, Callable[[], object]] = {
        "enum": lambda: Kind.GOOD,
        "lock": threading.Lock,
        "numpy": lambda: __import__("numpy").float64(1.5),
    }
    return special[value]() if value in special else ast.literal_eval(value)


def meet() -> str:
    """Rank 0 listens where the environment says, the others connect and are told a word."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    others = int(os.environ["WORLD_SIZE"]) - 1
    if RANK == 0:
        with socket.create_server(address) as server:
            for _ in range(others):
                connection, _ = server.accept()
                connection.sendall(os.environ["TORCHELASTIC_RUN_ID"].encode())
                connection.close()
        return os.environ["TORCHELASTIC_RUN_ID"]
    while True:
        try:
            with socket.create_connection(address) as connection, connection.makefile() as stream:
                return stream.read()
        except ConnectionRefusedError:
            time.sleep(0.02)  # Rank 0 does not listen yet.


def sweep_again(name: str) -> None:
    """Start this program's sweep once more from inside a rank."""
    argv = [sys.executable, __file__, "-m", "hydra/launcher=ddp_subprocess", f"hydra.sweep.dir={NOTES / name}"]
    argv += os.environ.get("BEHAVE_INNER", "").split()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    note(name, code=done.returncode, output=done.stdout + done.stderr)


def append(path: str) -> None:
    with open(path, "a", encoding="utf-8") as stream:
        stream.write("# changed while the sweep runs\n")


def replace(arguments: str) -> None:
    path, old, new = arguments.split(":")
    text = Path(path).read_text(encoding="utf-8")
    Path(path).write_text(text.replace(old, new), encoding="utf-8")


STEPS: dict[str, Callable[..., object]] = {
    "append": append,
    "atexit": exit_at_once,
    "atexit_last": exit_late,
    "block": block_signals,
    "children": make_children,
    "exit": lambda code: os._exit(int(code)),
    "hang": lambda: time.sleep(AN_HOUR_S),
    "ignore": ignore_signals,
    "kill": lambda name: os.kill(os.getpid(), getattr(signal, name)),
    "leave": leave,
    "look": find_processes,
    "meet": meet,
    "note": note,
    "ok": lambda: None,
    "print": print,
    "raise": raise_error,
    "replace": replace,
    "return": give,
    "signal": note_signal,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "sweep": sweep_again,
    "wait": wait_for,
}


def behaviour(cfg: DictConfig, job: int | None) -> list[str]:
    """Return this rank's steps: what is said for this job comes before what is said for all."""
    for key in (f"j{job}.r{RANK}", f"j{job}.all", f"r{RANK}", "all"):
        found = OmegaConf.select(cfg, key)
        if found is not None:
            return list(found) if isinstance(found, ListConfig) else [found]
    return []


def run_step(step: str, cfg: DictConfig) -> Any:
    name, colon, argument = step.partition(":")
    if name == "square":  # The only step that needs the config.
        return (cfg.x - 2) ** 2
    return STEPS[name](argument) if colon else STEPS[name]()


def act(cfg: DictConfig) -> Any:
    """Note that this rank's part of the job runs here, and do what the config says."""
    hydra_job = HydraConfig.get().job
    job = None if OmegaConf.is_missing(hydra_job, "num") else hydra_job.num
    place = f"{job}_{RANK}"
    facts = {"job": job, "x": cfg.x, "cwd": os.getcwd(), "output_dir": HydraConfig.get().runtime.output_dir}
    # A second body of one rank of one job would overwrite the first one's note.
    assert not (NOTES / f"body_{place}.json").exists() or "BEHAVE_AGAIN" in os.environ
    note(f"body_{place}", config=OmegaConf.to_container(cfg), **facts)
    value = None
    for step in behaviour(cfg, job):
        value = run_step(step, cfg)
    note(f"end_{place}", value=repr(value), **facts)
    return value


@hydra.main(version_base=None, config_path=None, config_name="behave")
def main(cfg: DictConfig) -> Any:
    return act(cfg)


ConfigStore.instance().store(name="behave", node={"x": 0})
note(
    f"process_{os.getpid()}",
    environment=start_environment(),
    argv=sys.argv,
    orig_argv=sys.orig_argv,
    cwd=os.getcwd(),
    stdin=os.readlink("/proc/self/fd/0"),
)

if __name__ == "__main__":
    before = dict(os.environ)
    main()
    note(f"after_{os.getpid()}", environment_is_as_before=before == dict(os.environ))
