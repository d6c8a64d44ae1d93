"""Plain torch with FSDP2: each rank has a part of the model.

python fsdp2.py -m hydra/launcher=ddp_subprocess hydra.launcher.nproc_per_node=2 lr=0.1,0.01
"""

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ConfigStore.instance().store(name="fsdp2", node={"lr": 0.1, "device": "cpu", "backend": "gloo"})


@hydra.main(version_base=None, config_path=None, config_name="fsdp2")
def main(cfg: DictConfig) -> float:
    """Learn to add four numbers, and return the last loss, averaged over all ranks."""
    dist.init_process_group(cfg.backend)
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(64, 4))
    batches = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    mesh = dist.device_mesh.init_device_mesh(cfg.device, (dist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(4, 1).to(cfg.device), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    for (batch,) in batches:
        optimizer.zero_grad()
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"{len(batches)} steps on {dist.get_world_size()} ranks")
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    dist.destroy_process_group()
    return float(mean)


if __name__ == "__main__":
    main()
