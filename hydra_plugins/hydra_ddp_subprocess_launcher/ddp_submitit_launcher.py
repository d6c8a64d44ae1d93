"""The launcher plugins that hand jobs to submitit."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from ._setup import Sweep


class _DDPSubmititLauncher(Launcher):
    """Run every job of a multirun as one group of DDP ranks on one or more nodes, through submitit."""

    @property
    @abstractmethod
    def executor(self) -> str:
        """Submitit's name of the cluster."""

    def __init__(self, **options: Any) -> None:
        # As in DDPSubprocessLauncher: the values that count are read later.
        self._sweep: Sweep | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the options and how this process was started.

        Raises:
            LauncherError: for what the user can mend, before anything is submitted.
        """
        from ._prepare import prepare_sweep

        self._sweep = prepare_sweep(hydra_context, task_function, config, self.executor)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit one batch of jobs and wait for them.

        Args:
            job_overrides: One list of override strings a job.
            initial_job_idx: Number of the first job; the others count up from it.

        Returns:
            One JobReturn a job, in the order of `job_overrides`, whatever failed.
        """
        from ._sweep import run_sweep

        assert self._sweep is not None
        return run_sweep(self._sweep, [list(overrides) for overrides in job_overrides], initial_job_idx)


class DDPSubmititSlurmLauncher(_DDPSubmititLauncher):
    """Run jobs on SLURM."""

    executor = "slurm"


class DDPSubmititLocalLauncher(_DDPSubmititLauncher):
    """Run jobs through submitit on this machine, for trying out."""

    executor = "local"
