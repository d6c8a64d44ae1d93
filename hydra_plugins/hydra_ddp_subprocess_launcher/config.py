"""The options of the launcher, and what a rank composes instead of the user's config.

Hydra imports this module in every Hydra app on the machine, before it stands in `sys.modules`. Hence only light
imports, and no `from __future__ import annotations`: dataclasses could not look up their own module.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from .common.choices import Entry, OnCodeChange, OnConfigDifference, OnInterrupt, Resume, ShowProgress

# For what it finds registered now, before there are callbacks.
from .job import hydra_state  # noqa: F401


@dataclass
class DDPOptions:
    """Options of all launchers of this package. A name that torchrun has is torchrun's."""

    # Ranks of a job on each node: a number, or `auto`: one a device of the pool (on a cluster: gpus_per_node), 1
    # without devices. Read from each job's own config, so `${trainer.devices}` gives each job its own world size.
    nproc_per_node: Any = "auto"
    # Devices that each rank uses, as for a model split over two of them. A job gets nproc_per_node times as many, and
    # each of its ranks sees all of them; `auto` ranks are then as many as the devices suffice for. Read from each job's
    # own config, too. Without devices it has no effect.
    devices_per_rank: int = 1
    # OMP_NUM_THREADS of each rank. null: usable cores divided by the most ranks at once; a value that the
    # environment already has stays.
    omp_num_threads: int | None = None
    # Address at which rank 0 listens. null: 127.0.0.1, or ::1 where that cannot be bound; on several nodes of a cluster
    # the first one of its node list.
    master_addr: str | None = None
    # Port at which rank 0 listens. null: a free one for each job, reserved while the job runs.
    master_port: int | None = None
    # Starts of a job's whole group after a failed one, on a new port, with earlier logs kept. Never after Ctrl-C.
    max_restarts: int = 0
    # Seconds that the other ranks may go on after the first one ended with exit code 0. null: for ever.
    exit_timeout_s: float | None = None
    # Seconds between SIGTERM and SIGKILL when a job is stopped.
    grace_period_s: float = 15
    # Command put before each rank's own, such as [nsys,profile].
    wrapper: list[str] = field(default_factory=list)
    # What a rank runs. script: the user's program again. function: the pickled job function. auto: script, but function
    # where there is no program to run again (pytest, a notebook, `python -c`, hydra_zen.launch).
    entry: Entry = Entry.auto
    # Ranks whose output is also shown on the terminal: a list of numbers, or `all`. On the board (`progress`), while
    # several jobs run at a time, [0] means the last line of rank 0 in its job's row.
    tee_ranks: Any = field(default_factory=lambda: [0])
    # What is shown of the jobs while they run. rich: a board on stderr. plain: a line when a job starts and one when it
    # ends. none: of jobs that complete, nothing. auto: rich if stderr is a terminal, else plain.
    progress: ShowProgress = ShowProgress.auto
    # Compare the resolved configs of a job's ranks: null (do not), warn, error.
    check_config: OnConfigDifference | None = None
    # When source files changed since the sweep started: warn (once), fail (the jobs that start after it), ignore.
    code_changed: OnCodeChange = OnCodeChange.warn
    # In the sweep directory of an earlier run (hydra.sweep.dir): unfinished runs what has not completed there, or has
    # another config by now; failed what has failed there alone. What has completed gives its value again.
    resume: Resume | None = None
    # Failed jobs after which no more are started. null: go on whatever fails.
    max_failures: int | None = None
    # At max_failures also end the jobs that run.
    stop_running: bool = False
    # Launch also from within a rank, or when started as one of several processes.
    allow_nested: bool = False
    # Start nothing and write nothing: print what each job would run, as shell commands that can be pasted.
    dry_run: bool = False


@dataclass
class DDPSubprocessLauncherConf(DDPOptions):
    """Options of `hydra/launcher=ddp_subprocess`: ranks on this machine."""

    _target_: str = "hydra_plugins.hydra_ddp_subprocess_launcher.plugins.DDPSubprocessLauncher"

    # Ids of the devices that jobs may use, such as [0,1] or [GPU-8a5b]. null: what the visible-devices variable
    # of the launching process names, else what NVML lists, else none. []: none.
    devices: list[str] | None = None
    # Variable that shows a job its devices: HIP_VISIBLE_DEVICES on ROCm, ASCEND_RT_VISIBLE_DEVICES on Ascend.
    device_env_var: str = "CUDA_VISIBLE_DEVICES"
    # Most jobs that share one device.
    jobs_per_device: int = 1
    # Most jobs at once. null: as many as the devices allow, 1 without devices.
    max_parallel_jobs: int | None = None
    # Keep other sweeps of yours on this machine off the devices of running jobs, and wait for theirs.
    lock_devices: bool = True
    # Free memory, in 10^9 bytes, that a device must have before a job starts on it, as NVML tells. null: any.
    min_free_memory_gb: float | None = None
    # Nodes on which each job runs, one launching process a node, started by hand with the same command but for
    # `node_rank`. hydra.sweep.dir must then be set, and seen by all; master_addr is needed, too.
    nnodes: int = 1
    # Which of them this one is: 0 decides, and the others follow.
    node_rank: int = 0
    # Minutes after which a start of a job is ended and counts as failed. null: never.
    timeout_min: float | None = None
    # Modules to import once, in a process of which ranks are forks, instead of anew in each rank: null (none), auto
    # (numpy, torch, torch.distributed, omegaconf and hydra, as far as the program has imported them when it sweeps),
    # or a list of names.
    preload: Any = None
    # Rank 0 of the one job has the terminal, so that `breakpoint()` works in it; no restarts, no time limits.
    debug: bool = False


@dataclass
class DDPRankSweeperConf:
    """The sweeper that a rank meets: it runs the one frozen job of its run directory."""

    _target_: str = "hydra_plugins.hydra_ddp_subprocess_launcher.plugins.DDPRankSweeper"
    # Run directory of the job, percent-encoded.
    run_dir: str = MISSING
    # Overrides of the job, each percent-encoded, joined by spaces; null where they are too long for a command.
    overrides: str | None = None
    # The next three are in the commands that a dry run prints, as it leaves no payload: with them a rank composes its
    # job's config itself. Primary config of the sweep, percent-encoded; null: it has none.
    config_name: str | None = None
    # The sweep's overrides of Hydra's part of the config, encoded like `overrides`; null: there is a payload.
    hydra_overrides: str | None = None
    # Which of the program's `hydra.main`: module, qualified name, and how often it was swept before; encoded likewise.
    task: str | None = None


@dataclass
class DDPRankConf:
    """Primary config of a rank. The launcher is named so that options a script adds to `sys.argv` find their keys."""

    defaults: list[Any] = field(
        default_factory=lambda: [
            "_self_",
            {"override hydra/sweeper": "ddp_rank"},
            {"override hydra/launcher": "ddp_subprocess"},
            {"override hydra/hydra_logging": "none"},
        ]
    )
    hydra: dict[str, Any] = field(default_factory=lambda: {"mode": "MULTIRUN"})


_store = ConfigStore.instance()
_store.store(
    group="hydra/launcher", name="ddp_subprocess", node=DDPSubprocessLauncherConf, provider="ddp_subprocess_launcher"
)
_store.store(group="hydra/sweeper", name="ddp_rank", node=DDPRankSweeperConf, provider="ddp_subprocess_launcher")
_store.store(name="ddp_rank", node=DDPRankConf, provider="ddp_subprocess_launcher")

try:
    from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
except ImportError:
    pass  # The extra `submitit` is not installed; DDPLauncherHint says so to who chooses its launchers.
else:

    @dataclass
    class DDPSubmititOptions(DDPOptions):
        """Options of the launchers that go through submitit, beside submitit's own."""

        # What becomes of this sweep's jobs when the launching process is stopped (Ctrl-C, SIGTERM, SIGHUP): cancel, or
        # leave. Those that were left are found again by hydra.launcher.resume=unfinished.
        on_interrupt: OnInterrupt = OnInterrupt.cancel

    @dataclass
    class DDPSubmititSlurmConf(SlurmQueueConf, DDPSubmititOptions):  # type: ignore[misc]
        """Options of `hydra/launcher=ddp_submitit_slurm`: all of submitit_slurm's, and ours."""

        _target_: str = "hydra_plugins.hydra_ddp_subprocess_launcher.plugins.DDPSubmititSlurmLauncher"

    @dataclass
    class DDPSubmititLocalConf(LocalQueueConf, DDPSubmititOptions):  # type: ignore[misc]
        """Options of `hydra/launcher=ddp_submitit_local`, for trying out: all of submitit_local's, and ours."""

        _target_: str = "hydra_plugins.hydra_ddp_subprocess_launcher.plugins.DDPSubmititLocalLauncher"
        # Most jobs at once. Submitit's own local launcher starts all at once, on the same devices.
        max_parallel_jobs: int = 1

    _store.store(
        group="hydra/launcher", name="ddp_submitit_slurm", node=DDPSubmititSlurmConf, provider="ddp_subprocess_launcher"
    )
    _store.store(
        group="hydra/launcher", name="ddp_submitit_local", node=DDPSubmititLocalConf, provider="ddp_subprocess_launcher"
    )
