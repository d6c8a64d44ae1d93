"""Lightning Fabric: `devices` is the number of ranks, and the launcher starts them.

python fabric_ddp.py -m hydra/launcher=ddp_subprocess 'hydra.launcher.nproc_per_node=${devices}' lr=0.1,0.01
"""

import hydra
import lightning
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset

ConfigStore.instance().store(name="fabric_ddp", node={"lr": 0.1, "devices": 2, "accelerator": "cpu"})


@hydra.main(version_base=None, config_path=None, config_name="fabric_ddp")
def main(cfg: DictConfig) -> float:
    """Learn to add four numbers, and return the last loss, averaged over all ranks."""
    fabric = lightning.Fabric(devices=cfg.devices, accelerator=cfg.accelerator, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=cfg.lr))
    batches = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=8))
    for (batch,) in batches:
        optimizer.zero_grad()
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        fabric.backward(loss)
        optimizer.step()
    print(f"{len(batches)} steps on {fabric.world_size} ranks")
    return float(fabric.all_reduce(loss.detach(), reduce_op="mean"))


if __name__ == "__main__":
    main()
