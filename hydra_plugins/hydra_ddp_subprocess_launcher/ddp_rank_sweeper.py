"""The plugins that take the place of a sweeper: in a rank, and where jobs of a sampling sweep are run again."""

from typing import Any

from hydra._internal.core_plugins import basic_sweeper
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class DDPRankSweeper(Sweeper):
    """Run the one job that the launching process froze for this rank, then end the process."""

    def __init__(self, run_dir: str, overrides: str | None, **recipe: str | None) -> None:
        self._run_dir = run_dir
        self._overrides = overrides
        self._recipe = recipe
        self._hydra_context: HydraContext | None = None
        self._task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `sweep` needs."""
        self._hydra_context = hydra_context
        self._task_function = task_function

    def sweep(self, arguments: list[str]) -> Any:
        """Return only where the job belongs to another `hydra.main` of this program.

        Raises:
            SystemExit: after the job, so that code behind `main()` runs in the launching process alone.
        """
        from . import _rank

        assert self._hydra_context is not None and self._task_function is not None
        _rank.run_program_rank(self._run_dir, self._overrides, self._recipe, self._task_function, self._hydra_context)


class DDPGivenJobsSweeper(basic_sweeper.BasicSweeper):
    """Run just the jobs of the command line; the options of the sweeper whose place it takes are ignored."""

    def __init__(self, **_options: Any) -> None:
        super().__init__(max_batch_size=None)
