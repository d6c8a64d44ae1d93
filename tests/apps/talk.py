"""A rank that talks: prints lines, progress bars and odd bytes, and ends when it is told to.

Keys: `lines` (how many), `every_s` (seconds between them), `say` (what stands in each), `until` (a file in TALK_DIR to
wait for at the end, by the jobs with an x of `wait_x` alone if that is a list), `fail_rank` (that rank raises at the
end), `fail_x` (jobs with such an x do), `fail_once` (rank 0 raises at the end of the job's first start).

With TALK_DIR, rank 0 notes in ran.jsonl there when it began and ended, with which pid and in which directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

# Hydra 1.4 would put a warning into each log.
warnings.filterwarnings("ignore", "The version_base parameter")
ConfigStore.instance().store(
    name="talk",
    node={
        "x": 0,
        "lines": 3,
        "every_s": 0.0,
        "say": "line",
        "until": None,
        "wait_x": None,
        "fail_rank": None,
        "fail_x": [],
        "fail_once": False,
        "value": 0.5,
    },
)


def note(what: str) -> None:
    if "TALK_DIR" not in os.environ or os.environ["RANK"] != "0":
        return
    names = ("HYDRA_DDP_JOB_NUM", "HYDRA_DDP_ATTEMPT")
    facts = {"what": what, "pid": os.getpid(), "at": time.time(), **{name: os.environ[name] for name in names}}
    facts["output_dir"] = HydraConfig.get().runtime.output_dir
    facts["overrides"] = list(HydraConfig.get().overrides.task)
    with open(Path(os.environ["TALK_DIR"]) / "ran.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")


@hydra.main(version_base=None, config_path=None, config_name="talk")
def main(cfg: DictConfig) -> Any:
    rank = int(os.environ["RANK"])
    note("began")
    for number in range(cfg.lines):
        print(f"{cfg.say} {number} of job {os.environ['HYDRA_DDP_JOB_NUM']} rank {rank}", flush=True)
        time.sleep(cfg.every_s)
    folder = Path(os.environ.get("TALK_DIR", "."))
    waits = cfg.until is not None and (cfg.wait_x is None or cfg.x in cfg.wait_x)
    while waits and not (folder / cfg.until).exists():
        time.sleep(0.02)
    if cfg.fail_rank == rank or cfg.x in cfg.fail_x:
        raise ValueError(f"bad x={cfg.x}")
    if cfg.fail_once and rank == 0 and os.environ["HYDRA_DDP_ATTEMPT"] == "0":
        raise ValueError("bad the first time")
    note("ended")
    return [cfg.x, float(cfg.x) / 3] if cfg.value == "list" else cfg.value


if __name__ == "__main__":
    main()
    print("after the sweep", file=sys.stderr)
