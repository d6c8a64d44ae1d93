"""A read-only config: OmegaConf makes the fields of a frozen dataclass so, here the root's."""

from dataclasses import dataclass, field

import hydra
from hydra.core.config_store import ConfigStore
from observe import attempt, observe
from omegaconf import DictConfig


@dataclass(frozen=True)
class Inner:
    b: int = 2


@dataclass(frozen=True)
class Config:
    a: int = 1
    inner: Inner = field(default_factory=Inner)


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg: DictConfig) -> None:
    observe(cfg, written=attempt(lambda: setattr(cfg, "a", 2)), deleted=attempt(lambda: cfg.inner.pop("b")))


if __name__ == "__main__":
    main()
