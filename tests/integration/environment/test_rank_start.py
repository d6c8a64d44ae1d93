"""What the start of a rank does not spend time on: modules that only others need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.runner import Runner

APP = """
import json, os, sys
import hydra


@hydra.main(version_base=None, config_path=None)
def main(cfg):
    with open({notes!r} + os.environ["RANK"], "w") as file:
        json.dump(sorted(sys.modules), file)


main()
"""
# All of this package that a rank needs; the plugins and their options Hydra imports in every program.
OURS = {
    *("config", "plugins", "common", "job"),
    *(f"common.{name}" for name in ("choices", "errors", "files", "processes", "protocol", "quoting", "signals")),
    *("common.text", *(f"job.{name}" for name in ("environment", "frozen_config", "hydra_state", "outcome", "rank"))),
}
OTHERS = {"asyncio", "concurrent.futures", "joblib", "multiprocessing", "optuna", "pynvml", "rich", "submitit", "torch"}


@pytest.mark.sample
def test_what_a_rank_imports(runner: Runner) -> None:
    """Of this package what it needs, and nothing that the launching process, a keeper or another launcher needs."""
    app = runner.cwd / "app.py"
    app.write_text(APP.format(notes=str(runner.cwd / "rank_")))
    assert runner.sweep(app, "+x=0").returncode == 0
    package = "hydra_plugins.hydra_ddp_subprocess_launcher."
    for rank in range(2):
        modules = set(json.loads((runner.cwd / f"rank_{rank}").read_text()))
        assert {name.removeprefix(package) for name in modules if name.startswith(package)} <= OURS
        assert modules & OTHERS == set()
