"""Frameworks as people use them, with their real packages on the CPU: they find the group, and start no ranks.

The programs are those of example_app/, started as docs/lightning.md tells.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.documented import ROOT, commands, text_of

if TYPE_CHECKING:
    from support.runner import Ran, Runner
    from support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.torch

PAGE = ROOT / "docs/lightning.md"
EXAMPLES = ROOT / "example_app"
NEEDS = {
    "lightning_ddp.py": "lightning",
    "fabric_ddp.py": "lightning",
    "accelerate_ddp.py": "accelerate",
    "fsdp2.py": "torch",
    "transformers_trainer.py": "transformers",
}
# Every process that runs a program of example_app leaves a file, as soon as it starts.
NOTE = """
import json, os, sys

if any("example_app" in word for word in sys.orig_argv):
    with open(f"process_{os.getpid()}.json", "w") as file:
        json.dump({"rank": os.environ.get("RANK"), "job": os.environ.get("HYDRA_DDP_JOB_NUM")}, file)
"""


def start(runner: Runner, command: list[str], **env: str) -> Ran:
    """Run a command of the page, with notes of the processes that it makes."""
    python, program, *rest = command
    assert python == "python"
    noted = runner.cwd / "noted"
    noted.mkdir()
    (noted / "sitecustomize.py").write_text(NOTE)
    pytest.importorskip(NEEDS[program])
    return runner.python(
        EXAMPLES / program,
        *rest,
        f"hydra.sweep.dir={runner.cwd / 'sweep'}",
        env={"PYTHONPATH": str(noted), **env},
    )


def steps(folder: Path) -> list[str]:
    """Return what rank 0 of each job says about its steps and ranks."""
    logs = [log.read_text() for log in sorted(folder.glob("*/.ddp/rank_0.log"))]
    return [said for log in logs for said in re.findall(r"^\d+ steps on \d+ ranks$", log, re.MULTILINE)]


def values(folder: Path) -> list[object]:
    events = map(json.loads, (folder / ".ddp/journal.jsonl").read_text().splitlines())
    return [event["value"] for event in events if event["event"] == "JobEnded"]


def ranks(runner: Runner) -> list[tuple[str, str]]:
    """Return job and rank of every process that ran the program as one."""
    notes = [json.loads(file.read_text()) for file in runner.cwd.glob("process_*.json")]
    assert sum(note["rank"] is None for note in notes) == 1
    return sorted((note["job"], note["rank"]) for note in notes if note["rank"] is not None)


@pytest.mark.sample("fsdp2.py")
@pytest.mark.parametrize("command", commands(PAGE, "torch"), ids=lambda command: command.split()[1])
def test_a_job_is_one_group_of_as_many_ranks_as_asked(runner: Runner, command: str) -> None:
    """Two jobs of two ranks are four processes, each group shares its data, and losses come back."""
    ran = start(runner, shlex.split(command))
    assert ran.returncode == 0, ran.output
    assert steps(runner.cwd / "sweep") == ["4 steps on 2 ranks"] * 2
    first, second = values(runner.cwd / "sweep")
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert first != second
    assert ranks(runner) == [(job, rank) for job in "01" for rank in "01"]


@pytest.mark.sample
def test_every_example_of_a_framework_is_on_the_page() -> None:
    """The page starts all programs but the one that README starts."""
    programs = {file.name for file in EXAMPLES.glob("*.py")} - {"train.py", "models.py"}
    assert {command.split()[1] for command in commands(PAGE, "torch")} == programs == set(NEEDS)


@pytest.mark.parametrize(
    ("program", "key", "nproc", "devices"),
    [
        ("lightning_ddp.py", "trainer.devices", 2, "4"),
        ("lightning_ddp.py", "trainer.devices", 2, "1"),
        ("lightning_ddp.py", "trainer.devices", 1, "2"),
        ("lightning_ddp.py", "trainer.devices", 2, "auto"),
        ("lightning_ddp.py", "trainer.devices", 2, "-1"),
        ("fabric_ddp.py", "devices", 2, "4"),
    ],
)
def test_lightning_with_another_number_of_devices(
    runner: Runner, program: str, key: str, nproc: int, devices: str
) -> None:
    """It fails with Lightning's own error, as the page has it, and starts no process."""
    options = ["-m", "hydra/launcher=ddp_subprocess", f"hydra.launcher.nproc_per_node={nproc}", f"{key}={devices}"]
    ran = start(runner, ["python", program, *options])
    assert ran.returncode != 0
    told = re.findall(r"^(?:ValueError: You set|TypeError: ).*$", ran.output, re.MULTILINE)
    # The page has it once, with the numbers of its first row.
    said, page = (re.sub(r"\d+", "N", text) for text in (told[0], text_of(PAGE)))
    assert said in page
    assert ranks(runner) == [("0", str(rank)) for rank in range(nproc)]


ALONE = """
import hydra


@hydra.main(version_base=None, config_path=None)
def main(cfg):
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = L.Trainer(
        accelerator="cpu", devices=cfg.devices, strategy=cfg.strategy, fast_dev_run=1, enable_model_summary=False,
        logger=False, enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    return trainer.world_size


if __name__ == "__main__":
    main()
"""


def test_lightning_that_trains_once_in_each_rank(runner: Runner) -> None:
    """One device and the strategy `auto` is a world of its own in each rank: the sweep says so; DDP is one world."""
    (runner.cwd / "app.py").write_text(ALONE)
    ran = runner.sweep(runner.cwd / "app.py", "+devices=1", "+strategy=auto")
    assert ran.returncode == 0, ran.output
    assert "Warning: job 0: its ranks opened no process group" in ran.stdout
    ran = runner.sweep(runner.cwd / "app.py", "+devices=2", "+strategy=ddp")
    assert ran.returncode == 0, ran.output
    assert "no process group" not in ran.output


SPAWNS = """
import os, time
from pathlib import Path

import hydra
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo")
    dist.barrier()
    Path("met").touch()
    time.sleep(60)


@hydra.main(version_base=None, config_path=None)
def main(cfg):
    while os.environ["RANK"] == "1" and not Path("met").exists():
        time.sleep(0.1)
    mp.spawn(train, args=(2,), nprocs=2)


if __name__ == "__main__":
    main()
"""


def test_ranks_that_spawn_ranks(runner: Runner) -> None:
    """Processes that ranks spawn clash on the job's port: it is started once, and the message says what to do."""
    pytest.importorskip("torch")
    app = runner.cwd / "spawns.py"
    app.write_text(SPAWNS)
    ran = runner.sweep(app, "hydra.launcher.grace_period_s=1")
    assert ran.returncode == 1
    assert re.search("EADDRINUSE|[Cc]onnection (closed|reset)", ran.output), ran.output
    assert "The launcher starts the ranks: call the function that you spawn, or use strategy=ddp." in ran.output
    assert not list((runner.cwd / "sweep").glob("0/.ddp/earlier_*"))


@pytest.mark.slurm
def test_lightning_on_two_nodes_of_slurm(runner: Runner, slurm: SlurmCluster) -> None:
    """Lightning takes the group that is there, and not what it knows about SLURM."""
    options = ["hydra/launcher=ddp_submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.nproc_per_node=2"]
    ran = start(
        runner,
        ["python", "lightning_ddp.py", "-m", *options, "trainer.num_nodes=2"],
        GLOO_SOCKET_IFNAME=slurm.interface,
    )
    assert ran.returncode == 0, ran.output
    assert steps(runner.cwd / "sweep") == ["2 steps on 4 ranks"]
    assert ranks(runner) == [("0", rank) for rank in "0123"]
