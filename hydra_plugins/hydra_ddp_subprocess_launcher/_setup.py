"""A sweep before its first job: options, entry and devices, checked and kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobRuntime
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from . import _environment, _machine, _pickling
from ._devices import DeviceGate, find_devices, name_devices
from ._entry import FunctionEntry, ProgramEntry, find_entry
from ._errors import StartError
from ._footprint import Footprint
from ._freeze import ComposeSpool
from ._locks import DeviceLocks
from ._nvml import Nvml
from ._schedule import Pool
from ._settings import LaunchSettings, read_settings
from ._sources import SourceWatch

_log = logging.getLogger(__name__)


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
        footprint: What a dry run has to put back; None: this is none.
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
    footprint: Footprint | None = None

    @property
    def main(self) -> Mapping[str, Any] | None:
        """Names of the program's `__main__`, for the pickler; None: ranks have another."""
        return _pickling.program_namespace(self.task_function) if isinstance(self.entry, ProgramEntry) else None

    @property
    def task_name(self) -> str:
        """Hydra's name of the job function."""
        return str(JobRuntime.instance().get("name"))


def prepare_sweep(context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Sweep:
    """Check all that can be checked before a job is known.

    Raises:
        LauncherError: for what the user can mend.
    """
    unsupported = _machine.unsupported_reason()
    if unsupported is not None:
        raise StartError(unsupported)
    options = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(options, dict)
    settings = read_settings({str(name): value for name, value in options.items()})
    if not settings.allow_nested:
        _environment.refuse_as_rank(os.environ)
    ignored = _environment.ignored_rendezvous(os.environ)
    if ignored:
        _log.warning(
            "%s of the environment: ignored, each job gets a port of its own (hydra.launcher.master_addr, master_port)",
            ", ".join(ignored),
        )
    entry = find_entry(settings.entry, task_function)
    pool, gate = _pool_and_gate(settings, str(config.hydra.sweep.dir))
    main_script = entry.program.main_script if isinstance(entry, ProgramEntry) else None
    footprint = Footprint.look(str(config.hydra.sweep.dir)) if settings.dry_run else None
    spool = ComposeSpool(context.config_loader, footprint.restore if footprint is not None else lambda: None)
    spool.record()
    sources = SourceWatch(main_script)
    return Sweep(context, task_function, config, settings, entry, pool, gate, spool, sources, footprint)


def _pool_and_gate(settings: LaunchSettings, sweep_dir: str) -> tuple[Pool, DeviceGate]:
    variable = settings.device_env_var
    nvml = Nvml(variable, os.environ)
    devices = find_devices(settings.devices, variable, os.environ, nvml)
    pool = Pool(devices, settings.jobs_per_device, settings.max_parallel_jobs)
    pool.nproc(settings.nproc_per_node)
    locks = None
    if devices and settings.lock_devices and not settings.dry_run:
        locks = DeviceLocks(os.path.abspath(sweep_dir), _environment.locked_for_this_rank(os.environ))
    names = name_devices(devices, variable, nvml)
    gate = DeviceGate(names, nvml, locks, settings.min_free_memory_gb)
    if settings.dry_run:
        gate.close()
        # Who has a device now, and how much of its memory, does not count: nothing is started on it.
        gate = DeviceGate({}, Nvml("", {}), None, None)
    return pool, gate
