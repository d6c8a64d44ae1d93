"""For death_to_end.py: ranks that wait to be killed, and a job 1 whose composing keeps the launching process busy."""

from __future__ import annotations

import os
import time
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

NOTES = Path(os.environ["DEATH_DIR"])
BUSY_S = 3.0


def keep_busy(job: int) -> int:
    """Compute for a while, without ever waiting, as composing a large config does."""
    if job == 1:
        (NOTES / "busy").touch()
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            pass
        (NOTES / "idle").touch()
    return job


@hydra.main(version_base=None, config_path=None, config_name="death")
def main(cfg: DictConfig) -> None:
    part = NOTES / f".{os.getpid()}"
    part.write_text(str(os.getpid()))
    part.rename(NOTES / f"pid_{os.environ['RANK']}")
    time.sleep(3600)


# Cached, so that the launching process resolves it when it makes a job's config final.
OmegaConf.register_new_resolver("keep_busy", keep_busy, use_cache=True)
ConfigStore.instance().store(name="death", node={"job": 0, "busy": "${keep_busy:${job}}"})

if __name__ == "__main__":
    main()
