"""Frameworks as people use them, with their real packages on the CPU: they find the group, and start no ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Runner
    from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.torch

HEAD = """
import json, os, sys
import hydra

with open(f"process_{os.getpid()}.json", "w") as file:
    json.dump({"rank": os.environ.get("RANK"), "job": os.environ.get("HYDRA_DDP_JOB_NUM")}, file)

def data():
    import torch
    return torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    return train(cfg)
"""
LIGHTNING = """
def train(cfg):
    import torch, lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 * cfg.x)

    trainer = lightning.Trainer(
        devices=2, num_nodes=cfg.get("nodes", 1), strategy="ddp", accelerator="cpu", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=2))
    return [trainer.world_size, trainer.global_step]
"""
FABRIC = """
def train(cfg):
    import torch, lightning

    fabric = lightning.Fabric(devices=2, strategy="ddp", accelerator="cpu")
    fabric.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data(), batch_size=2))
    for (batch,) in loader:
        fabric.backward(model(batch).mean())
        optimizer.step()
    return [fabric.world_size, len(loader)]
"""
ACCELERATE = """
def train(cfg):
    import torch, accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(data(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (batch,) in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
    accelerator.end_training()
    return [accelerator.num_processes, len(loader)]
"""
FSDP2 = """
def train(cfg):
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    sampler = torch.utils.data.DistributedSampler(data())
    loader = torch.utils.data.DataLoader(data(), batch_size=2, sampler=sampler)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(4, 2), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader:
        model(batch).mean().backward()
        optimizer.step()
    world = dist.get_world_size()
    dist.destroy_process_group()
    return [world, len(loader)]
"""
TRANSFORMERS = """
def train(cfg):
    import torch, transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            return {"loss": self.layer(x).mean()}

    trainer = transformers.Trainer(
        model=Model(),
        args=transformers.TrainingArguments(
            output_dir="trained", use_cpu=True, per_device_train_batch_size=2, num_train_epochs=1, report_to=[],
            save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=[{"x": row} for (row,) in data()],
    )
    trainer.train()
    return [trainer.args.world_size, trainer.state.global_step]
"""


def write_app(tmp_path: Path, body: str) -> Path:
    app = tmp_path / "app.py"
    app.write_text(f"{HEAD}{body}\nif __name__ == '__main__':\n    main()\n")
    return app


def values(folder: Path) -> list[object]:
    events = map(json.loads, (folder / ".ddp/journal.jsonl").read_text().splitlines())
    return [
        event["value"] for event in sorted(events, key=lambda one: one.get("job", 0)) if event["event"] == "JobEnded"
    ]


def ranks(runner: Runner) -> list[tuple[str, str]]:
    """Return job and rank of every process that ran the program as one."""
    notes = [json.loads(file.read_text()) for file in runner.cwd.glob("process_*.json")]
    return sorted((note["job"], note["rank"]) for note in notes if note["rank"] is not None)


@pytest.mark.parametrize(
    ("package", "body", "steps"),
    [
        pytest.param("lightning", LIGHTNING, 4, id="lightning"),
        pytest.param("lightning", FABRIC, 4, id="fabric"),
        pytest.param("accelerate", ACCELERATE, 4, id="accelerate"),
        pytest.param("torch", FSDP2, 4, id="fsdp2"),
        pytest.param("transformers", TRANSFORMERS, 4, id="transformers"),
    ],
)
def test_a_job_is_one_group_of_as_many_ranks_as_asked(
    runner: Runner, tmp_path: Path, package: str, body: str, steps: int
) -> None:
    """Two jobs of two ranks are four processes, each group shares its data, and the values come back."""
    pytest.importorskip(package)
    ran = runner.sweep(write_app(tmp_path, body), "+x=1,2")
    assert ran.returncode == 0, ran.output
    assert values(runner.cwd / "sweep") == [[2, steps]] * 2
    assert ranks(runner) == [(job, rank) for job in "01" for rank in "01"]


@pytest.mark.slurm
def test_lightning_on_two_nodes_of_slurm(runner: Runner, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Lightning takes the group that is there, and not what it knows about SLURM."""
    pytest.importorskip("lightning")
    ran = runner.python(
        write_app(tmp_path, LIGHTNING),
        "-m",
        "hydra/launcher=ddp_submitit_slurm",
        "hydra.launcher.nodes=2",
        "hydra.launcher.nproc_per_node=2",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}",
        "+x=1",
        "+nodes=2",
        env={"GLOO_SOCKET_IFNAME": slurm.interface},
        timeout_s=240,
    )
    assert ran.returncode == 0, ran.output
    assert values(runner.cwd / "sweep") == [[4, 2]]
    assert ranks(runner) == [("0", rank) for rank in "0123"]
