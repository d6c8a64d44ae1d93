"""A sweep before its first job: options, entry and devices, checked and kept."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobRuntime
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from . import __version__, _commands, _environment, _machine, _pickling
from ._claim import Claim
from ._cluster import Cluster, read_cluster
from ._devices import DeviceGate, find_devices, name_devices
from ._entry import FunctionEntry, ProgramEntry, find_entry, process_start, rank_command
from ._errors import OptionError, StartError
from ._events import SweepBegan
from ._files import SweepPaths, move_aside
from ._footprint import Footprint
from ._freeze import ComposeSpool
from ._gathering import Gathering
from ._journal import read_journal
from ._ledger import Ledger
from ._locks import DeviceLocks
from ._nvml import Nvml
from ._preload import Preload, RankProgram
from ._records import SweepRecord
from ._resume import Earlier
from ._schedule import Pool
from ._settings import LaunchSettings, read_settings
from ._sources import SourceWatch
from ._summary import Summary

_log = logging.getLogger(__name__)
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

    @property
    def has_one_batch(self) -> bool:
        """Whether all jobs are handed over at once."""
        return _has_one_batch(self.config)

    @property
    def sweeper_name(self) -> str:
        """Name of the sweeper's class."""
        return str(self.config.hydra.sweeper._target_).rpartition(".")[2]

    @property
    def has_basic_sweeper(self) -> bool:
        """Whether the sweeper is Hydra's own, which knows all jobs beforehand."""
        return _is_basic(self.config)


def prepare_sweep(
    context: HydraContext, task_function: TaskFunction, config: DictConfig, executor: str | None = None
) -> Sweep:
    """Check all that can be checked before a job is known.

    Args:
        context: Hydra's.
        task_function: What a job calls.
        config: The sweep's own config.
        executor: Submitit's executor for the jobs; None: they run here.

    Raises:
        LauncherError: for what the user can mend.
    """
    unsupported = _machine.unsupported_reason()
    if unsupported is not None:
        raise StartError(unsupported)
    options = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(options, dict)
    named = {str(name): value for name, value in options.items()}
    settings, cluster = (read_settings(named), None) if executor is None else read_cluster(named, executor)
    if not settings.allow_nested:
        _environment.refuse_as_rank(os.environ)
    ignored = _environment.ignored_rendezvous(os.environ)
    if ignored:
        _log.warning(
            "%s of the environment: ignored, each job gets a port of its own (hydra.launcher.master_addr, master_port)",
            ", ".join(ignored),
        )
    entry = find_entry(settings.entry, task_function)
    paths = SweepPaths(os.path.abspath(str(config.hydra.sweep.dir)))
    pool, gate = _pool_and_gate(settings, paths.sweep_dir, here=cluster is None)
    main_script = entry.program.main_script if isinstance(entry, ProgramEntry) else None
    sources = SourceWatch(main_script)
    if cluster is None:
        _check_nodes(settings, config)
    footprint = Footprint.look(paths.sweep_dir) if settings.dry_run else None
    # Of several nodes the first one keeps the books.
    keeps_books = footprint is None and settings.node_rank == 0
    claim = _take_directory(paths, keep=settings.resume is not None) if keeps_books else None
    record = _read_earlier(paths) if settings.resume is not None and keeps_books else None
    earlier = Earlier(record, settings.resume) if record is not None and settings.resume is not None else None
    ledger = Ledger(paths if keeps_books else None, record)
    ledger.note(_beginning(settings, paths.sweep_dir))
    storage = OmegaConf.select(config, "hydra.sweeper.storage", default=None)
    if footprint is not None and storage is not None:
        raise OptionError(
            f"A dry run would leave what the sweeper writes into hydra.sweeper.storage={storage}, such as trials that "
            "never end. Set hydra.sweeper.storage=null for the dry run."
        )
    spool = ComposeSpool(context.config_loader, footprint.restore if footprint is not None else lambda: None)
    spool.record()
    summary = _summary(entry, config, paths.sweep_dir)
    gathering = None
    if settings.nnodes > 1 and footprint is None and cluster is None:
        gathering = Gathering.gather(paths.meetings, settings.node_rank, settings.nnodes)
    sweep = Sweep(
        context,
        task_function,
        config,
        settings,
        entry,
        pool,
        gate,
        spool,
        sources,
        paths,
        claim,
        ledger,
        summary,
        earlier,
        footprint,
        gathering,
        cluster,
        None if cluster is not None or footprint is not None else _preload(settings, entry),
    )
    if sweep.preload is not None:
        # Not a process longer than the sweep: nobody tells which batch is the last.
        weakref.finalize(sweep, sweep.preload.close)
    if not sweep.has_one_batch and keeps_books:
        # Nobody tells which batch is the last. Then the sweep is forgotten, or the process ends.
        weakref.finalize(sweep, summary.show, ledger)
    return sweep


def _preload(settings: LaunchSettings, entry: ProgramEntry | FunctionEntry) -> Preload | None:
    """Return what forks ranks, or say why nothing does."""
    if settings.preload == ():
        return None
    reasons = {
        "hydra.launcher.wrapper has to start a process of its own": bool(settings.wrapper),
        "a debugger wants a process of its own (hydra.launcher.debug=true)": settings.debug,
        "it is not meant for several nodes (hydra.launcher.nnodes)": settings.nnodes > 1,
        "this system is not Linux": not sys.platform.startswith("linux"),
    }
    for reason, holds in reasons.items():
        if holds:
            _log.warning("hydra.launcher.preload has no effect: %s", reason)
            return None
    start = process_start()
    interpreter = (start.executable, *start.interpreter_flags)
    argv, cwd = rank_command(entry, (), "", ())
    program = argv[len(interpreter) :]
    return Preload(
        settings.preload,
        RankProgram(interpreter, program[: 2 if program[0] == "-m" else 1], cwd),
        settings.device_env_var,
    )


def _check_nodes(settings: LaunchSettings, config: DictConfig) -> None:
    """Refuse what several nodes cannot do together."""
    if settings.nnodes == 1:
        return
    if not _is_basic(config):
        raise OptionError(
            f"hydra.launcher.nnodes={settings.nnodes} needs Hydra's own sweeper, as {config.hydra.sweeper._target_} "
            "would choose other values on each node. On SLURM, hydra/launcher=ddp_submitit_slurm runs any sweeper's "
            "jobs on several nodes."
        )
    written = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    assert isinstance(written, dict)
    if "${now:" in str(written["dir"]):
        raise OptionError(
            f"hydra.launcher.nnodes={settings.nnodes} needs hydra.sweep.dir to be set: each node would find another "
            f"one by {written['dir']!r}. Choose a directory that all nodes see."
        )


def _summary(entry: ProgramEntry | FunctionEntry, config: DictConfig, sweep_dir: str) -> Summary:
    command: tuple[str, ...] = ()
    if isinstance(entry, ProgramEntry):
        command = (*entry.program.command, *entry.flags, *entry.config_name, "-m")
    hydra, task = (OmegaConf.to_container(one) for one in (config.hydra.overrides.hydra, config.hydra.overrides.task))
    assert isinstance(hydra, list) and isinstance(task, list)
    return Summary(command, tuple(hydra), tuple(task), sweep_dir, _is_basic(config), _has_one_batch(config))


def _has_one_batch(config: DictConfig) -> bool:
    return _is_basic(config) and config.hydra.sweeper.max_batch_size is None


def _is_basic(config: DictConfig) -> bool:
    return bool(config.hydra.sweeper._target_ == _BASIC_SWEEPER)


def _read_earlier(paths: SweepPaths) -> SweepRecord | None:
    """Return what earlier runs in the sweep directory have recorded; None: there was none."""
    try:
        record = read_journal(paths.journal)
    except FileNotFoundError:
        _log.info("There is nothing to resume in %s: all jobs are new", paths.sweep_dir)
        return None
    except OSError as error:
        raise StartError(f"The journal of the sweep cannot be read: {error.strerror}: {paths.journal}") from None
    if record.unreadable:
        _log.warning(
            "In %s lines are damaged, or of a later version of this package (%d): what they tell is not known, and the "
            "rest is used",
            paths.journal,
            record.unreadable,
        )
    return record


def _take_directory(paths: SweepPaths, *, keep: bool) -> Claim:
    """Claim the sweep directory, and move aside what an earlier sweep has recorded there, unless it is to be kept."""
    try:
        os.makedirs(paths.folder, exist_ok=True)
        claim = Claim(paths.claim)
        recorded = [path for path in (paths.journal, paths.results) if os.path.exists(path) and not keep]
        aside = move_aside(paths.folder, recorded)
    except OSError as error:
        why = error.strerror or str(error)
        where = error.filename or paths.folder
        raise StartError(f"The sweep directory {paths.sweep_dir} cannot be used: {why}: {where}") from None
    if aside is not None:
        _log.info("What an earlier sweep recorded in this directory is now in %s", aside)
    return claim


def _beginning(settings: LaunchSettings, sweep_dir: str) -> SweepBegan:
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""  # Somebody deleted it.
    return SweepBegan(
        time.time(),
        os.getpid(),
        _machine.host(),
        _commands.masked(sys.orig_argv),
        cwd,
        __version__,
        settings.limits.grace_period_s,
        sweep_dir,
    )


def _pool_and_gate(settings: LaunchSettings, sweep_dir: str, *, here: bool) -> tuple[Pool, DeviceGate]:
    if not here:
        # The cluster gives out its devices itself.
        return Pool(), DeviceGate({}, Nvml("", {}), None, None)
    variable = settings.device_env_var
    nvml = Nvml(variable, os.environ)
    devices = find_devices(settings.devices, variable, os.environ, nvml)
    pool = Pool(devices, settings.jobs_per_device, settings.max_parallel_jobs)
    pool.nproc(settings.nproc_per_node)
    locks = None
    if devices and settings.lock_devices and not settings.dry_run:
        locks = DeviceLocks(sweep_dir, _environment.locked_for_this_rank(os.environ))
    names = name_devices(devices, variable, nvml)
    gate = DeviceGate(names, nvml, locks, settings.min_free_memory_gb)
    if settings.dry_run:
        gate.close()
        # Who has a device now, and how much of its memory, does not count: nothing is started on it.
        gate = DeviceGate({}, Nvml("", {}), None, None)
    return pool, gate
