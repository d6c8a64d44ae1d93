"""An empty config: whatever it holds in a job came by overrides or by the user's own config folder."""

import hydra
from observe import observe
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> None:
    observe(cfg)


if __name__ == "__main__":
    main()
