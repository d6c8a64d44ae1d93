"""What preload saves: a job's function entered, and a whole job of two ranks, beside what one has without a launcher.

    python tests/benchmarks/fast_start.py --jobs 10

The bare interpreter and torchrun are started between the jobs' sweeps, so that all meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = [sys.executable, "-c", "import torch, hydra"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ENTERED_TARGET, WHOLE_TARGET = 0.15, 0.10
ROUNDS = 3


def program() -> None:
    """Be the program: two ranks meet, add up, and part."""
    import hydra
    import torch
    from omegaconf import DictConfig

    def main(cfg: DictConfig) -> float:
        entered = time.time()
        torch.distributed.init_process_group("gloo")
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        if "HYDRA_DDP_JOB_NUM" in os.environ:
            note = Path(os.environ["HYDRA_DDP_SWEEP_DIR"]) / f"{os.environ['HYDRA_DDP_JOB_NUM']}_{os.environ['RANK']}"
            note.write_text(json.dumps(entered))
        return float(total)

    hydra.main(version_base="1.3", config_path=None)(main)()


def timed(argv: list[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(argv, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def sweep(preload: str, jobs: int, folder: Path) -> tuple[list[float], list[float]]:
    """Return of each job the seconds from the end of the one before to its function, and to its end."""
    where = folder / f"sweep_{preload}_{time.time()}"
    options = ["nproc_per_node=2", "devices=[]", f"preload={preload}", "progress=none"]
    options = [f"hydra.launcher.{option}" for option in options]
    numbers = ",".join(map(str, range(jobs)))
    argv = [sys.executable, __file__, "-m", "hydra/launcher=ddp_subprocess", *options, f"hydra.sweep.dir={where}"]
    timed([*argv, f"+x={numbers}"], folder)
    events = [json.loads(line) for line in (where / ".ddp" / "journal.jsonl").read_text().splitlines()]
    ended = {event["job"]: event["at"] for event in events if event["event"] == "JobEnded"}
    # The first one waits for the imports.
    pairs = [(job, ended[job - 1]) for job in range(1, jobs)]
    entered = [max(json.loads((where / f"{job}_{rank}").read_text()) for rank in (0, 1)) - at for job, at in pairs]
    return entered, [ended[job] - at for job, at in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10)
    jobs = parser.parse_args().jobs
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(ROUNDS):
            figures.setdefault("bare `import torch, hydra`", []).append(timed(BARE, folder))
            figures.setdefault("torchrun --standalone, 2 ranks", []).append(
                timed([*TORCHRUN, __file__, "hydra.run.dir=."], folder)
            )
            for preload in ("auto", "null"):
                entered, whole = sweep(preload, jobs if preload == "auto" else 3, folder)
                figures.setdefault(f"function entered, preload={preload}", []).extend(entered)
                figures.setdefault(f"whole job of 2 ranks, preload={preload}", []).extend(whole)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, seconds in medians.items():
        print(f"{seconds * 1000:9.0f} ms  {name}  (best {min(figures[name]) * 1000:.0f})")
    bare, torchrun, entered_s, whole_s = list(medians.values())[:4]
    print(f"entered / bare: {entered_s / bare:.3f} (target {ENTERED_TARGET})")
    print(f"whole / torchrun: {whole_s / torchrun:.3f} (target {WHOLE_TARGET})")


if __name__ == "__main__":
    if "--jobs" in sys.argv or len(sys.argv) == 1:
        main()
    else:
        program()
