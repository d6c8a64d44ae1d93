"""What stays the same over all batches of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobRuntime
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from . import _pickling
from ._claim import Claim
from ._cluster import Cluster
from ._commands import GIVEN_JOBS
from ._devices import DeviceGate
from ._entry import FunctionEntry, ProgramEntry
from ._files import SweepPaths
from ._footprint import Footprint
from ._gathering import Gathering
from ._ledger import Ledger
from ._port import ReservedPort, reserve_port, reserve_port_for_nodes
from ._preload import Preload
from ._resume import Earlier
from ._schedule import Pool
from ._settings import LaunchSettings
from ._sources import SourceWatch
from ._spool import ComposeSpool
from ._summary import Summary

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class Sweep:
    """What stays the same over all batches of a sweep.

    Attributes:
        context: Hydra's.
        task_function: What a job calls.
        config: The sweep's own config.
        settings: Options of the launcher.
        entry: What ranks run.
        pool: What its jobs share.
        gate: Gets hold of the pool's devices.
        spool: Configs that the sweeper composed.
        sources: The program's source files.
        paths: Where the sweep is.
        claim: On that directory, held as long as the sweep is.
        ledger: What has happened.
        summary: What is shown of it at the end.
        earlier: What earlier runs have left to do; None: nothing is resumed.
        footprint: What a dry run has to put back; None: this is none.
        gathering: The launching processes of a sweep on several nodes; None: it is on one, or starts nothing.
        cluster: What jobs ask of submitit; None: they run here.
        executor: Submitit's executor; None: they run here, or nothing is submitted.
        preload: Of which ranks are forks; None: each is a new interpreter.
    """

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    settings: LaunchSettings
    entry: ProgramEntry | FunctionEntry
    pool: Pool
    gate: DeviceGate
    spool: ComposeSpool
    sources: SourceWatch
    paths: SweepPaths
    claim: Claim | None
    ledger: Ledger
    summary: Summary
    earlier: Earlier | None
    footprint: Footprint | None
    gathering: Gathering | None
    cluster: Cluster | None
    executor: Any
    preload: Preload | None

    @property
    def main(self) -> Mapping[str, Any] | None:
        """Names of the program's `__main__`, for the pickler; None: ranks have another."""
        return _pickling.program_namespace(self.task_function) if isinstance(self.entry, ProgramEntry) else None

    @property
    def task_name(self) -> str:
        """Hydra's name of the job function."""
        return str(JobRuntime.instance().get("name"))

    @property
    def held(self) -> tuple[int, ...]:
        """Descriptors that keepers hold for the sweep: no other one takes its directory while ranks of it still run."""
        return () if self.claim is None else (self.claim.descriptor,)

    @property
    def task(self) -> str:
        """Which function of the program jobs run, as the journal has it."""
        if isinstance(self.entry, FunctionEntry):
            return self.task_name
        return f"{self.entry.task.module}.{self.entry.task.qualname}"

    @property
    def follows(self) -> bool:
        """Whether another node decides what runs, and writes it down."""
        return self.settings.node_rank > 0 and self.footprint is None

    def reserve_port(self) -> ReservedPort:
        """Reserve a port of this machine for one start of a job.

        Raises:
            StartError: when there is none.
        """
        address, number = self.settings.master_addr, self.settings.master_port
        if self.settings.nnodes == 1:
            return reserve_port(address, number)
        assert address is not None
        return reserve_port_for_nodes(address, number)

    @property
    def has_one_batch(self) -> bool:
        """Whether all jobs are handed over at once."""
        return has_one_batch(self.config)

    @property
    def sweeper_name(self) -> str:
        """Name of the sweeper's class."""
        return str(self.config.hydra.sweeper._target_).rpartition(".")[2]

    @property
    def has_basic_sweeper(self) -> bool:
        """Whether the sweeper is Hydra's own, which knows all jobs beforehand."""
        return is_basic(self.config)


def has_one_batch(config: DictConfig) -> bool:
    """Return whether a sweep's jobs are all handed over at once."""
    if config.hydra.sweeper._target_ == GIVEN_JOBS:
        return True
    return is_basic(config) and config.hydra.sweeper.max_batch_size is None


def is_basic(config: DictConfig) -> bool:
    """Return whether a sweep has Hydra's own sweeper, which knows all jobs beforehand."""
    return config.hydra.sweeper._target_ in (_BASIC_SWEEPER, GIVEN_JOBS)
