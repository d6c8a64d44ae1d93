"""A config that holds plain Python objects (OmegaConf's flag `allow_objects`) and nodes with other flags."""

import math
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from observe import observe
from omegaconf import DictConfig, OmegaConf


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Thing({self.number})"


def helper() -> str:
    return "helped"


thing = Thing(3)
objects = OmegaConf.create(
    {
        "thing": thing,
        "same": thing,
        "kind": Thing,
        "function": helper,
        "other_function": lambda x: x + thing.number,
        "imported": math.sqrt,
        "list": [thing, 1j, range(3)],
    },
    flags={"allow_objects": True},
)


@dataclass
class Config:
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"objects": "some"}, {"free": "struct_off"}])
    objects: Any = None
    free: Any = None
    a: int = 1


store = ConfigStore.instance()
store.store(name="config", node=Config)
store.store(group="objects", name="some", node=objects)
store.store(group="free", name="struct_off", node=OmegaConf.create({"x": {"y": 1}}, flags={"struct": False}))


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg: DictConfig) -> None:
    found = cfg.objects
    observe(
        cfg,
        thing_class=type(found.thing) is Thing and type(found.list[0]) is Thing and found.kind is Thing,
        function_class=found.function is helper and found.imported is math.sqrt,
        shared=[found.thing is found.same, found.thing is found.list[0]],
        called=[found.function(), found.other_function(1), found.imported(9)],
    )


if __name__ == "__main__":
    main()
