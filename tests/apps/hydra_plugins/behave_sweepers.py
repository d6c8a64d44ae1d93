"""Small sweepers: one notes every JobReturn of the launcher, one checks no overrides, one goes on from values.

They are real plugins (this folder joins the namespace package `hydra_plugins` of programs that lie beside it), as Hydra
takes sweepers from that package only.
"""

import contextlib
import io
import json
import os
import random
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


def describe(result: JobReturn) -> dict:
    """Return what a test wants to know of a JobReturn, as plain data."""
    failed = result.status == JobStatus.FAILED
    value: object = None
    try:
        # Hydra says on stderr that it raises; it shall say so once, when the sweeper looks.
        with contextlib.redirect_stderr(io.StringIO()):
            value = result.return_value
    except Exception as error:  # Whatever the job raised.
        value = error
    return {
        "status": result.status.name,
        "overrides": list(result.overrides or []),
        "task_name": result.task_name,
        "working_dir": result.working_dir,
        "x": result.cfg.get("x") if result.cfg is not None else None,
        "job_num": result.hydra_cfg.hydra.job.num if result.hydra_cfg is not None else None,
        "module": type(value).__module__,
        "type": type(value).__qualname__,
        "value": "" if failed else repr(value),
        "text": "".join(traceback.format_exception(value)) if isinstance(value, BaseException) else "",
    }


class RecordingSweeper(BasicSweeper):
    """The basic sweeper, which also writes `returns.json` before it looks at the results."""

    def setup(self, **arguments: Any) -> None:
        super().setup(**arguments)
        assert self.launcher is not None
        original = self.launcher.launch

        def launch(job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            began = time.time()
            results = original(job_overrides, initial_job_idx=initial_job_idx)
            facts = {"began": began, "ended": time.time(), "returns": [describe(result) for result in results]}
            (Path(os.environ["BEHAVE_DIR"]) / "returns.json").write_text(json.dumps(facts), encoding="utf-8")
            return results

        self.launcher.launch = launch  # type: ignore[method-assign]


class UncheckedSweeper(RecordingSweeper):
    """Hands the overrides over as they are, as sweepers do that sample values (Optuna, Ax)."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        return

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        # Only here, as BasicSweeper's own parsing refuses some of what this sweeper is to pass on.
        self.batch_index += 1
        return [text.split(" ") for text in os.environ["BEHAVE_OVERRIDES"].split(";")]

    def sweep(self, arguments: list[str]) -> Any:
        return super().sweep([])


class ClimbingSweeper(Sweeper):
    """Looks for the least value, batch by batch, around the best x so far: it is shaped like Ax's and Nevergrad's.

    Args:
        n_trials: How many jobs there are.
        batch_size: How many of them are handed over at a time.
        seed: Of the random numbers.
    """

    def __init__(self, n_trials: int, batch_size: int, seed: int) -> None:
        self._n_trials, self._batch_size, self._random = n_trials, batch_size, random.Random(seed)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        best, trials = (float("inf"), 0.0), []
        for first in range(0, self._n_trials, self._batch_size):
            count = min(self._batch_size, self._n_trials - first)
            batch = [best[1] + self._random.uniform(-1, 1) for _ in range(count)]
            jobs = [[*arguments, f"x={x!r}"] for x in batch]
            returns = self._launcher.launch(jobs, initial_job_idx=first)
            values = [float(one.return_value) for one in returns]
            trials.append({"first": first, "x": batch, "values": values})
            best = min(best, *zip(values, batch, strict=True))
        result = {"best_value": best[0], "best_x": best[1], "trials": trials}
        Path(self._config.hydra.sweep.dir, "climbed.json").write_text(json.dumps(result), encoding="utf-8")


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="climbing",
    node={"_target_": f"{__name__}.{ClimbingSweeper.__name__}", "n_trials": 5, "batch_size": 2, "seed": 1},
    provider="behave",
)
for name, sweeper in (("recording", RecordingSweeper), ("unchecked", UncheckedSweeper)):
    ConfigStore.instance().store(
        group="hydra/sweeper",
        name=name,
        node={"_target_": f"{__name__}.{sweeper.__name__}", "max_batch_size": None, "params": None},
        provider="behave",
    )
