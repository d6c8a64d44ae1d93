"""What README and the pages in docs/ tell people to type works."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.cli import main
from support.documented import PAGES, README, ROOT, Block, blocks, config
from support.runner import PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Ran, Runner
    from support.slurm_cluster import SlurmCluster

APP = """
import os

import hydra


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    print("rank", os.environ.get("RANK"), "of", os.environ.get("WORLD_SIZE"), "with lr", cfg.lr)
    return cfg.lr


if __name__ == "__main__":
    main()
"""
CONFIG = "lr: 0.1\nmodel: mlp\nseed: 0\ntrainer: {devices: 1}\n"
FAQ = ROOT / "docs/faq.md"
MOVING = ROOT / "docs/moving.md"
SLURM = ROOT / "docs/slurm.md"
DRY_RUN = "hydra.launcher.dry_run=true"


@pytest.fixture
def project(runner: Runner) -> Runner:
    """A project such as the pages have in mind, with `python` and `hydra-ddp` on the path."""
    files = {
        "train.py": APP,
        "conf/config.yaml": CONFIG,
        "conf/experiment/big.yaml": config(FAQ, "experiment"),
        "bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "bin/hydra-ddp": f'#!/bin/sh\nexec "{sys.executable}" -m {main.__name__} "$@"\n',
    }
    for name, text in files.items():
        path = runner.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return runner


def environment(project: Runner) -> dict[str, str]:
    return {"PATH": f"{project.cwd / 'bin'}:{os.environ['PATH']}"}


def quick(command: str, dry: bool = False) -> str:
    """Return a command as it runs here: without a cluster and a terminal, without other sweeps' devices, and soon."""
    if "--cfg" in command or DRY_RUN in command or "hydra/launcher" not in command:
        return command
    if dry or any(word in command for word in ("ddp_submitit_slurm", "range(", "debug=true")):
        return f"{command} {DRY_RUN}"
    return f"{command} hydra.launcher.lock_devices=false" if ".devices=[" in command else command


def runs_here(block: Block) -> bool:
    return block.kind == "bash" and block.mark not in ("torch", "together")


def start(project: Runner, command: str, dry: bool = False) -> Ran:
    return project.run("bash", "-c", quick(command, dry), env=environment(project))


@pytest.mark.sample("resume")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(runs_here, blocks(page)))], ids=lambda page: page.stem
)
def test_the_commands_of_a_page_run(project: Runner, page: Path) -> None:
    """All that a page tells to type works, in the order of the page, in one directory."""
    for block in filter(runs_here, blocks(page)):
        for command in block.lines:
            if command.startswith("pip install"):
                continue
            if "submitit" in command:
                pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
            if "timeline" in command:
                pytest.importorskip("matplotlib")
            # What is on these is run as it is on other pages; here it is enough that it is understood.
            ran = start(project, command, dry=page in (README, MOVING))
            expected = block.mark.removeprefix("fails: ") if block.mark.startswith("fails: ") else None
            assert (ran.returncode != 0) == (expected is not None), f"{command}\n{ran.output}"
            assert expected is None or expected in ran.output, f"{command}\n{ran.output}"


@pytest.mark.parametrize("page", [README, SLURM], ids=lambda page: page.stem)
def test_the_commands_for_two_nodes_run(project: Runner, page: Path) -> None:
    """Those that are typed on two nodes find each other, and each job has the ranks of both."""
    (block,) = [block for block in blocks(page) if block.mark == "together"]
    assert len(block.lines) == 2
    nodes = []
    for line in block.lines:
        here = re.sub(r"=(host|node)-a ", "=127.0.0.1 ", line.replace("=/shared/", "="))
        here = here.replace("nproc_per_node=4", "nproc_per_node=2")
        nodes.append(project.start("bash", "-c", here, env=environment(project)))
    for node in nodes:
        output = "".join(node.communicate(timeout=PATIENCE_S))
        assert node.returncode == 0, output
    logs = [log.read_text() for log in project.cwd.glob("sweeps/*/*/.ddp/rank_*.log")]
    assert sorted(re.findall(r"rank (\d of \d with lr [\d.]+)", "".join(logs))) == [
        f"{rank} of 4 with lr {lr}" for rank in range(4) for lr in ("0.01", "0.1")
    ]


def test_the_command_for_a_cluster_submits(project: Runner, slurm: SlurmCluster) -> None:
    """Without `dry_run`, and with what the cluster of the tests has, jobs have the ranks of both nodes."""
    command = next(line for block in blocks(SLURM) for line in block.lines if "gpus_per_node=8" in line)
    for there, here in (("=8", "=2"), ("partition=gpu", "partition=test"), (DRY_RUN, "hydra.sweep.dir=sweeps/slurm")):
        assert there in command
        command = command.replace(there, here)
    ran = project.run("bash", "-c", command, env=environment(project), timeout_s=240)
    assert ran.returncode == 0, ran.output
    logs = [log.read_text() for log in project.cwd.glob("sweeps/slurm/*/.ddp/rank_*.log")]
    assert sorted(re.findall(r"rank (\d of \d with lr [\d.]+)", "".join(logs))) == [
        f"{rank} of 4 with lr {lr}" for rank in range(4) for lr in ("0.01", "0.1")
    ]


@pytest.mark.sample("README")
@pytest.mark.parametrize("page", [README, MOVING], ids=lambda page: page.stem)
def test_the_config_that_chooses_the_launcher(project: Runner, page: Path) -> None:
    """With the lines of the page in the config, plain `python train.py` starts two ranks."""
    (project.cwd / "conf/config.yaml").write_text(config(page, "config") + CONFIG)
    ran = start(project, "python train.py")
    assert ran.returncode == 0, ran.output
    assert "2 ranks each" in ran.output
