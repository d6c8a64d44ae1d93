"""Many tiny jobs with random faults in one sweep: every result right and in order, and nothing that grows.

    python tests/benchmarks/soak.py --jobs 1000

Prints how long a job took, and memory and descriptors of the launching process and of the spawner over the sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timing import marked, resident_kib

APPS = Path(__file__).parents[1] / "apps"
SEED = 20260101
# What may happen to a job: how often in a hundred, who, how, when, and whether the job completes all the same.
FAULTS = (
    (4, "rank", "exception", "function", False),
    (3, "rank", "exception", "import", False),
    (3, "rank", "exit", "function", False),
    (3, "rank", "SIGKILL", "function", False),
    (3, "rank", "SIGSEGV", "store", False),
    (3, "rank", "SIGTERM", "import", False),
    (3, "rank", "exit", "after", True),
    (3, "keeper", "SIGKILL", "function", False),
    (2, "grandchild", "", "function", True),
    (6, "spawner", "SIGKILL", "function", True),
)
# The share of the sweep after which the spawner is left alone, so that one of them has many jobs to serve.
SPAWNER_SPARED = 0.2


@dataclass(frozen=True)
class Usage:
    """What a process holds: resident memory in KiB, open descriptors, and children that nobody has reaped."""

    memory: int
    descriptors: int
    zombies: int


@dataclass
class Soaked:
    """What came of a sweep.

    Attributes:
        code: Exit code of the program.
        output: What it printed.
        plans: What happened to which job.
        returns: What the sweeper got, a dict a job.
        seconds: Of the whole sweep.
        launcher: The launching process over time: number of jobs begun, and what it held.
        spawner: The spawner that served last, likewise.
        left: Processes that outlived the sweep.
        wrong: A line for each result that is not what its job's plan makes of it.
        kept: KiB a job that the launching process holds with Hydra's basic launcher: the results themselves.
    """

    code: int
    output: str
    plans: dict[int, dict[str, Any]]
    returns: list[dict[str, Any]]
    seconds: float
    launcher: list[tuple[int, Usage]] = field(default_factory=list)
    spawner: list[tuple[int, Usage]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kept: float = 0.0


def plan_faults(jobs: int, seed: int) -> dict[int, dict[str, Any]]:
    """Return what happens to which job, by its number."""
    chosen = random.Random(seed)
    weights = [often for often, *_ in FAULTS]
    plans = {}
    for job in range(jobs):
        (fault,) = chosen.choices([None, *FAULTS], [100 - sum(weights), *weights])
        by = chosen.randrange(2)
        if fault is None or (fault[1] == "spawner" and job > jobs * SPAWNER_SPARED):
            continue
        _, who, how, when, completes = fault
        plans[job] = {"who": who, "how": how, "when": when, "by": by, "peers": "return", "children": False}
        plans[job]["completes"] = completes
    return plans


def usage_of(pid: int) -> Usage | None:
    """Return what a process holds; None when it has ended."""
    try:
        memory = resident_kib(pid)
        if memory is None:
            return None
        children = children_of(pid)
        return Usage(memory, len(os.listdir(f"/proc/{pid}/fd")), sum(_state(child) == "Z" for child in children))
    except OSError:
        return None


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def check(plans: dict[int, dict[str, Any]], jobs: int, returns: list[dict[str, Any]]) -> list[str]:
    """Return a line for each result that is missing, out of order, or not what the job's plan makes of it."""
    wrong = [] if len(returns) == jobs else [f"{len(returns)} results for {jobs} jobs"]
    for job, result in enumerate(returns):
        plan = plans.get(job, {})
        completes = plan.get("completes", True)
        expected = ("COMPLETED" if completes else "FAILED", [f"x={job}"], job, str(job) if completes else "")
        found = (result["status"], result["overrides"], result["job_num"], result["value"])
        if found != expected:
            wrong.append(f"job {job} ({plan}): {found} instead of {expected} {result['text'][-300:]}")
    return wrong


def soak(folder: Path, jobs: int, seed: int = SEED, parallel: int = 2, timeout_s: float = 3600) -> Soaked:
    """Run the sweep in an empty folder and look at its processes meanwhile."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    plans = plan_faults(jobs, seed)
    marker = f"SOAK_MARKER={uuid.uuid4().hex}"
    environment = {**os.environ, "BEHAVE_DIR": str(notes), "FAULT_PLAN": json.dumps(plans)}
    environment |= dict([marker.split("=")])
    argv = [
        sys.executable,
        str(APPS / "faults.py"),
        "-m",
        "hydra/launcher=ddp_subprocess",
        "hydra/sweeper=recording",
        "hydra.launcher.nproc_per_node=2",
        f"hydra.launcher.max_parallel_jobs={parallel}",
        "hydra.launcher.tee_ranks=[]",
        "hydra.launcher.grace_period_s=1",
        f"hydra.sweep.dir={folder / 'sweep'}",
        f"x=range(0,{jobs})",
    ]
    began = time.monotonic()
    soaked = Soaked(0, "", plans, [], 0.0)
    said = folder / "output.txt"
    with said.open("w") as output:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            _watch(process, soaked, lambda: len(list(notes.glob("ready_*_0.json"))), began + timeout_s)
        finally:
            process.kill()
            process.wait()
    soaked.seconds = time.monotonic() - began
    soaked.code, soaked.output = process.returncode, said.read_text(errors="replace")
    soaked.left = marked(marker)
    soaked.returns = json.loads((notes / "returns.json").read_text())["returns"]
    soaked.wrong = check(plans, jobs, soaked.returns)
    soaked.kept = kept_by_basic_launcher(folder)
    return soaked


# Runs a program and prints the most memory that it ever had, in KiB. `ru_maxrss` would count its parent's, too.
_WITH_PEAK = """
import pathlib, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")][0])
"""


def kept_by_basic_launcher(folder: Path, jobs: tuple[int, int] = (20, 120)) -> float:
    """Return KiB of memory a job that the same program needs with the basic launcher, which starts no process."""
    memory = []
    for number in jobs:
        notes = folder / f"basic_{number}"
        notes.mkdir(parents=True)
        argv = [sys.executable, "-c", _WITH_PEAK, str(APPS / "faults.py"), "-m", "hydra/launcher=basic"]
        argv += ["hydra/sweeper=recording", f"hydra.sweep.dir={notes / 'sweep'}", f"x=range(0,{number})"]
        environment = {**os.environ, "BEHAVE_DIR": str(notes)}
        done = subprocess.run(argv, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        memory.append(int(done.stdout.split()[-1]))
    return (memory[1] - memory[0]) / (jobs[1] - jobs[0])


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _watch(process: subprocess.Popen[bytes], soaked: Soaked, begun: Callable[[], int], deadline: float) -> None:
    serving = 0
    while process.poll() is None and time.monotonic() < deadline:
        jobs = begun()
        try:
            # One that still starts has not its name yet, nor the memory that it will have.
            named = [pid for pid in children_of(process.pid) if name_of(pid) == "ddp-spawner"]
            spawner = next(iter(named), 0)
        except OSError:
            break  # It ended just now.
        if spawner not in (0, serving):
            serving = spawner
            soaked.spawner.clear()
        for history, pid in ((soaked.launcher, process.pid), (soaked.spawner, spawner)):
            usage = usage_of(pid) if pid else None
            # Without a spawner it is not running jobs, but at its start or end.
            if usage is not None and spawner and jobs > 0:
                history.append((jobs, usage))
        time.sleep(0.2)


def growth(history: list[tuple[int, Usage]]) -> float:
    """Return KiB of memory a job, from the second quarter of the history to its last."""
    quarter = len(history) // 4
    if quarter == 0:
        return 0.0
    parts = [history[quarter : 2 * quarter], history[-quarter:]]
    jobs = [statistics.mean(number for number, _ in part) for part in parts]
    memory = [statistics.median(usage.memory for _, usage in part) for part in parts]
    return (memory[1] - memory[0]) / max(1.0, jobs[1] - jobs[0])


def report(soaked: Soaked) -> str:
    """Return the figures as text."""
    happened = Counter(f"{plan['who']} {plan['how']} {plan['when']}".strip() for plan in soaked.plans.values())
    statuses = Counter(result["status"] for result in soaked.returns)
    jobs = len(soaked.returns)
    lines = [
        f"{jobs} jobs in {soaked.seconds:.0f} s ({soaked.seconds / max(1, jobs):.2f} s each): {dict(statuses)}",
        f"faults: {dict(happened)}",
        f"wrong results: {len(soaked.wrong)}; processes left: {len(soaked.left)}; exit code {soaked.code}",
        *soaked.wrong,
    ]
    for name, history in (("launching process", soaked.launcher), ("spawner", soaked.spawner)):
        if not history:
            continue
        quarter = max(1, len(history) // 4)
        first, last = history[:quarter], history[-quarter:]
        lines.append(
            f"{name}: {statistics.median(usage.memory for _, usage in first):.0f} KiB in the first quarter, "
            f"{statistics.median(usage.memory for _, usage in last):.0f} KiB in the last, {growth(history):+.1f} KiB a "
            f"job; descriptors at most {max(usage.descriptors for _, usage in first)} and "
            f"{max(usage.descriptors for _, usage in last)}; zombies at most "
            f"{max(usage.zombies for _, usage in history)}"
        )
    lines.append(f"the basic launcher's process grows by {soaked.kept:.1f} KiB a job: the results that Hydra keeps")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--parallel", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soaked = soak(Path(folder), chosen.jobs, chosen.seed, chosen.parallel)
    print(report(soaked))
    return 1 if soaked.wrong or soaked.left else 0


if __name__ == "__main__":
    sys.exit(main())
