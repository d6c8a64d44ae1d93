"""Hugging Face Trainer: it takes the ranks from the environment.

python transformers_trainer.py -m hydra/launcher=ddp_subprocess hydra.launcher.nproc_per_node=2 lr=0.1,0.01
"""

import hydra
import torch
import transformers
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

CONFIG = {"lr": 0.1, "arguments": {"num_train_epochs": 1, "per_device_train_batch_size": 8, "use_cpu": True}}
ConfigStore.instance().store(name="transformers_trainer", node=CONFIG)


class Sum(torch.nn.Module):
    """Learns to add four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch, as the Trainer expects it."""
        return {"loss": (self.layer(x).squeeze(1) - x.sum(1)).square().mean()}


@hydra.main(version_base=None, config_path=None, config_name="transformers_trainer")
def main(cfg: DictConfig) -> float:
    """Train, and return the loss, averaged over all steps."""
    arguments = transformers.TrainingArguments(
        output_dir=HydraConfig.get().runtime.output_dir,
        learning_rate=cfg.lr,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **cfg.arguments,
    )
    transformers.set_seed(0)
    data = [{"x": row} for row in torch.rand(64, 4)]
    trained = transformers.Trainer(model=Sum(), args=arguments, train_dataset=data).train()
    print(f"{trained.global_step} steps on {arguments.world_size} ranks")
    return trained.training_loss


if __name__ == "__main__":
    main()
