"""One sweep on this machine, top to bottom."""

from __future__ import annotations

import logging
import os
import signal
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, setup_globals
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from ..common import processes
from ..common.errors import OptionError, StartError
from ..common.files import SweepPaths
from ..common.signals import RepeatedSignal
from ..display.tables import Summary, prepare_table
from ..display.terminal import Terminal
from ..groups.node_runner import Follower
from ..groups.rendezvous import NodeRendezvous, why_it_ends
from ..groups.spawners import ForkServer, RankProgram
from ..job import environment, frozen_config
from ..job.frozen_config import ConfigCache
from ..job.hydra_state import log_as_sweep
from ..job.program import (
    FunctionEntry,
    ProgramEntry,
    SourceWatch,
    config_values_from,
    find_calls,
    find_entry,
    rank_command,
    typed_command,
)
from ..job.settings import LaunchSettings, Sweep, has_one_batch, is_basic, read_settings
from ..records.journal import SweepRecorder
from ..resources.devices import DeviceAllocator, DeviceLocks, Nvml, find_devices, name_devices
from ..resources.schedule import DevicePool
from ..slurm.batch import SubmittedBatch, show_submission
from ..slurm.submitit_api import Cluster, make_executor, read_cluster
from .batch import Batch
from .debug import debug_session
from .dry_run import DirSnapshot, show_batch
from .resume import SweepState, open_sweep_dir, read_sweep_dir


def run_sweep(sweep: Sweep, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
    """Run one batch of jobs and return one JobReturn a job, in order, whatever failed.

    Args:
        sweep: What `prepare_sweep` returned.
        job_overrides: One list of override strings a job.
        initial_job_idx: Number of the first job.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when every rank is gone.
        SystemExit: after SIGTERM or SIGHUP, likewise; after a dry run's first batch of a sweeper that needs values.
    """
    sweep.spool.stop()
    setup_globals()
    log_as_sweep(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose, sweep.context)
    try:
        if sweep.footprint is not None:
            show = show_batch if sweep.cluster is None else show_submission
            return show(sweep, sweep.footprint, job_overrides, initial_job_idx)
        _make_sweep_dir(sweep.config)
        if sweep.follows:
            return Follower(sweep, job_overrides, initial_job_idx).run()
        try:
            if sweep.cluster is not None:
                return SubmittedBatch(sweep, job_overrides, initial_job_idx).run()
            with debug_session(sweep.settings, len(job_overrides)) as debugging:
                return Batch(sweep, job_overrides, initial_job_idx, debugging).run()
        except RepeatedSignal as error:
            if error.number == signal.SIGINT:
                raise
            raise SystemExit(128 + error.number) from None
    except BaseException as error:
        if sweep.gathering is not None:
            sweep.gathering.leave(why_it_ends(error))
        raise
    finally:
        sweep.spool.clear()
        sweep.spool.record()


def _make_sweep_dir(config: DictConfig) -> None:
    sweep_dir = Path(str(config.hydra.sweep.dir))
    sweep_dir.mkdir(parents=True, exist_ok=True)
    # Not in Hydra's schema, but honoured by its joblib and submitit launchers, too.
    mode = OmegaConf.select(config, "hydra.sweep.mode")
    if mode is not None:
        sweep_dir.chmod(int(str(mode), base=8))


_log = logging.getLogger(__name__)


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
    settings, cluster = _read_options(config, executor)
    entry = find_entry(settings.entry, task_function)
    paths = SweepPaths(os.path.abspath(str(config.hydra.sweep.dir)))
    pool, gate = _pool_and_gate(settings, paths.sweep_dir, here=cluster is None)
    main_script = entry.program.main_script if isinstance(entry, ProgramEntry) else None
    sources = SourceWatch(main_script)
    if cluster is None:
        _check_nodes(settings, config)
    env_set = OmegaConf.to_container(config.hydra.job.env_set, resolve=False)
    assert isinstance(env_set, dict)
    environment.refuse_own_variables(
        {str(name): value for name, value in env_set.items()}, settings.device_env_var, pool.devices
    )
    footprint = _footprint(config, paths.sweep_dir) if settings.dry_run else None
    # What submitit refuses, it refuses for all jobs.
    submitit_executor = make_executor(cluster) if cluster is not None and footprint is None else None
    # Of several nodes the first one keeps the books.
    keeps_books = footprint is None and settings.node_rank == 0
    books = SweepState(None, SweepRecorder(None), None)
    if settings.node_rank == 0:
        books = (open_sweep_dir if keeps_books else read_sweep_dir)(paths, settings, cluster)
    _warn_of_rank_values()
    spool = ConfigCache(context.config_loader, footprint.restore if footprint is not None else lambda: None)
    spool.record()
    summary = _summary(context, entry, config, paths.sweep_dir, settings.nnodes if cluster is None else 1)
    gathering = None
    if settings.nnodes > 1 and footprint is None and cluster is None:
        gathering = NodeRendezvous.join(paths.meetings, settings.node_rank, settings.nnodes)
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
        books.claim,
        books.ledger,
        summary,
        books.earlier,
        footprint,
        gathering,
        cluster,
        submitit_executor,
        None if cluster is not None or footprint is not None else _preload(settings, entry),
    )
    if sweep.preload is not None:
        # Not a process longer than the sweep: nobody tells which batch is the last.
        weakref.finalize(sweep, sweep.preload.close)
    if not sweep.has_one_batch and keeps_books:
        # Nobody tells which batch is the last. Then the sweep is forgotten, or the process ends.
        prepare_table()
        weakref.finalize(sweep, _show_at_the_end, summary, books.ledger)
    return sweep


def _read_options(config: DictConfig, executor: str | None) -> tuple[LaunchSettings, Cluster | None]:
    unsupported = processes.unsupported_reason()
    if unsupported is not None:
        raise StartError(unsupported)
    options = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(options, dict)
    named = {str(name): value for name, value in options.items()}
    settings, cluster = (read_settings(named), None) if executor is None else read_cluster(named, executor)
    if not settings.allow_nested:
        environment.refuse_as_rank(os.environ, sys.orig_argv)
        _refuse_open_group()
    ignored = environment.ignored_rendezvous(os.environ)
    if ignored:
        _log.warning(
            "%s of the environment: not used, each job gets a port of its own. For a fixed one set "
            "hydra.launcher.master_addr and master_port",
            ", ".join(ignored),
        )
    return settings, cluster


def _refuse_open_group() -> None:
    """Refuse to launch where the program has opened a process group, as it did before it was a rank."""
    torch = sys.modules.get("torch.distributed")
    if not getattr(torch, "is_initialized", bool)():
        return
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = find_calls(script, "init_process_group") if script else []
    place = f" ({script}:{', '.join(map(str, lines))})" if lines else ""
    raise StartError(
        f"A process group of torch.distributed is open in the launching process{place}, which "
        "is no rank of any job. Open it in the job's function, which runs in ranks alone, or only "
        'if "RANK" in os.environ; hydra.launcher.allow_nested=true allows it if it is meant.'
    )


def _warn_of_rank_values() -> None:
    """Name fields of configs that are made from a rank's variable here, so that all ranks would get the same value."""
    types = {
        kind: None for node in _stored(ConfigStore.instance().repo) for kind in frozen_config.structured_types(node)
    }
    for kind in types:
        for value in config_values_from(kind, environment.RANK_VARIABLES):
            _log.warning(
                "%s: %s is made from %s in the launching process, which is no rank: every rank gets that one value. "
                'Write "${oc.env:%s}", which each rank resolves for itself, or read the variable in the function',
                value.place,
                f"{kind.__name__}.{value.name}",
                value.variable,
                value.variable,
            )


def _stored(repo: Mapping[str, Any]) -> Iterator[Any]:
    """Return the configs that programs have stored, in whatever group."""
    for entry in repo.values():
        if isinstance(entry, Mapping):
            yield from _stored(entry)
        elif not (entry.provider or "").startswith(("hydra", "ddp_")):
            yield entry.node


def _footprint(config: DictConfig, sweep_dir: str) -> DirSnapshot:
    """Return what a dry run has to put back; refuse what it could not."""
    storage = OmegaConf.select(config, "hydra.sweeper.storage", default=None)
    if storage is not None:
        raise OptionError(
            f"A dry run would leave what the sweeper writes into hydra.sweeper.storage={storage}, such as trials that "
            "never end. Set hydra.sweeper.storage=null for the dry run."
        )
    return DirSnapshot.look(sweep_dir)


def _preload(settings: LaunchSettings, entry: ProgramEntry | FunctionEntry) -> ForkServer | None:
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
    start = entry.start
    interpreter = (start.executable, *start.interpreter_flags)
    argv, cwd = rank_command(entry, (), "", ())
    program = argv[len(interpreter) :]
    return ForkServer(
        settings.preload,
        RankProgram(interpreter, program[: 2 if program[0] == "-m" else 1], cwd),
        settings.device_env_var,
    )


def _check_nodes(settings: LaunchSettings, config: DictConfig) -> None:
    """Refuse what several nodes cannot do together."""
    if settings.nnodes == 1:
        return
    if not is_basic(config):
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


def _show_at_the_end(summary: Summary, ledger: SweepRecorder) -> None:
    terminal = Terminal(board=False)
    if ledger.record.stopped_by:
        terminal.hurry()
    with terminal.taken():
        summary.show(ledger)


def _summary(
    context: HydraContext, entry: ProgramEntry | FunctionEntry, config: DictConfig, sweep_dir: str, nnodes: int
) -> Summary:
    command: tuple[str, ...] = ()
    if isinstance(entry, ProgramEntry):
        command = (*typed_command(entry), *entry.flags, *entry.config_name, "-m", *entry.program.overrides)
    hydra, task = (OmegaConf.to_container(one) for one in (config.hydra.overrides.hydra, config.hydra.overrides.task))
    assert isinstance(hydra, list) and isinstance(task, list)
    loader, name = context.config_loader, config.hydra.job.config_name

    def compose(overrides: list[str]) -> DictConfig:
        composed: DictConfig = loader.load_configuration(name, overrides, RunMode.MULTIRUN)
        return composed

    batch = has_one_batch(config)
    return Summary(command, tuple(hydra), tuple(task), sweep_dir, is_basic(config), batch, compose, nnodes)


def _pool_and_gate(settings: LaunchSettings, sweep_dir: str, *, here: bool) -> tuple[DevicePool, DeviceAllocator]:
    if not here:
        # The cluster gives out its devices itself.
        return DevicePool(), DeviceAllocator({}, Nvml("", {}), None, None)
    variable = settings.device_env_var
    nvml = Nvml(variable, os.environ)
    devices = find_devices(settings.devices, variable, os.environ, nvml)
    # Other nodes wait for the jobs one after the other.
    pool = DevicePool(devices, settings.jobs_per_device, settings.max_parallel_jobs, in_order=settings.nnodes > 1)
    pool.size(settings.nproc_per_node, settings.devices_per_rank)
    locks = None
    if devices and settings.lock_devices and not settings.dry_run:
        locks = DeviceLocks(sweep_dir, environment.locked_for_this_rank(os.environ))
    names = name_devices(devices, variable, nvml)
    gate = DeviceAllocator(names, nvml, locks, settings.min_free_memory_gb)
    if settings.dry_run:
        gate.close()
        # Who has a device now, and how much of its memory, does not count: nothing is started on it.
        gate = DeviceAllocator({}, Nvml("", {}), None, None)
    return pool, gate
