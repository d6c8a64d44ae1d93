"""hydra-zen: classes made by `builds` and `make_config`, groups in its store, and its `zen` wrapper around the task."""

from enum import Enum
from pathlib import Path
from typing import Any

import hydra
from hydra_zen import builds, just, make_config, store, zen
from observe import observe
from omegaconf import DictConfig, OmegaConf


class Kind(Enum):
    RED = 1
    BLUE = 2


class Net:
    """A class of the user's, to be built by `instantiate` in the job."""

    def __init__(self, width: int, kind: Kind = Kind.RED, where: Path = Path("net"), **rest: Any) -> None:
        self.width, self.kind, self.where, self.rest = width, kind, where, rest

    def __repr__(self) -> str:
        return f"Net({self.width}, {self.kind}, {self.where}, {self.rest})"


def activation(x: float) -> float:
    return x


def fit(net: Net, rate: float, sizes: tuple[int, int] = (1, 2)) -> dict[str, float]:
    return {"rate": rate, "width": net.width, "sizes": sum(sizes)}


NetConfig = builds(Net, width=3, populate_full_signature=True, builds_bases=())
FitConfig = builds(fit, net=NetConfig, rate="${rate}", zen_partial=True, populate_full_signature=True)
Config = make_config(
    hydra_defaults=["_self_", {"net": "small"}],
    rate=0.5,
    net=NetConfig,
    fit=FitConfig,
    activation=just(activation),
    nested=make_config(a=1, b=make_config(c=[1, 2])),
    kind=Kind.BLUE,
)

store(Config, name="config")
store(NetConfig(width=1), group="net", name="small")
store(NetConfig(width=100, kind=Kind.BLUE), group="net", name="large")
store.add_to_hydra_store()


def task(zen_cfg: DictConfig, net: Net, fit: Any, activation: Any, kind: Kind) -> None:
    observe(
        zen_cfg,
        net=net,
        net_class=type(net) is Net and type(net.kind) is Kind,
        kind_class=type(zen_cfg.kind) is Kind and type(kind) is Kind,
        fitted=fit(net=net),
        activation_is=activation is globals()["activation"],
        names=sorted(f"{OmegaConf.get_type(zen_cfg, key).__name__}" for key in zen_cfg),
    )


if __name__ == "__main__":
    hydra.main(version_base="1.3", config_path=None, config_name="config")(zen(task))()
