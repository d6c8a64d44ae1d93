"""A sweep before its first job: options, entry and devices, checked."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from . import _environment, _freeze, _machine
from ._books import Books, open_books, read_books
from ._cluster import Cluster, read_cluster
from ._devices import DeviceGate, find_devices, name_devices
from ._entry import FunctionEntry, ProgramEntry, find_entry, process_start, rank_command, typed_command
from ._errors import OptionError, StartError
from ._files import SweepPaths
from ._footprint import Footprint
from ._gathering import Gathering
from ._ledger import Ledger
from ._locks import DeviceLocks
from ._nvml import Nvml
from ._preload import Preload, RankProgram
from ._report import prepare_table
from ._schedule import Pool
from ._settings import LaunchSettings, read_settings
from ._setup import Sweep, has_one_batch, is_basic
from ._sources import SourceWatch
from ._spool import ComposeSpool
from ._streams import Screens, streams_above
from ._submitit import make_executor
from ._summary import Summary
from ._top_level import config_values_from, find_calls

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
    footprint = _footprint(config, paths.sweep_dir) if settings.dry_run else None
    # What submitit refuses, it refuses for all jobs.
    submitit_executor = make_executor(cluster) if cluster is not None and footprint is None else None
    # Of several nodes the first one keeps the books.
    keeps_books = footprint is None and settings.node_rank == 0
    books = Books(None, Ledger(None), None)
    if settings.node_rank == 0:
        books = (open_books if keeps_books else read_books)(paths, settings, cluster)
    _warn_of_rank_values()
    spool = ComposeSpool(context.config_loader, footprint.restore if footprint is not None else lambda: None)
    spool.record()
    summary = _summary(entry, config, paths.sweep_dir, settings.nnodes if cluster is None else 1)
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
    unsupported = _machine.unsupported_reason()
    if unsupported is not None:
        raise StartError(unsupported)
    options = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(options, dict)
    named = {str(name): value for name, value in options.items()}
    settings, cluster = (read_settings(named), None) if executor is None else read_cluster(named, executor)
    if not settings.allow_nested:
        _environment.refuse_as_rank(os.environ)
        _refuse_open_group()
    ignored = _environment.ignored_rendezvous(os.environ)
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
    types = {kind: None for node in _stored(ConfigStore.instance().repo) for kind in _freeze.structured_types(node)}
    for kind in types:
        for value in config_values_from(kind, _environment.RANK_VARIABLES):
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


def _footprint(config: DictConfig, sweep_dir: str) -> Footprint:
    """Return what a dry run has to put back; refuse what it could not."""
    storage = OmegaConf.select(config, "hydra.sweeper.storage", default=None)
    if storage is not None:
        raise OptionError(
            f"A dry run would leave what the sweeper writes into hydra.sweeper.storage={storage}, such as trials that "
            "never end. Set hydra.sweeper.storage=null for the dry run."
        )
    return Footprint.look(sweep_dir)


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


def _show_at_the_end(summary: Summary, ledger: Ledger) -> None:
    screens = Screens()
    if ledger.record.stopped_by:
        screens.hurry()
    with streams_above(screens):
        summary.show(ledger)


def _summary(entry: ProgramEntry | FunctionEntry, config: DictConfig, sweep_dir: str, nnodes: int) -> Summary:
    command: tuple[str, ...] = ()
    if isinstance(entry, ProgramEntry):
        command = (*typed_command(entry.program), *entry.flags, *entry.config_name, "-m")
    hydra, task = (OmegaConf.to_container(one) for one in (config.hydra.overrides.hydra, config.hydra.overrides.task))
    assert isinstance(hydra, list) and isinstance(task, list)
    return Summary(command, tuple(hydra), tuple(task), sweep_dir, is_basic(config), has_one_batch(config), nnodes)


def _pool_and_gate(settings: LaunchSettings, sweep_dir: str, *, here: bool) -> tuple[Pool, DeviceGate]:
    if not here:
        # The cluster gives out its devices itself.
        return Pool(), DeviceGate({}, Nvml("", {}), None, None)
    variable = settings.device_env_var
    nvml = Nvml(variable, os.environ)
    devices = find_devices(settings.devices, variable, os.environ, nvml)
    # Other nodes wait for the jobs one after the other.
    pool = Pool(devices, settings.jobs_per_device, settings.max_parallel_jobs, in_order=settings.nnodes > 1)
    pool.size(settings.nproc_per_node, settings.devices_per_rank)
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
