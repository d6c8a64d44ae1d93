"""One sweep on this machine, from its options to its summary."""

from __future__ import annotations

import logging
import os
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hydra.core.utils import JobReturn, setup_globals
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from ..common.errors import OptionError, StartError
from ..common.files import SweepPaths
from ..common.processes import unsupported_reason
from ..common.signals import RepeatedSignal
from ..display.tables import Summary, prepare_table
from ..display.terminal import Terminal
from ..groups.node_runner import Follower
from ..groups.rendezvous import NodeRendezvous, Rendezvous, why_it_ends
from ..groups.spawners import ForkServer, RankProgram
from ..job.environment import ignored_rendezvous, locked_for_this_rank, refuse_as_rank, refuse_own_variables
from ..job.frozen_config import ConfigCache
from ..job.hydra_state import log_as_sweep
from ..job.plan import JobPlanner
from ..job.program import (
    ProgramEntry,
    SourceWatch,
    find_entry,
    rank_command,
    refuse_open_group,
    typed_command,
    warn_of_rank_values,
)
from ..job.settings import LaunchSettings, SweepContext, read_settings
from ..records.journal import SweepRecorder
from ..resources.devices import DeviceAllocator, DeviceLocks, find_devices, name_devices
from ..resources.nvml import Nvml
from ..resources.schedule import DevicePool
from .batch import Batch, JobStarter, begin_fork_server
from .debug import debug_session
from .dry_run import DirSnapshot, DryRun
from .job_queue import JobQueue
from .progress import Progress
from .resume import PreviousRuns, Submissions, SweepState, open_sweep_dir, read_sweep_dir

_log = logging.getLogger(__name__)


class BatchRunner(Protocol):
    """Run the jobs of one `launch()` call; there is one class for each way to run them."""

    def run_batch(self, overrides: Mapping[int, Sequence[str]]) -> list[JobReturn]:
        """Run jobs and return one JobReturn per job, in order, even if some failed.

        Args:
            overrides: Override strings of each job, by its number, in order.
        """


class Sweep:
    """One sweep, from Hydra's `setup()` to its last `launch()`.

    Args:
        cache: Configs that the sweeper composes between two `launch()` calls.
    """

    def __init__(self, context: SweepContext, cache: ConfigCache, runner: BatchRunner) -> None:
        self._context = context
        self._cache = cache
        self._runner = runner
        cache.record()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run one batch of jobs and return one JobReturn per job, in order, even if some failed.

        Args:
            job_overrides: One list of override strings per job.
            initial_job_idx: Number of the first job; the others count up from it.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after every rank has exited.
            SystemExit: likewise on SIGTERM or SIGHUP; also after the first batch of a dry run if the sweeper needs
                the jobs' values.
        """
        self._cache.stop()
        setup_globals()
        hydra = self._context.config.hydra
        log_as_sweep(hydra.hydra_logging, hydra.verbose, self._context.hydra_context)
        try:
            return self._runner.run_batch(dict(enumerate(map(list, job_overrides), start=initial_job_idx)))
        except RepeatedSignal as error:
            if error.number == signal.SIGINT:
                raise
            raise SystemExit(128 + error.number) from None
        finally:
            self._cache.clear()
            self._cache.record()


class LocalRunner:
    """Run the jobs of a sweep on this machine, alone or as the first of several nodes.

    Args:
        pool: The devices that the jobs share.
        fork_server: Forks ranks. If None, each rank is a new interpreter.
        summary: Shown at the end of the sweep.
    """

    def __init__(
        self,
        context: SweepContext,
        state: SweepState,
        planner: JobPlanner,
        pool: DevicePool,
        allocator: DeviceAllocator,
        rendezvous: Rendezvous,
        fork_server: ForkServer | None,
        summary: Summary,
    ) -> None:
        self._context = context
        self._state = state
        self._planner = planner
        self._pool = pool
        self._allocator = allocator
        self._rendezvous = rendezvous
        self._fork_server = fork_server
        self._summary = summary
        self._sources = watch_sources(context)
        if fork_server is not None:
            # End the fork server with the sweep: no call says which batch is the last.
            weakref.finalize(self, fork_server.close)
        show_at_the_end(self, context, summary, state.recorder)

    def run_batch(self, overrides: Mapping[int, Sequence[str]]) -> list[JobReturn]:
        """Run jobs and return one JobReturn per job, in order, even if some failed.

        Args:
            overrides: Override strings of each job, by its number, in order.
        """
        try:
            with debug_session(self._context.settings, len(overrides)) as debugging:
                make_sweep_dir(self._context.config)
                queue = JobQueue(self._context, self._planner, self._pool, self._allocator, overrides)
                base = queue.base_environment()
                progress = Progress(self._context, self._state.recorder, self._summary, overrides, queue.most_jobs)
                _log.info("Launching %s, OMP_NUM_THREADS=%s", queue.summary, base["OMP_NUM_THREADS"])
                begin_fork_server(self._fork_server, self._context, base)
                starter = JobStarter(
                    self._context,
                    self._allocator,
                    self._rendezvous,
                    self._sources,
                    self._state.held,
                    debugging.descriptors,
                )
                return Batch(
                    self._context,
                    overrides,
                    queue,
                    starter,
                    self._allocator,
                    progress,
                    self._state.previous,
                    self._rendezvous,
                    self._fork_server,
                    debugging,
                ).run()
        except BaseException as error:
            self._rendezvous.leave(why_it_ends(error))
            raise
        finally:
            if self._fork_server is not None and self._context.has_one_batch:
                self._fork_server.close()


class FollowingRunner:
    """Run this node's part of the jobs that the first node starts.

    Args:
        pool: Devices of this node.
    """

    def __init__(
        self, context: SweepContext, rendezvous: NodeRendezvous, pool: DevicePool, allocator: DeviceAllocator
    ) -> None:
        self._context = context
        self._rendezvous = rendezvous
        self._pool = pool
        self._allocator = allocator

    def run_batch(self, overrides: Mapping[int, Sequence[str]]) -> list[JobReturn]:
        """Take part in jobs and return one JobReturn per job, in order. Only the first node gets values.

        Args:
            overrides: Override strings of each job, by its number, in order.
        """
        make_sweep_dir(self._context.config)
        try:
            return Follower(self._context, overrides, self._rendezvous, self._pool, self._allocator).run()
        except BaseException as error:
            self._rendezvous.leave(why_it_ends(error))
            raise


def open_sweep(
    hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig, submissions: Submissions
) -> Sweep:
    """Check everything that can be checked before any job is known, and choose how to run the jobs of a sweep.

    Args:
        submissions: Jobs of earlier runs that may still be on a cluster.

    Raises:
        LauncherError: for an error that the user can fix.
    """
    settings = read_settings(launcher_options(config))
    context = make_context(hydra_context, task_function, config, settings)
    pool, allocator = _devices(context)
    _check_nodes(context)
    check_env_set(context, pool.devices)
    if settings.dry_run:
        return _open_dry_run(context, submissions, pool, allocator)
    cache = ConfigCache(hydra_context.config_loader)
    if settings.node_rank > 0:
        rendezvous = NodeRendezvous.join(context.paths.rendezvous_root, settings.node_rank, settings.nnodes)
        return Sweep(context, cache, FollowingRunner(context, rendezvous, pool, allocator))
    state = open_sweep_dir(context.paths, settings, submissions)
    planner = JobPlanner(context, cache, pool, state.previous)
    nodes = Rendezvous()
    if settings.nnodes > 1:
        nodes = NodeRendezvous.join(context.paths.rendezvous_root, settings.node_rank, settings.nnodes)
    summary = make_summary(context)
    return Sweep(
        context,
        cache,
        LocalRunner(context, state, planner, pool, allocator, nodes, _fork_server(context), summary),
    )


def _open_dry_run(
    context: SweepContext, submissions: Submissions, pool: DevicePool, allocator: DeviceAllocator
) -> Sweep:
    snapshot = take_snapshot(context)
    previous = PreviousRuns()
    if context.settings.node_rank == 0:
        previous = read_sweep_dir(context.paths, context.settings, submissions).previous
    cache = ConfigCache(context.hydra_context.config_loader, snapshot.restore)
    planner = JobPlanner(context, cache, pool, previous)
    return Sweep(context, cache, DryRun(context, planner, pool, allocator, previous, snapshot))


# Common to all ways to run a sweep


def launcher_options(config: DictConfig) -> dict[str, object]:
    """Return the options of `hydra.launcher`, resolved.

    Raises:
        StartError: if no rank can be launched on this system.
    """
    unsupported = unsupported_reason()
    if unsupported is not None:
        raise StartError(unsupported)
    options = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(options, dict)
    return {str(name): value for name, value in options.items()}


def make_context(
    hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig, settings: LaunchSettings
) -> SweepContext:
    """Make the context of a sweep.

    Raises:
        StartError: if this process cannot launch, or its program cannot be run again.
    """
    if not settings.allow_nested:
        refuse_as_rank(os.environ, sys.orig_argv)
        refuse_open_group()
    ignored = ignored_rendezvous(os.environ)
    if ignored:
        _log.warning(
            "%s of the environment: not used, each job gets a port of its own. For a fixed one set "
            "hydra.launcher.master_addr and master_port",
            ", ".join(ignored),
        )
    warn_of_rank_values()
    entry = find_entry(settings.entry, task_function)
    paths = SweepPaths(os.path.abspath(str(config.hydra.sweep.dir)))
    return SweepContext(hydra_context, task_function, config, settings, entry, paths)


def check_env_set(context: SweepContext, devices: tuple[str, ...] = ()) -> None:
    """Refuse a `hydra.job.env_set` that sets the launcher's own variables.

    Args:
        devices: Ids of the devices that jobs share.

    Raises:
        StartError: naming one of them.
    """
    env_set = OmegaConf.to_container(context.config.hydra.job.env_set, resolve=False)
    assert isinstance(env_set, dict)
    refuse_own_variables(
        {str(name): value for name, value in env_set.items()}, context.settings.device_env_var, devices
    )


def watch_sources(context: SweepContext) -> SourceWatch:
    """Return a watch over the program's source files as they are now."""
    entry = context.entry
    return SourceWatch(entry.program.main_script if isinstance(entry, ProgramEntry) else None)


def take_snapshot(context: SweepContext) -> DirSnapshot:
    """Return the state that a dry run restores.

    Raises:
        OptionError: if it cannot undo what the sweeper writes.
    """
    storage = OmegaConf.select(context.config, "hydra.sweeper.storage", default=None)
    if storage is not None:
        raise OptionError(
            f"A dry run would leave what the sweeper writes into hydra.sweeper.storage={storage}, such as trials that "
            "never end. Set hydra.sweeper.storage=null for the dry run."
        )
    return DirSnapshot.look(context.paths.sweep_dir)


def make_summary(context: SweepContext, nnodes: int | None = None) -> Summary:
    """Return the summary to show at the end of a sweep.

    Args:
        nnodes: Number of nodes on which the sweep's command is started, or None for as many as its jobs have.
    """
    config, entry = context.config, context.entry
    command: tuple[str, ...] = ()
    if isinstance(entry, ProgramEntry):
        command = (*typed_command(entry), *entry.flags, *entry.config_name, "-m", *entry.program.overrides)
    hydra, task = (OmegaConf.to_container(one) for one in (config.hydra.overrides.hydra, config.hydra.overrides.task))
    assert isinstance(hydra, list) and isinstance(task, list)
    loader, name = context.hydra_context.config_loader, config.hydra.job.config_name

    def compose(overrides: list[str]) -> DictConfig:
        composed: DictConfig = loader.load_configuration(name, overrides, RunMode.MULTIRUN)
        return composed

    return Summary(
        command,
        tuple(hydra),
        tuple(task),
        context.paths.sweep_dir,
        context.has_basic_sweeper,
        context.has_one_batch,
        compose,
        context.settings.nnodes if nnodes is None else nnodes,
    )


def show_at_the_end(runner: object, context: SweepContext, summary: Summary, recorder: SweepRecorder) -> None:
    """Show the summary when the runner is collected or the process exits: no call says which batch is the last."""
    if not context.has_one_batch:
        prepare_table()
        weakref.finalize(runner, _show_summary, summary, recorder)


def _show_summary(summary: Summary, recorder: SweepRecorder) -> None:
    terminal = Terminal(board=False)
    if recorder.sweep.stopped_by:
        terminal.hurry()
    with terminal.taken():
        summary.show(recorder)


def make_sweep_dir(config: DictConfig) -> None:
    """Create the sweep directory with the mode `hydra.sweep.mode`."""
    sweep_dir = Path(str(config.hydra.sweep.dir))
    sweep_dir.mkdir(parents=True, exist_ok=True)
    # Not in Hydra's schema, but its joblib and submitit launchers honour it, too.
    mode = OmegaConf.select(config, "hydra.sweep.mode")
    if mode is not None:
        sweep_dir.chmod(int(str(mode), base=8))


# Only for a sweep on this machine


def _devices(context: SweepContext) -> tuple[DevicePool, DeviceAllocator]:
    settings = context.settings
    variable = settings.device_env_var
    nvml = Nvml(variable, os.environ)
    devices = find_devices(settings.devices, variable, os.environ, nvml)
    # Other nodes wait for the jobs in order.
    pool = DevicePool(devices, settings.jobs_per_device, settings.max_parallel_jobs, in_order=settings.nnodes > 1)
    pool.size(settings.nproc_per_node, settings.devices_per_rank)
    locks = None
    if devices and settings.lock_devices and not settings.dry_run:
        locks = DeviceLocks(context.paths.sweep_dir, locked_for_this_rank(os.environ))
    allocator = DeviceAllocator(name_devices(devices, variable, nvml), nvml, locks, settings.min_free_memory_gb)
    if settings.dry_run:
        allocator.close()
        # Nothing is started, so it does not matter whether a device is in use or how much memory it has.
        allocator = DeviceAllocator({}, Nvml("", {}), None, None)
    return pool, allocator


def _check_nodes(context: SweepContext) -> None:
    """Refuse options that do not work on several nodes."""
    settings, config = context.settings, context.config
    if settings.nnodes == 1:
        return
    if not context.has_basic_sweeper:
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


def _fork_server(context: SweepContext) -> ForkServer | None:
    """Return the fork server. If `preload` has no effect, log why and return None."""
    settings, entry = context.settings, context.entry
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
