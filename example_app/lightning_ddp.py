"""Lightning: `devices` is the number of ranks, and the launcher starts them.

python lightning_ddp.py -m hydra/launcher=ddp_subprocess 'hydra.launcher.nproc_per_node=${trainer.devices}' lr=0.1,0.01
"""

import hydra
import lightning
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset

TRAINER = {"devices": 2, "num_nodes": 1, "accelerator": "cpu", "strategy": "ddp", "max_epochs": 1}
ConfigStore.instance().store(name="lightning_ddp", node={"lr": 0.1, "trainer": TRAINER})


class Sum(lightning.LightningModule):
    """Learns to add four numbers."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.layer = lr, torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:  # noqa: D102
        loss = (self.layer(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@hydra.main(version_base=None, config_path=None, config_name="lightning_ddp")
def main(cfg: DictConfig) -> float:
    """Train, and return the loss of the last epoch."""
    lightning.seed_everything(0)
    trainer = lightning.Trainer(**cfg.trainer, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Sum(cfg.lr), DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=8))
    print(f"{trainer.global_step} steps on {trainer.world_size} ranks")
    return float(trainer.callback_metrics["loss_epoch"])


if __name__ == "__main__":
    main()
