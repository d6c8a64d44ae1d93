"""Make the pictures of the README from a real sweep: `python docs/pictures.py` writes board.svg and timeline.svg here.

Eight jobs of two ranks on four made-up devices, two at a time; one job fails, another one is started again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CLI = (sys.executable, "-m", "hydra_plugins.hydra_ddp_subprocess_launcher.cli.main")
# Ends of jobs when the picture of the board is made: two jobs run, and some wait.
ENDS_BEFORE_BOARD = 3
APP = """
import os, time

import hydra
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store(name="train", node={"lr": 0.1, "model": "mlp", "epochs": 20})


@hydra.main(version_base=None, config_path=None, config_name="train")
def main(cfg):
    job, rank = int(os.environ["HYDRA_DDP_JOB_NUM"]), os.environ["RANK"]
    loss = 2.3
    for epoch in range(1, cfg.epochs + 1):
        time.sleep(0.15 + 0.04 * (job % 3))
        loss *= 0.93 if cfg.model == "mlp" else 0.9
        if rank == "0":
            print(f"epoch {epoch}/{cfg.epochs}: loss {loss:.4f}", flush=True)
        if job == 4 and rank == "1" and epoch == 12 and os.environ["HYDRA_DDP_ATTEMPT"] == "0":
            raise RuntimeError("the network was gone for a moment")
        if job == 1 and rank == "0" and epoch == 6:
            raise FloatingPointError("loss is nan")
    return round(1 - loss / 5, 4)


if __name__ == "__main__":
    main()
"""
# Of this machine nothing may be in a picture.
PRIVATE = re.compile(rf"/home|/tmp|/root|{re.escape(str(Path.home()))}|{re.escape(os.uname().nodename)}\b")


def ends(journal: Path) -> int:
    """Return how many jobs of a sweep are over."""
    if not journal.exists():
        return 0
    return sum(json.loads(line)["event"] == "JobEnded" for line in journal.read_text().splitlines())


def main() -> None:
    """Run the sweep and make both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        app, sweep_dir = Path(folder) / "train.py", Path(folder) / "sweep"
        app.write_text(APP)
        options = [
            "hydra/launcher=ddp_subprocess",
            "hydra.launcher.nproc_per_node=2",
            "hydra.launcher.devices=[0,1,2,3]",
            "hydra.launcher.max_restarts=1",
            "hydra.launcher.lock_devices=false",
            f"hydra.sweep.dir={sweep_dir}",
            "lr=0.1,0.03,0.01,0.003",
            "model=mlp,cnn",
        ]
        with subprocess.Popen([sys.executable, app, "-m", *options], cwd=folder) as sweep:
            while ends(sweep_dir / ".ddp" / "journal.jsonl") < ENDS_BEFORE_BOARD and sweep.poll() is None:
                time.sleep(0.1)
            # The next jobs have lines in their logs by then.
            time.sleep(2.5)
            subprocess.run([*CLI, "status", "-d", sweep_dir, "-o", HERE / "board.svg"], check=True)
        subprocess.run([*CLI, "timeline", "-d", sweep_dir, "-o", HERE / "timeline.svg"], check=True)
    for picture in (HERE / "board.svg", HERE / "timeline.svg"):
        found = PRIVATE.search(picture.read_text(encoding="utf-8"))
        if found is not None:
            sys.exit(f"{picture} shows something of this machine: {found[0]}")


if __name__ == "__main__":
    main()
