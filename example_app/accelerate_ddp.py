"""Hugging Face accelerate: it takes the ranks from the environment; no `accelerate launch`.

python accelerate_ddp.py -m hydra/launcher=ddp_subprocess hydra.launcher.nproc_per_node=2 lr=0.1,0.01
"""

import hydra
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset

ConfigStore.instance().store(name="accelerate_ddp", node={"lr": 0.1, "mixed_precision": "no", "cpu": True})


@hydra.main(version_base=None, config_path=None, config_name="accelerate_ddp")
def main(cfg: DictConfig) -> float:
    """Learn to add four numbers, and return the last loss, averaged over all ranks."""
    accelerator = Accelerator(cpu=cfg.cpu, mixed_precision=cfg.mixed_precision)
    set_seed(0)
    model = torch.nn.Linear(4, 1)
    batches = DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=8)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=cfg.lr), batches)
    for (batch,) in batches:
        optimizer.zero_grad()
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    print(f"{len(batches)} steps on {accelerator.num_processes} ranks")
    mean = float(accelerator.reduce(loss.detach(), reduction="mean"))
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    main()
