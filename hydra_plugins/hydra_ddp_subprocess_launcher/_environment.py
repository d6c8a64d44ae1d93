"""Environment of a rank: torchrun's contract, made by pure functions.

Source of the names: torch.distributed.elastic (`torch/distributed/elastic/agent/server/local_elastic_agent.py`) and
torchrun's documentation, as of torch 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ._errors import StartError

# Presence of this variable tells a process that it is a rank, or was started by one.
PAYLOAD_DIGEST = "HYDRA_DDP_PAYLOAD_SHA256"
# So does this one, also where a rank is run by hand after a dry run, which leaves no payload.
JOB_NUM = "HYDRA_DDP_JOB_NUM"
# Pid of the process that runs the job as this rank: what it starts inherits it, and does not run the job again.
RANK_PROCESS = "HYDRA_DDP_RANK_PROCESS"
# Names of the devices that are locked for the job, percent-encoded, for a sweep within it.
_LOCKED = "HYDRA_DDP_LOCKED"

# What each rank has with a value of its own, or of its job's.
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
    *(PAYLOAD_DIGEST, JOB_NUM, RANK_PROCESS, _LOCKED, "HYDRA_DDP_ATTEMPT", "HYDRA_DDP_SWEEP_DIR"),
)
# Unless the user has them with other values.
_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

_SCRUBBED = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"),
        *("SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
        *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_GTIDS"),
    )
)
_SCRUBBED_PREFIXES = ("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "PL_", "HYDRA_DDP_")
# Lightning's seed: a user's own choice when it was exported, a left-over when Lightning set it in this process.
_SEED_VARIABLE = "PL_GLOBAL_SEED"


@dataclass(frozen=True)
class GroupEnvironment:
    """What the variables of one job's ranks are made from.

    Attributes:
        nproc: Number of ranks on each node.
        master_addr: Address at which rank 0 listens.
        master_port: Port at which rank 0 listens.
        run_id: Name of this attempt, unique on the machine.
        attempt: Starts of the job before this one, for whatever reason.
        restart_count: Restarts after a failure (`max_restarts`) before this attempt.
        max_restarts: Restarts the job may have in all.
        devices: Ids of the job's devices; None: leave the visible-devices variable as it is.
        device_env_var: Name of the visible-devices variable.
        error_files: One path a rank, on whatever node, for torchrun's error file.
        payload_digest: SHA-256 of the payload, hexadecimal; None: there is none.
        job_num: Number of the job.
        sweep_dir: Sweep directory, absolute.
        locked: Names under which the job's devices are locked.
        nnodes: Number of nodes.
    """

    nproc: int
    master_addr: str
    master_port: int
    run_id: str
    attempt: int
    restart_count: int
    max_restarts: int
    devices: tuple[str, ...] | None
    device_env_var: str
    error_files: tuple[str, ...]
    payload_digest: str | None
    job_num: int
    sweep_dir: str
    locked: tuple[str, ...] = ()
    nnodes: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.nproc


def scrub(inherited: Mapping[str, str], at_start: Mapping[str, str] | None) -> dict[str, str]:
    """Return an environment without the traces of other launchers.

    Args:
        inherited: The launching process's environment now.
        at_start: The environment with which it was started; None where that is not known.
    """
    clean = {
        name: value
        for name, value in inherited.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }
    if at_start is not None and _SEED_VARIABLE in at_start:
        clean[_SEED_VARIABLE] = at_start[_SEED_VARIABLE]
    return clean


def ignored_rendezvous(inherited: Mapping[str, str]) -> list[str]:
    """Return the inherited `MASTER_*` variables that ranks will not see."""
    return [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in inherited]


def group_environment(base: Mapping[str, str], env_set: Mapping[str, str], group: GroupEnvironment) -> dict[str, str]:
    """Return the variables common to all ranks of a job.

    Args:
        base: What `scrub` and `with_omp_threads` return.
        env_set: The job's `hydra.job.env_set`, with `env_copy` merged in as Hydra does.
        group: What the job's variables are made from.

    Raises:
        StartError: when `env_set` names devices while the launcher gives them out.
    """
    if group.devices is not None and group.device_env_var in env_set:
        raise StartError(
            f"hydra.job.env_set.{group.device_env_var}={env_set[group.device_env_var]!r} contradicts the launcher, "
            f"which gives this job the devices {','.join(group.devices)} of its pool (hydra.launcher.devices). "
            f"Remove the one from hydra.job.env_set, or set hydra.launcher.devices=[]."
        )
    environment = common_environment(base, env_set) | {
        "WORLD_SIZE": str(group.world_size),
        "LOCAL_WORLD_SIZE": str(group.nproc),
        "GROUP_WORLD_SIZE": str(group.nnodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(group.world_size),
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(group.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(group.max_restarts),
        **({} if group.payload_digest is None else {PAYLOAD_DIGEST: group.payload_digest}),
        "HYDRA_DDP_ATTEMPT": str(group.attempt),
        JOB_NUM: str(group.job_num),
        "HYDRA_DDP_SWEEP_DIR": group.sweep_dir,
        **({_LOCKED: " ".join(quote(name, safe="") for name in group.locked)} if group.locked else {}),
    }
    if group.devices is not None:
        environment[group.device_env_var] = ",".join(group.devices)
    return environment


def common_environment(base: Mapping[str, str], env_set: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all ranks of all jobs with this `env_set`, which are known before a job is."""
    return {**_DEFAULTS, **base, **env_set}


def rank_environments(group: GroupEnvironment) -> tuple[dict[str, str], ...]:
    """Return what each rank has of its own, to be laid over the group's: one mapping a rank, on whatever node."""
    return tuple(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % group.nproc),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": str(rank // group.nproc),
            "NODE_RANK": str(rank // group.nproc),
            "TORCHELASTIC_ERROR_FILE": group.error_files[rank],
        }
        for rank in range(group.world_size)
    )


def locked_for_this_rank(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the devices that are locked for the job of which this process is a rank."""
    return frozenset(map(unquote, environ.get(_LOCKED, "").split()))


def refuse_as_rank(environ: Mapping[str, str]) -> None:
    """Refuse to launch from a process that is itself one of several.

    Raises:
        StartError: naming the variables that tell, and how to start instead.
    """
    variables = [name for name in (PAYLOAD_DIGEST, JOB_NUM) if name in environ]
    if variables:
        raise StartError(
            f"{variables[0]} is set: this process is a rank of a job, or was started by one, and launching from "
            "within it would start ranks of ranks. Start the sweep outside, or set hydra.launcher.allow_nested=true."
        )
    for names in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ):
        rank, size = (environ.get(name, "") for name in names)
        if rank and size.isdecimal() and int(size) > 1:
            raise StartError(
                f"{names[0]}={rank} and {names[1]}={size} are set: this process is one of {size} that torchrun, "
                "accelerate, mpirun or srun started, and each would run its own sweep. Start it with plain `python` "
                "(the launcher starts the ranks), or set hydra.launcher.allow_nested=true if this is meant."
            )


def with_terminal_size(environment: Mapping[str, str], size: os.terminal_size | None) -> dict[str, str]:
    """Return the environment with COLUMNS and LINES, as a rank prints to a file; the user's values stay.

    Args:
        environment: What ranks start from.
        size: Of the launching process's terminal; None: it has none.
    """
    # A terminal may not know its own size.
    if size is None or 0 in size:
        return dict(environment)
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines), **environment}


def with_omp_threads(
    environment: Mapping[str, str], chosen: int | None, cores: int, ranks_at_once: int
) -> dict[str, str]:
    """Return the environment with OMP_NUM_THREADS: the option, else the user's value, else a share of the cores.

    Args:
        environment: What ranks start from.
        chosen: The option `omp_num_threads`.
        cores: Processor cores that may be used.
        ranks_at_once: The most ranks that run at once.
    """
    if chosen is None and environment.get("OMP_NUM_THREADS"):
        return dict(environment)
    threads = chosen or max(1, cores // max(1, ranks_at_once))
    return {**environment, "OMP_NUM_THREADS": str(threads)}
