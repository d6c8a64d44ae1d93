"""Train a digit classifier with DistributedDataParallel, one process per rank: NCCL on GPUs, gloo on CPUs.

Runs as it is with `python`, with `torchrun`, and as the job of a Hydra multirun.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from models import cnn, mlp
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

log = logging.getLogger(__name__)
T = TypeVar("T")
Batch = tuple[Tensor, ...]

MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def build(kinds: dict[str, Callable[..., T]], cfg: DictConfig, *args: Any) -> T:
    """Call the one of `kinds` that `cfg.name` selects with the other keys of `cfg` as its options."""
    options = {str(key): value for key, value in cfg.items()}
    return kinds[options.pop("name")](*args, **options)


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the group that the environment describes, or form a group of one without it; yield this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # NCCL refuses two ranks on one GPU, so a machine with fewer GPUs than ranks trains on its CPUs.
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def load_data(seed: int) -> tuple[Subset[Batch], Subset[Batch]]:
    """Return the training and the validation part of scikit-learn's digits, the same on every rank."""
    from sklearn.datasets import load_digits  # Here, because the parent of a sweep needs no data and starts faster.

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, valid = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(seed))
    return train, valid


def evaluate(model: nn.Module, batches: DataLoader[Batch], device: torch.device) -> tuple[int, int]:
    """Return how many validation samples of all ranks are classified correctly, and how many there are."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in batches:
            hits = model(images.to(device)).argmax(dim=1) == labels.to(device)
            counts[0] += hits.sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct, total


def train(cfg: DictConfig, device: torch.device) -> float:
    """Train the configured model; return the accuracy, over all ranks, of the checkpoint that rank 0 writes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    torch.backends.cudnn.deterministic = True  # The seed alone does not fix the order of sums on a GPU.
    train_set, valid_set = load_data(cfg.seed)
    sampler: DistributedSampler[Batch] = DistributedSampler(train_set, seed=cfg.seed)
    train_batches = DataLoader(train_set, batch_size=max(1, cfg.batch_size // world_size), sampler=sampler)
    # DistributedSampler would repeat samples to give every rank equally many, and so count some of them twice.
    valid_batches = DataLoader(Subset(valid_set, range(rank, len(valid_set), world_size)), batch_size=cfg.batch_size)

    model = build(MODELS, cfg.model).to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = build(OPTIMIZERS, cfg.optimizer, ddp_model.parameters())
    if rank == 0:
        log.info("%s with %s, %d rank(s) on %s", cfg.model.name, cfg.optimizer.name, world_size, device.type)

    accuracy = 0.0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)  # Without it, every epoch would have the same order.
        model.train()
        for images, labels in train_batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        # Not through DDP, which expects equally many batches on every rank.
        correct, total = evaluate(model, valid_batches, device)
        accuracy = correct / total
        if rank == 0:
            log.info("epoch %d/%d: loss %.4f, %d of %d right", epoch + 1, cfg.epochs, loss.item(), correct, total)

    if rank == 0:
        path = Path(HydraConfig.get().runtime.output_dir) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "config": OmegaConf.to_container(cfg, resolve=True)}, path)
        log.info("final accuracy %.4f", accuracy)
    return accuracy


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Train one job of the sweep; what it returns is what the sweep reports."""
    with process_group() as device:
        return train(cfg, device)


if __name__ == "__main__":
    main()
