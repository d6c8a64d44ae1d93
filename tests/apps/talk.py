"""A rank that talks: prints lines, progress bars and odd bytes, and ends when it is told to.

Keys: `lines` (how many), `every_s` (seconds between them), `say` (what stands in each), `until` (a file in TALK_DIR to
wait for at the end), `fail_rank` (that rank raises at the end).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

ConfigStore.instance().store(
    name="talk",
    node={"x": 0, "lines": 3, "every_s": 0.0, "say": "line", "until": None, "fail_rank": None, "value": 0.5},
)


@hydra.main(version_base=None, config_path=None, config_name="talk")
def main(cfg: DictConfig) -> Any:
    rank = int(os.environ["RANK"])
    for number in range(cfg.lines):
        print(f"{cfg.say} {number} of job {os.environ['HYDRA_DDP_JOB_NUM']} rank {rank}", flush=True)
        time.sleep(cfg.every_s)
    folder = Path(os.environ.get("TALK_DIR", "."))
    while cfg.until is not None and not (folder / cfg.until).exists():
        time.sleep(0.02)
    if cfg.fail_rank == rank:
        raise ValueError(f"bad x={cfg.x}")
    return cfg.value


if __name__ == "__main__":
    main()
    print("after the sweep", file=sys.stderr)
