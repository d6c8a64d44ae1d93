"""A config of dataclasses and an Enum that live in `__main__`, with one of each kind of field."""

import logging
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from observe import attempt, observe
from omegaconf import II, MISSING, OmegaConf

log = logging.getLogger(__name__)


class Kind(Enum):
    RED = 1
    BLUE = "blue"


@dataclass
class Inner:
    x: int = 1
    rate: float = 1e-3
    where: Path = Path("inner/path")
    kind: Kind = Kind.RED


@dataclass
class Deeper(Inner):
    more: Inner | None = field(default_factory=Inner)


@dataclass
class Optimizer:
    lr: float = MISSING


@dataclass
class Adam(Optimizer):
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class Sgd(Optimizer):
    lr: float = 0.01
    momentum: float = 0.9


@dataclass(frozen=True)
class Fixed:
    """Frozen: OmegaConf makes it read-only."""

    value: int = 7


@dataclass
class Config:
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"optimizer": "adam"}])
    optimizer: Optimizer = MISSING
    kind: Kind = Kind.RED
    path: Path = Path("some/where.txt")
    pair: tuple[int, int] = (1, 2)
    inner: Inner = field(default_factory=Deeper)
    fixed: Fixed = field(default_factory=Fixed)
    many: list[Inner] = field(default_factory=lambda: [Inner(), Deeper(x=2)])
    by_name: dict[str, Inner] = field(default_factory=lambda: {"a": Inner(x=3)})
    by_kind: dict[Kind, float] = field(default_factory=lambda: {Kind.BLUE: 0.5})
    by_number: dict[int, list[int]] = field(default_factory=lambda: {1: [1], 2: []})
    kinds: list[Kind] = field(default_factory=lambda: [Kind.BLUE])
    maybe: int | None = None
    needed: int = MISSING
    either: int | str = 3
    raw: bytes = b"\x00\xff"
    anything: Any = None
    doubled: float = II("inner.rate")
    text: str = "x"


store = ConfigStore.instance()
store.store(name="config", node=Config)
store.store(group="optimizer", name="adam", node=Adam)
store.store(group="optimizer", name="sgd", node=Sgd)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg: Config) -> None:
    log.info("kind %s", cfg.kind)
    observe(
        cfg,
        config_class=OmegaConf.get_type(cfg) is Config,
        kind_class=type(cfg.kind) is Kind and cfg.kind is Kind[cfg.kind.name],
        kinds_class=all(type(kind) is Kind for kind in [*cfg.kinds, *cfg.by_kind]),
        path_class=isinstance(cfg.path, Path) and isinstance(cfg.inner.where, Path),
        inner_class=OmegaConf.get_type(cfg.inner) is Deeper and OmegaConf.get_type(cfg.many[0]) is Inner,
        optimizer_class=OmegaConf.get_type(cfg.optimizer) in (Adam, Sgd),
        object_class=isinstance(OmegaConf.to_object(cfg.inner), Deeper),
        wrong_kind=attempt(lambda: setattr(cfg, "kind", "GREEN")),
        wrong_type=attempt(lambda: setattr(cfg.inner, "x", "many")),
        unknown_key=attempt(lambda: setattr(cfg, "bogus", 1)),
        read_only=attempt(lambda: setattr(cfg.fixed, "value", 8)),
    )


if __name__ == "__main__":
    main()
