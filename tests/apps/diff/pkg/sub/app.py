"""To be run by `python -m pkg.sub.app`: relative imports, configs as package data, and arguments of its own."""

import argparse
import sys
from enum import Enum

import hydra
from hydra.core.config_store import ConfigStore
from observe import observe
from omegaconf import DictConfig

from ..words import Word

parser = argparse.ArgumentParser()
parser.add_argument("--own", default="not given")
own, rest = parser.parse_known_args()
# A habit seen in the field: Hydra gets what is left, and an option that the program always wants.
sys.argv = [sys.argv[0], *rest, "hydra.job.chdir=true"]


class Kind(Enum):
    RED = 1


ConfigStore.instance().store(group="schema", name="kinds", node={"kind": Kind.RED, "word": Word.YES})


@hydra.main(version_base="1.3", config_path="pkg://pkg.conf", config_name="main")
def main(cfg: DictConfig) -> None:
    observe(cfg, own=own.own, kind_class=type(cfg.schema.kind) is Kind, word_class=type(cfg.schema.word) is Word)


if __name__ == "__main__":
    main()
