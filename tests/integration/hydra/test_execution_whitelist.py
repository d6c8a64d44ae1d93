"""Hydra 1.4's execution whitelist, which an app sets in its `hydra.main`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import hydra
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.runner import Runner

pytestmark = pytest.mark.skipif(
    "execution_whitelist" not in inspect.signature(hydra.main).parameters,
    reason="this Hydra version has no execution whitelist",
)

APP = """
import hydra
from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from hydra.utils import instantiate

class Recorder(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        print("callback saw", job_return.return_value)

ConfigStore.instance().store(name="config", node={
    "allowed": {"_target_": "fractions.Fraction", "numerator": 1, "denominator": "${x}"},
    "refused": {"_target_": "decimal.Decimal", "value": "1"},
    "x": 2,
    "which": "allowed",
    "hydra": {"callbacks": {"recorder": {"_target_": "__main__.Recorder"}}},
})

@hydra.main(config_path=None, config_name="config", execution_whitelist=["fractions.Fraction", "__main__.Recorder"])
def main(cfg):
    return float(instantiate(cfg[cfg.which]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.sample
def test_an_app_with_a_whitelist_runs_and_its_whitelist_holds_in_the_ranks(runner: Runner, tmp_path: Path) -> None:
    """What the app allows works in every rank, callbacks too; what it does not allow is refused there."""
    app = tmp_path / "app.py"
    app.write_text(APP)
    allowed = runner.sweep(app, "x=2,4", env={"PYTHONWARNINGS": "error"})
    assert allowed.returncode == 0, allowed.output
    assert "callback saw 0.5" in allowed.stdout
    assert "callback saw 0.25" in allowed.stdout
    refused = runner.sweep(app, "which=refused")
    assert refused.returncode == 1
    assert "decimal.Decimal" in refused.output
