"""The plugins that Hydra finds: the launchers, a hint for a launcher that has no effect, and the sweepers."""

import os
import sys
from abc import abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins import basic_sweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from .launcher.sweep import Sweep


class _DDPLauncher(Launcher):
    """Run every job of a multirun as one group of DDP ranks."""

    def __init__(self, **options: Any) -> None:
        # Hydra has resolved the interpolations in `options`; the launcher reads the options from the configs instead.
        self._sweep: Sweep | None = None

    @abstractmethod
    def _open_sweep(self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> "Sweep":
        """Check the options, and choose how to run the jobs of the sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the options and how this process was started.

        Raises:
            LauncherError: for an error that the user can fix, before anything is started.
        """
        self._sweep = self._open_sweep(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one batch of jobs.

        Args:
            job_overrides: One list of override strings per job.
            initial_job_idx: Number of the first job; the others count up from it.

        Returns:
            One JobReturn per job, in the order of `job_overrides`, even if some failed.
        """
        assert self._sweep is not None
        return self._sweep.launch(job_overrides, initial_job_idx)


class DDPSubprocessLauncher(_DDPLauncher):
    """Run jobs on this machine."""

    def _open_sweep(self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> "Sweep":
        from .launcher.sweep import open_sweep
        from .slurm.jobs import ClusterSubmissions

        return open_sweep(hydra_context, task_function, config, ClusterSubmissions())


class DDPSubmititSlurmLauncher(_DDPLauncher):
    """Run jobs on SLURM, on one or more nodes each."""

    _executor = "slurm"

    def _open_sweep(self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> "Sweep":
        from .slurm.batch import open_submitted_sweep

        return open_submitted_sweep(hydra_context, task_function, config, self._executor)


class DDPSubmititLocalLauncher(DDPSubmititSlurmLauncher):
    """Run jobs through submitit on this machine, to try it out."""

    _executor = "local"


class DDPLauncherHint(SearchPathPlugin):
    """Print a hint if the command line chooses a launcher that the run will not or cannot use."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Print at most one line, and leave the search path unchanged."""
        chosen = (arg for arg in sys.argv[1:] if arg.lstrip("+").startswith("hydra/launcher=ddp_"))
        argument = next(chosen, "")
        if "=ddp_submitit" in argument and find_spec("hydra_plugins.hydra_submitit_launcher") is None:
            sys.stderr.write(
                f"{argument} needs submitit's launcher for Hydra, which is not installed. Install it: "
                'pip install "hydra-ddp-subprocess-launcher[submitit]"\n'
            )
            return
        if not argument or "HYDRA_DDP_PAYLOAD_SHA256" in os.environ or _runs_no_single_job(sys.argv[1:]):
            return
        if not any(_says_multirun(element.path) for element in search_path.get_path()):
            sys.stderr.write(
                f"{argument} has no effect in a single run: Hydra uses launchers in a multirun only. "
                "Add -m, or set `hydra.mode: MULTIRUN` in the config.\n"
            )


def _runs_no_single_job(argv: list[str]) -> bool:
    from hydra._internal.utils import get_args_parser

    args, _ = get_args_parser().parse_known_args(argv)
    shows = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
    return bool(args.multirun or shows or any(arg.upper() == "HYDRA.MODE=MULTIRUN" for arg in argv))


def _says_multirun(path: str | None) -> bool:
    """Return whether any file in a config directory may set the mode, as the primary config is not known yet."""
    if path is None or not path.startswith("file://"):
        return False
    files = Path(path.removeprefix("file://")).glob("*.y*ml")
    return any("MULTIRUN" in file.read_text(encoding="utf-8", errors="replace").upper() for file in files)


class DDPRankSweeper(Sweeper):
    """Run the one job that the launching process froze for this rank, then end the process."""

    def __init__(self, run_dir: str, overrides: str | None, **compose_args: str | None) -> None:
        self._run_dir = run_dir
        self._overrides = overrides
        self._compose_args = compose_args
        self._hydra_context: HydraContext | None = None
        self._task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the arguments for `sweep`."""
        self._hydra_context = hydra_context
        self._task_function = task_function

    def sweep(self, arguments: list[str]) -> Any:
        """Run the job. Return only if the job belongs to another `hydra.main` of this program.

        Raises:
            SystemExit: after the job, so that code after `main()` runs only in the launching process.
        """
        from .job import rank

        assert self._hydra_context is not None and self._task_function is not None
        rank.run_program_rank(
            self._run_dir, self._overrides, self._compose_args, self._task_function, self._hydra_context
        )


class DDPRankCommand(SearchPathPlugin):
    """Limit a rank to the overrides of its own command.

    A program that adds overrides to `sys.argv` adds them in its ranks, too. The frozen config contains them already,
    and the config with which a rank starts has no such keys.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Replace Hydra's overrides, as no other hook runs between parsing and composing. Keep the search path."""
        own = _overrides_of_rank(sys.orig_argv)
        frame = sys._getframe() if own else None
        while frame is not None:
            args = frame.f_locals.get("args") if frame.f_code.co_name == "_run_hydra" else None
            if args is not None and args.config_name == "ddp_rank":
                args.overrides[:] = own
            frame = frame.f_back


def _overrides_of_rank(argv: list[str]) -> list[str]:
    """Return the overrides in the command of a rank, or an empty list for other commands."""
    for place, argument in enumerate(argv):
        if argument.startswith("hydra.sweeper.run_dir=") and "ddp_rank" in argv[:place]:
            return argv[place:]
    return []


class DDPGivenJobsSweeper(basic_sweeper.BasicSweeper):
    """Run just the jobs of the command line, ignoring the options of the sweeper that it replaces."""

    def __init__(self, **_options: Any) -> None:
        super().__init__(max_batch_size=None)
