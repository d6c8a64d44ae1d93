"""The plugins that stand in for a sweeper: in a rank, and if jobs of a sampling sweep are run again."""

import sys
from typing import Any

from hydra._internal.core_plugins import basic_sweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
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


class DDPRankCommand(SearchPathPlugin):
    """Leave to a rank the overrides of its own command alone.

    A program that adds overrides to `sys.argv` adds them in its ranks, too. They are in the frozen config already, and
    mean nothing to the config with which a rank starts.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Leave the search path as it is. This is the one place between Hydra's parsing and its first compose."""
        own = _overrides_of_rank(sys.orig_argv)
        frame = sys._getframe() if own else None
        while frame is not None:
            args = frame.f_locals.get("args") if frame.f_code.co_name == "_run_hydra" else None
            if args is not None and args.config_name == "ddp_rank":
                args.overrides[:] = own
            frame = frame.f_back


def _overrides_of_rank(argv: list[str]) -> list[str]:
    """Return what the command of a rank says to Hydra; empty: it is no rank's."""
    for place, argument in enumerate(argv):
        if argument.startswith("hydra.sweeper.run_dir=") and "ddp_rank" in argv[:place]:
            return argv[place:]
    return []


class DDPGivenJobsSweeper(basic_sweeper.BasicSweeper):
    """Run just the jobs of the command line; the options of the sweeper whose place it takes are ignored."""

    def __init__(self, **_options: Any) -> None:
        super().__init__(max_batch_size=None)
