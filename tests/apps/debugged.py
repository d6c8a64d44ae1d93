"""A Hydra program whose rank 0 stops at a breakpoint while the other ranks wait for what it then decides.

`text` is what rank 0 has at the breakpoint. The others wait for a file that it writes after it; with `fails` they wait
for one of the test's, and raise.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

RANK = int(os.environ.get("RANK", "0"))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@hydra.main(version_base=None, config_path=None, config_name="debugged")
def main(cfg: DictConfig) -> str:
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / f"pid_{RANK}").write_text(str(os.getpid()))
    if RANK > 0:
        print("waiting for rank 0", flush=True)
        wait_for(folder / ("fail" if cfg.fails else "go_on"))
        if cfg.fails:
            raise ValueError("rank 1 is done with waiting")
        return ""
    text = cfg.text
    breakpoint()
    (folder / "go_on").touch()
    return f"{text} is the value"


ConfigStore.instance().store(name="debugged", node={"text": "first", "fails": False})

if __name__ == "__main__":
    main()
