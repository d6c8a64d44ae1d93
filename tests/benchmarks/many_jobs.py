"""What the launcher itself costs a job: to schedule, freeze, start, watch and collect it.

    python tests/benchmarks/many_jobs.py --jobs 500

The ranks are the smallest program there is. Their own time, measured beside them by starting the same program without a
launcher, is taken off. Composing, which Hydra does with every launcher, is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import Command, run, timed

HERE = Path(__file__).parent
# No site, nothing of the user's: what is measured is the launcher.
TINY_RANK = [sys.executable, "-I", "-S", str(HERE / "tiny_rank.py")]
BARE_STARTS = 50
TARGET_MS = 25.0


def program(facts_file: str) -> None:
    """Be the program that is swept, and note what its launching process spends."""
    import hydra
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import DictConfig

    from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.sweep import Sweep

    composing: list[float] = []
    ConfigLoaderImpl.load_sweep_config = timed(ConfigLoaderImpl.load_sweep_config, composing)  # type: ignore[method-assign]
    original = Sweep.launch

    def launch(sweep: Sweep, job_overrides: Any, initial_job_idx: int) -> Any:
        composed = sum(composing)
        began, cpu, began_at = time.perf_counter(), time.process_time(), time.time()
        results = original(sweep, job_overrides, initial_job_idx)
        facts = {
            "wall_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "composing_s": composed,
            "composed_again": len(composing) - len(job_overrides),
            "began_at": began_at,
            "values": [result.return_value for result in results],
            "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        Path(facts_file).write_text(json.dumps(facts))
        return results

    Sweep.launch = launch  # type: ignore[method-assign]

    @hydra.main(version_base=None, config_path=str(HERE.parents[1] / "example_app" / "conf"), config_name="config")
    def main(cfg: DictConfig) -> None:
        raise AssertionError("a rank runs tiny_rank.py")

    main()


def bare_start_s(folder: Path) -> float:
    """Return how long the tiny rank takes when nobody supervises it, seconds."""
    error_file = str(folder / ".ddp/x/attempt_0/0/error.json")
    names = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": error_file, "HYDRA_DDP_JOB_NUM": "0"}
    spent: list[float] = []
    start = timed(subprocess.run, spent)
    for _ in range(BARE_STARTS):
        start(TINY_RANK, env={**os.environ, **names, "RANK": "0"}, check=True)
    return statistics.median(spent)


def sweep_command(sweep_dir: Path, jobs: int, facts_file: Path) -> list[str]:
    """Return a command that sweeps over so many tiny ranks, and writes what its launching process spent."""
    return [
        sys.executable, __file__, "--program", str(facts_file), "-m", "hydra/launcher=ddp_subprocess",
        "hydra.launcher.nproc_per_node=1", "hydra.launcher.devices=[]", f"hydra.sweep.dir={sweep_dir}",
        f"hydra.launcher.wrapper=[{','.join(TINY_RANK)}]", f"+n={','.join(map(str, range(jobs)))}",
    ]  # fmt: skip


def measure(jobs: int) -> dict[str, float]:
    """Sweep, and return the figures of one job in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before_s = bare_start_s(folder)
        facts_file = folder / "facts.json"
        run([Command(sweep_command(folder / "sweep", jobs, facts_file), {})], folder)
        facts = json.loads(facts_file.read_text())
        bare_s = statistics.mean([before_s, bare_start_s(folder)])
        assert facts["values"] == list(range(jobs))
        assert facts["composed_again"] == 0
        first = os.stat(folder / "sweep/0/.ddp/outcome_0.pkl").st_mtime - facts["began_at"]
    wall = facts["wall_s"] / jobs
    figures = {
        "bare rank": bare_s,
        "launcher's own cost": wall - bare_s,
        "of it processor time of the launching process": facts["cpu_s"] / jobs,
        "composing (Hydra)": facts["composing_s"] / jobs,
        "first rank done after": first,
    }
    return {name: seconds * 1000 for name, seconds in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    jobs = parser.parse_args().jobs
    figures = measure(jobs)
    print(f"{jobs} jobs of one tiny rank; milliseconds a job")
    for name, milliseconds in figures.items():
        print(f"{milliseconds:9.1f}  {name}")
    print(f"target: own cost under {TARGET_MS:g} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        facts_path = sys.argv[2]
        del sys.argv[1:3]
        program(facts_path)
    else:
        main()
