"""Composing is what takes the time before the first job, so a config is composed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.runner import Runner

APP = """
import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl

calls = 0
compose = ConfigLoaderImpl.load_sweep_config

def counted(self, *args, **kwargs):
    global calls
    calls += 1
    return compose(self, *args, **kwargs)

ConfigLoaderImpl.load_sweep_config = counted

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    assert calls == 0, "a rank composed the user's config"
    return cfg.x

if __name__ == "__main__":
    main()
    print("composed", calls)
"""


@pytest.mark.sample("one batch")
@pytest.mark.parametrize("batches", [[], ["hydra.sweeper.max_batch_size=2"]], ids=["one batch", "batches of 2"])
def test_a_grid_sweep_composes_each_job_once(runner: Runner, tmp_path: Path, batches: list[str]) -> None:
    """The basic sweeper's own check composes every job; nothing is composed after it, in whatever process."""
    app = tmp_path / "app.py"
    app.write_text(APP)
    ran = runner.sweep(app, "+x=1,2,3", *batches)
    assert ran.returncode == 0, ran.output
    assert "composed 3\n" in ran.stdout
