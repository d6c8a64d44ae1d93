"""The command under the table of a sweep runs exactly the failed jobs, whatever chose the sweeper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.runner import Runner

APP = """
import os
import hydra
from pathlib import Path

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    with open(os.path.join(hydra.utils.get_original_cwd(), "ran"), "a") as file:
        file.write(f"{cfg.x}\\n")
    if cfg.x > 0 and not Path(hydra.utils.get_original_cwd(), "fixed").exists():
        raise ValueError("no")
    return cfg.x ** 2

main()
"""
SWEEPER = """
  sweeper:
    n_trials: 3
    n_jobs: 3
    max_failure_rate: 1.0
    sampler: {seed: 3}
    params: {x: "interval(-5,5)"}
"""
CONFIGS = {
    "train.yaml": "defaults:\n  - _self_\n  - optional search: null\nx: 0\n",
    "own.yaml": "defaults:\n  - override hydra/sweeper: optuna\n  - override hydra/sweeper/sampler: random\n"
    f"  - _self_\nx: 0\nhydra:{SWEEPER}",
    "search/random.yaml": "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n"
    f"  - override /hydra/sweeper/sampler: random\nhydra:\n  mode: MULTIRUN{SWEEPER}",
    "params.yaml": 'x: 0\nhydra:\n  mode: MULTIRUN\n  sweeper: {params: {x: "-1,1,2"}}\n',
}
TYPED = (
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=random",
    "hydra.sweeper.sampler.seed=3",
    "hydra.sweeper.n_trials=3",
    "hydra.sweeper.n_jobs=3",
    "hydra.sweeper.max_failure_rate=1.0",
    "x=interval(-5,5)",
)


@pytest.mark.parametrize(
    "arguments",
    [("-m", *TYPED), ("search=random",), ("--config-name", "own", "-m"), ("--config-name", "params")],
    ids=["typed", "config group", "config", "parameters of the basic sweeper"],
)
def test_it_runs_what_failed(runner: Runner, arguments: tuple[str, ...]) -> None:
    """Of the sampled jobs and of a sweep that is in the config, pasted, it runs the failed ones and no other."""
    if "params" not in arguments:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    for name, text in CONFIGS.items():
        path = runner.cwd / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (runner.cwd / "app.py").write_text(APP)
    sweep = ["hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=1", "hydra.sweep.dir=sweep"]
    ran = runner.python("app.py", *arguments, *sweep)
    notes = runner.cwd / "ran"
    failed = sorted(x for x in notes.read_text().split() if float(x) > 0)
    assert failed, ran.output
    commands = re.findall(r"^.*app\.py (?:.* )?-m .*$", ran.output, re.MULTILINE)
    assert commands, ran.output
    notes.unlink()
    Path(runner.cwd / "fixed").touch()
    for command in commands:
        again = runner.run("bash", "-c", command)
        assert again.returncode == 0, again.output
    assert sorted(notes.read_text().split()) == failed


def test_what_cannot_be_composed_is_not_printed(runner: Runner) -> None:
    """A config that is gone when the sweep ends makes no command: there is the reason instead."""
    (runner.cwd / "conf" / "search").mkdir(parents=True)
    (runner.cwd / "conf" / "train.yaml").write_text("x: 0\ndefaults:\n  - _self_\n  - search: one\n")
    (runner.cwd / "conf" / "search" / "one.yaml").write_text("y: 1\n")
    gone = APP.replace(
        "    if cfg",
        '    Path(hydra.utils.get_original_cwd(), "conf/search/one.yaml").unlink(missing_ok=True)\n    if cfg',
    )
    (runner.cwd / "app.py").write_text(gone)
    ran = runner.sweep(runner.cwd / "app.py", "x=1", nproc=1)
    assert ran.returncode == 1
    assert re.findall(r"^.*app\.py (?:.* )?-m .*$", ran.output, re.MULTILINE) == []
    assert re.search(r"^# .*search/one", ran.output, re.MULTILINE), ran.output
