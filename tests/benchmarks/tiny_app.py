"""For compare.py: a job without torch that notes when it is entered, and prints as much as it is asked to."""

from __future__ import annotations

import os
import time

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

LINE = "x" * 199
ConfigStore.instance().store(name="tiny", node={"megabytes": 0, "job": 0})


@hydra.main(version_base=None, config_path=None, config_name="tiny")
def main(cfg: DictConfig) -> None:
    with open(os.environ["TINY_TIMES"], "a") as file:
        file.write(f"{time.time()}\n")
    for _ in range(cfg.megabytes * 1_000_000 // (len(LINE) + 1)):
        print(LINE)


if __name__ == "__main__":
    main()
