"""Config classes that no import finds (`make_dataclass`, one defined in a function), and ones of a sibling module."""

from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from observe import attempt, observe
from omegaconf import OmegaConf
from shapes import Shape, Side


class Kind(Enum):
    RED = 1
    BLUE = 2


Color = Enum("Color", "CYAN PINK")
Leaf = make_dataclass("Leaf", [("kind", Kind, Kind.RED), ("where", Path, Path("leaf")), ("size", int, 3)])
Branch = make_dataclass(
    "Branch",
    [("leaf", Leaf, field(default_factory=Leaf)), ("more", list[Leaf], field(default_factory=lambda: [Leaf()]))],
)


def local_class() -> Any:
    @dataclass
    class Local:
        note: str | None = None
        kind: Kind = Kind.BLUE
        color: Color = Color.PINK

    return Local


Local = local_class()
# Two classes of one name: only the second is found under it.
Twin = make_dataclass("Twin", [("first", int, 1)])
first_twin = Twin
Twin = make_dataclass("Twin", [("second", int, 2)])

Config = make_dataclass(
    "Config",
    [
        ("branch", Branch, field(default_factory=Branch)),
        ("local", Local, field(default_factory=Local)),
        ("one", first_twin, field(default_factory=first_twin)),
        ("two", Twin, field(default_factory=Twin)),
        ("shape", Shape, field(default_factory=Shape)),
    ],
)

ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg: Any) -> None:
    leaf = OmegaConf.to_object(cfg.branch.leaf)
    observe(
        cfg,
        kind_class=type(cfg.branch.leaf.kind) is Kind and type(cfg.local.kind) is Kind,
        color_class=type(cfg.local.color) is Color,
        shape_class=OmegaConf.get_type(cfg.shape) is Shape and type(cfg.shape.side) is Side,
        leaf=leaf,
        leaf_made_of=[type(leaf).__name__, sorted(type(leaf).__dataclass_fields__)],
        wrong_type=attempt(lambda: setattr(cfg.branch.leaf, "size", "big")),
        assignable=attempt(lambda: cfg.branch.more.append(leaf)),
    )


if __name__ == "__main__":
    main()
