"""Configs that were composed once are kept, whole, until their jobs take them."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher.job.frozen_config import ConfigCache

# The old spellings of Hydra 1.3 and OmegaConf 2.3, which the next versions warn of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:register_new_resolver"),
    pytest.mark.filterwarnings("ignore:The version_base parameter is deprecated"),
]
# `hydra:` and `now:`, which Hydra registers when it starts.
setup_globals()


class Loader:
    """Stand in for Hydra's config loader: every composition is another config."""

    def __init__(self) -> None:
        self.composed: list[list[str]] = []

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        self.composed.append(sweep_overrides)
        content = {"n": len(self.composed), "o": sweep_overrides, "hydra": {"launcher": {"nproc_per_node": 2}}}
        config = OmegaConf.create(content, flags={"allow_objects": True})
        assert isinstance(config, DictConfig)
        return config


MASTER = OmegaConf.create({})


def taken(spool: ConfigCache, *overrides: str) -> DictConfig:
    kept = spool.take(overrides)
    assert kept is not None
    return kept.load()


def test_what_was_composed_is_not_composed_again() -> None:
    """A config that the sweeper composed is given out for the same overrides, once, in the order of composition."""
    loader = Loader()
    spool = ConfigCache(loader)
    spool.record()
    seen = [loader.load_sweep_config(MASTER, list(overrides)) for overrides in (["a=1"], ["a=2"], ["a=1"])]
    assert [config.n for config in seen] == [1, 2, 3]
    assert len(loader.composed) == 3
    first, second = taken(spool, "a=1"), taken(spool, "a=1")
    assert first == seen[0] and second == seen[2] and first is not seen[0]
    assert spool.take(["a=1"]) is None
    assert spool.take(["a=3"]) is None
    assert taken(spool, "a=2") == seen[1]


def test_the_order_of_overrides_matters() -> None:
    """Two jobs with the same overrides in another order are two jobs."""
    loader = Loader()
    spool = ConfigCache(loader)
    spool.record()
    loader.load_sweep_config(MASTER, ["a=1", "b=2"])
    assert spool.take(["b=2", "a=1"]) is None
    assert spool.take(["a=1", "b=2"]) is not None


def test_a_spool_that_has_stopped() -> None:
    """After `stop` the loader is as it was, nothing more is kept, and what was kept is still there, until `clear`."""
    loader = Loader()
    spool = ConfigCache(loader)
    spool.stop()
    spool.record()
    loader.load_sweep_config(MASTER, ["a=1"])
    loader.load_sweep_config(MASTER, ["a=2"])
    spool.stop()
    assert "load_sweep_config" not in vars(loader)
    loader.load_sweep_config(MASTER, ["a=3"])
    assert spool.take(["a=3"]) is None
    assert spool.take(["a=1"]) is not None
    spool.clear()
    assert spool.take(["a=2"]) is None
    spool.record()
    loader.load_sweep_config(MASTER, ["a=4"])
    assert spool.take(["a=4"]) is not None


def test_another_loader_is_not_watched() -> None:
    """Only the sweep's own loader is watched, and none of its class."""
    loader, other = Loader(), Loader()
    spool = ConfigCache(loader)
    spool.record()
    other.load_sweep_config(MASTER, ["a=1"])
    assert spool.take(["a=1"]) is None


def test_a_change_after_composition_is_not_seen() -> None:
    """What the sweeper does to its config later does not reach the job."""
    loader = Loader()
    spool = ConfigCache(loader)
    spool.record()
    loader.load_sweep_config(MASTER, ["a=1"]).n = 99
    assert taken(spool, "a=1").n == 1


def test_a_config_that_cannot_be_spooled() -> None:
    """A config that cannot be pickled is passed on all the same, and composed again for its job."""
    loader = Loader()
    compose_it = loader.load_sweep_config

    def with_lock_inside(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        config = compose_it(master_config, sweep_overrides)
        config.lock = threading.Lock()
        return config

    loader.load_sweep_config = with_lock_inside  # type: ignore[method-assign]
    spool = ConfigCache(loader)
    spool.record()
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(loader.load_sweep_config(MASTER, ["a=1"]))
    assert spool.take(["a=1"]) is None


def test_types_survive_the_spool(tmp_path: Path) -> None:
    """A config that Hydra composed comes out of the spool with its types, flags and Hydra's own node."""

    @dataclass
    class Local:
        """A class that no name finds."""

        x: int = 1
        y: str = "${x}"

    (tmp_path / "config.yaml").write_text("a: 1\nb: ${a}\n")
    with initialize_config_dir(version_base=None, config_dir=str(tmp_path)):
        composed = compose("config", overrides=["a=2"], return_hydra_config=True)
    OmegaConf.set_struct(composed, False)
    composed.local = Local
    OmegaConf.set_struct(composed, True)
    loader = Loader()
    loader.load_sweep_config = lambda master_config, sweep_overrides: composed  # type: ignore[method-assign]
    spool = ConfigCache(loader)
    spool.record()
    loader.load_sweep_config(MASTER, ["a=2"])
    kept = spool.take(["a=2"])
    assert kept is not None
    taken = kept.load()
    assert OmegaConf.get_type(taken.local) is Local
    assert OmegaConf.get_type(taken.hydra) is OmegaConf.get_type(composed.hydra)
    assert OmegaConf.is_struct(taken) and taken.b == 2
    assert OmegaConf.to_container(taken, resolve=False) == OmegaConf.to_container(composed, resolve=False)


def test_a_compose_that_fails_is_told() -> None:
    """A dry run hears of it, as the launcher will not be called; whoever composed gets the error."""
    told: list[str] = []

    class Failing:
        def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
            raise ValueError("broken")

    loader = Failing()
    spool = ConfigCache(loader, lambda: told.append("told"))
    spool.record()
    with pytest.raises(ValueError, match="broken"):
        loader.load_sweep_config(OmegaConf.create(), [])
    assert told == ["told"]
