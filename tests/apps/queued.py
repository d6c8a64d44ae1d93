"""A job for a cluster: it notes where each of its ranks runs and which signals come, and does what is asked of it.

Keys: `first` and `then` are steps of the first attempt and of later ones, `who` the rank that does them (null: all),
while the others hang,
`xs` the jobs that do them, by their x (null: all). A step is `name` or `name:argument` (see STEPS). The value is x and
the attempt. Notes are lines of ran.jsonl in the folder that QUEUED_DIR names.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

CONFIG = {"x": 1, "first": [], "then": [], "who": None, "xs": None, "id": os.environ.get("QUEUED_ID")}
FOLDER = Path(os.environ["QUEUED_DIR"])
SHOWN = ("SLURM_", "HYDRA_DDP_", "MASTER_", "CUDA_VISIBLE", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "OF_JOB")


def note(what: str, **facts: Any) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["HYDRA_DDP_ATTEMPT"])
    job = HydraConfig.get().job
    line = {"what": what, "job": job.num, "rank": rank, "attempt": attempt, "pid": os.getpid(), "at": time.time()}
    # In one write, as all ranks of all jobs append.
    with open(FOLDER / "ran.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps({**line, **facts}).encode() + b"\n")


def on_signal(name: str) -> None:
    """Note each one. SIGTERM, and one that is followed by `!`, ends the rank a moment later."""
    number = getattr(signal, name.rstrip("!"))
    came = []

    def leave(*_: object) -> None:
        sys.exit(1)

    def handler(*_: object) -> None:
        came.append(1)
        note(name.rstrip("!"), count=len(came))
        if len(came) == 1 and name.endswith("!"):
            signal.signal(signal.SIGALRM, leave)
            signal.setitimer(signal.ITIMER_REAL, 0.5)

    signal.signal(number, handler)


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def fail() -> None:
    raise ValueError(f"broken on {socket.gethostname()}")


def meet() -> None:
    """Rank 0 listens where the environment says; the others connect."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    others = int(os.environ["WORLD_SIZE"]) - 1
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            for connection in [server.accept()[0] for _ in range(others)]:
                connection.close()
        return None
    while True:
        try:
            return socket.create_connection(address).close()
        except ConnectionRefusedError:
            time.sleep(0.02)


STEPS: dict[str, Callable[..., object]] = {
    "exit": lambda code: os._exit(int(code)),
    "fail": fail,
    "hang": lambda: time.sleep(3600),
    "meet": meet,
    "on": on_signal,
    "print": lambda text: print(text, flush=True),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "wait": wait_for,
}


@hydra.main(version_base=None, config_path=None, config_name="queued")
def main(cfg: DictConfig) -> list[int]:
    attempt = int(os.environ["HYDRA_DDP_ATTEMPT"])
    environment = {name: value for name, value in os.environ.items() if name.startswith(SHOWN)}
    runtime = HydraConfig.get().runtime
    facts = {"host": socket.gethostname(), "id": HydraConfig.get().job.id, "dir": runtime.output_dir, "said": cfg.id}
    note("began", environment=environment, argv0=sys.argv[0], sibling=sibling(), **facts)
    steps = cfg.then if attempt else cfg.first
    if steps and (cfg.xs is None or cfg.x in cfg.xs):
        if cfg.who not in (None, int(os.environ["RANK"])):
            time.sleep(3600)
        for step in steps:
            name, colon, argument = step.partition(":")
            _ = STEPS[name](argument) if colon else STEPS[name]()
    note("ended")
    return [cfg.x, attempt]


def sibling() -> str:
    """Import a module that lies beside this program, as a job does that is started as a program."""
    import talk

    return talk.__name__


ConfigStore.instance().store(name="queued", node=CONFIG)

if __name__ == "__main__":
    main()
