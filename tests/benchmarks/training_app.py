"""For compare.py: a tiny training on two ranks. Returns when its function was entered, Unix time in seconds."""

from __future__ import annotations

import time

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

ConfigStore.instance().store(name="training", node={"lr": 0.1, "steps": 5, "job": 0})


@hydra.main(version_base=None, config_path=None, config_name="training")
def main(cfg: DictConfig) -> float:
    entered = time.time()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    weights = torch.zeros(64, requires_grad=True)
    for _ in range(cfg.steps):
        loss = ((torch.randn(32, 64) @ weights - 1) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        dist.all_reduce(gradient)
        with torch.no_grad():
            weights -= cfg.lr * gradient / dist.get_world_size()
    dist.destroy_process_group()
    return entered


if __name__ == "__main__":
    main()
