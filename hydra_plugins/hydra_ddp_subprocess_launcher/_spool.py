"""Composed configs that are put by: those that the sweeper has composed anyway, and those that it gets back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ._freeze import SIZE_OPTIONS, asked_size, hydra_config
from ._pickling import LocalPickle

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptConfig:
    """A composed job config that was put by, about 10 kB for 350 nodes; live, it takes a hundred times that.

    Attributes:
        pickle: Of the config.
        size: What `nproc_per_node` and `devices_per_rank` are in it, resolved; None: they cannot be.
    """

    pickle: LocalPickle
    size: tuple[Any, Any] | None

    @classmethod
    def put_by(cls, config: DictConfig) -> KeptConfig | None:
        """Return a config to keep; None when it cannot be pickled."""
        try:
            return cls(LocalPickle.of(config), _size(config))
        except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
            # It is composed again when its turn comes, and then named in the job's error.
            _log.debug("A config cannot be kept: %s: %s", type(error).__name__, error)
            return None

    def load(self) -> DictConfig:
        """Return the config."""
        config = self.pickle.load()
        assert isinstance(config, DictConfig)
        return config


def _size(config: DictConfig) -> tuple[Any, Any] | None:
    try:
        if not any(OmegaConf.is_interpolation(config.hydra.launcher, name) for name in SIZE_OPTIONS):
            return asked_size(config)
        with hydra_config(config):
            return asked_size(config)
    except Exception:  # noqa: BLE001  (a resolver may raise anything; the job fails of it when its turn comes)
        return None


class ComposeSpool:
    """Configs that the sweeper composed for its own check, kept so that they need not be composed a second time.

    Args:
        config_loader: Its `load_sweep_config` is watched while the spool records.
        failed: Is called when composing fails, as the launcher is then not called.
    """

    def __init__(self, config_loader: Any, failed: Callable[[], object] = lambda: None) -> None:
        self._loader = config_loader
        self._failed = failed
        self._configs: dict[tuple[str, ...], list[KeptConfig]] = {}

    def record(self) -> None:
        """Watch, until `stop`, what anybody composes with this loader."""
        compose = self._loader.load_sweep_config

        def load_sweep_config(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
            try:
                config: DictConfig = compose(master_config, sweep_overrides)
            except BaseException:
                self._failed()
                raise
            kept = KeptConfig.put_by(config)
            if kept is not None:
                self._configs.setdefault(tuple(sweep_overrides), []).append(kept)
            return config

        self._loader.load_sweep_config = load_sweep_config

    def stop(self) -> None:
        """Give the loader its own method back."""
        vars(self._loader).pop("load_sweep_config", None)

    def take(self, overrides: Sequence[str]) -> KeptConfig | None:
        """Return a config composed from these overrides, each once; None when there is none."""
        kept = self._configs.get(tuple(overrides))
        return kept.pop(0) if kept else None

    def clear(self) -> None:
        """Forget all."""
        self._configs.clear()
