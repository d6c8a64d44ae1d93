"""Build the environment of a rank with pure functions, following torchrun's contract.

Source of the names: torch.distributed.elastic (`torch/distributed/elastic/agent/server/local_elastic_agent.py`) and
torchrun's documentation, as of torch 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote, unquote

from ..common.errors import StartError
from ..common.files import JobPaths
from ..common.protocol import LaunchSpec

# If this variable is set, the process is a rank or was started by one.
PAYLOAD_DIGEST = "HYDRA_DDP_PAYLOAD_SHA256"
# Likewise; it is set even if a rank is run by hand after a dry run, which leaves no payload.
JOB_NUM = "HYDRA_DDP_JOB_NUM"
# Pid of the process that runs the job as this rank. Its child processes inherit it, and do not run the job again.
RANK_PROCESS = "HYDRA_DDP_RANK_PROCESS"
# Names of the devices locked for the job, percent-encoded, for a sweep within the job.
_LOCKED = "HYDRA_DDP_LOCKED"

# Name of the visible-devices variable, if the launcher assigns devices.
_DEVICE_ENV_VAR = "HYDRA_DDP_DEVICE_ENV_VAR"
_RUN_ID = "TORCHELASTIC_RUN_ID"

_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
# A scheduler's names for the same values. A rank has them if the scheduler's job id is in its environment, so that code
# that checks the id and reads the rank (such as submitit's JobEnvironment) finds this rank, not a world of one.
_SLURM = {
    "rank": ("SLURM_PROCID",),
    "local_rank": ("SLURM_LOCALID",),
    "node": ("SLURM_NODEID",),
    "world_size": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "nproc": ("SLURM_NTASKS_PER_NODE",),
    "nnodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
}
_SUBMITIT_LOCAL = {
    "rank": ("SUBMITIT_LOCAL_GLOBALID",),
    "local_rank": ("SUBMITIT_LOCAL_LOCALID",),
    "node": ("SUBMITIT_LOCAL_NODEID",),
    "world_size": ("SUBMITIT_LOCAL_NTASKS",),
    "nproc": (),
    "nnodes": ("SUBMITIT_LOCAL_JOB_NUM_NODES",),
}
_SCHEDULERS = {"SLURM_JOB_ID": _SLURM, "SUBMITIT_LOCAL_JOB_ID": _SUBMITIT_LOCAL}
_SCHEDULERS_OWN = tuple(name for tables in _SCHEDULERS.values() for names in tables.values() for name in names)

# The launcher's own variables, with a value per rank or per job. `hydra.job.env_set` must not set them, and if a
# program changes one, the launcher restores it before the job's function runs.
RANK_VARIABLES = (
    *_TORCHRUN,
    *(_RUN_ID, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
    *(PAYLOAD_DIGEST, JOB_NUM, RANK_PROCESS, _LOCKED, _DEVICE_ENV_VAR, "HYDRA_DDP_ATTEMPT", "HYDRA_DDP_SWEEP_DIR"),
    *_SCHEDULERS_OWN,
)
# Variables with these prefixes are the launcher's own, too.
_OWN_PREFIXES = ("TORCHELASTIC_", "HYDRA_DDP_")
# Defaults that the user's own values override.
_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

_SCRUBBED = frozenset(
    (
        *_TORCHRUN,
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"),
        *("SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
        *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_GTIDS"),
        *("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_NODEID"),
        *("OMPI_UNIVERSE_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PALS_RANKID", "PALS_LOCAL_RANKID"),
        *("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "CROSS_RANK", "CROSS_SIZE"),
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    )
)
_SCRUBBED_PREFIXES = (
    *_OWN_PREFIXES,
    *("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "JSM_NAMESPACE_", "PL_"),
)
# Lightning's seed: the user's choice if it was exported, a leftover if Lightning set it in this process.
_SEED_VARIABLE = "PL_GLOBAL_SEED"


def scrub(inherited: Mapping[str, str], at_start: Mapping[str, str] | None) -> dict[str, str]:
    """Remove the variables of other launchers from an environment.

    Args:
        inherited: Current environment of the launching process.
        at_start: Environment with which it was started, or None if that is not known.
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


def group_environment(base: Mapping[str, str], spec: LaunchSpec) -> dict[str, str]:
    """Return the variables common to all ranks of a job.

    Args:
        base: Environment that `scrub` and `with_omp_threads` return.
        spec: The start of the job.

    Raises:
        StartError: if `env_set` has one of the launcher's own variables.
    """
    refuse_own_variables(spec.env_set, spec.device_env_var, spec.devices or ())
    environment = common_environment(base, spec.env_set) | {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        _RUN_ID: spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(spec.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        **({} if spec.payload_digest is None else {PAYLOAD_DIGEST: spec.payload_digest}),
        "HYDRA_DDP_ATTEMPT": str(spec.attempt),
        JOB_NUM: str(spec.number),
        "HYDRA_DDP_SWEEP_DIR": spec.sweep_dir,
        **({_LOCKED: " ".join(quote(name, safe="") for name in spec.locked)} if spec.locked else {}),
    }
    for names in _tables(base):
        sizes = {"world_size": spec.world_size, "nproc": spec.nproc, "nnodes": spec.nnodes}
        environment |= {name: str(value) for key, value in sizes.items() for name in names[key]}
    if spec.devices is not None:
        environment[spec.device_env_var] = ",".join(spec.devices)
        environment[_DEVICE_ENV_VAR] = spec.device_env_var
    return environment


def _tables(base: Mapping[str, str]) -> list[Mapping[str, tuple[str, ...]]]:
    return [names for job_id, names in _SCHEDULERS.items() if job_id in base]


def refuse_own_variables(env_set: Mapping[str, object], device_env_var: str, devices: Iterable[str]) -> None:
    """Refuse a config that sets the launcher's own variables.

    Args:
        env_set: `hydra.job.env_set`, with `env_copy` merged in as Hydra does.
        device_env_var: Name of the visible-devices variable.
        devices: Ids of the devices that the launcher assigns. If empty, `device_env_var` may be set.

    Raises:
        StartError: naming the first such variable, and what to do instead.
    """
    pool = ",".join(devices)
    for name, value in env_set.items():
        if pool and name == device_env_var:
            raise StartError(
                f"hydra.job.env_set.{name}={value!r} contradicts the launcher, which gives out the devices {pool} of "
                "its pool (hydra.launcher.devices). Remove the variable from hydra.job.env_set and env_copy, or set "
                "hydra.launcher.devices=[]."
            )
        if name in RANK_VARIABLES or name.startswith(_OWN_PREFIXES):
            option = _OPTIONS.get(name)
            instead = f" and set hydra.launcher.{option} instead" if option else ""
            raise StartError(
                f"hydra.job.env_set.{name}={value!r} contradicts the launcher, which gives every rank its own value "
                f"of {name}. Remove it from hydra.job.env_set and env_copy{instead}."
            )


_OPTIONS = {
    "WORLD_SIZE": "nproc_per_node",
    "LOCAL_WORLD_SIZE": "nproc_per_node",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
    "TORCHELASTIC_MAX_RESTARTS": "max_restarts",
}


def common_environment(base: Mapping[str, str], env_set: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all ranks of all jobs with this `env_set`, which are known before any job is."""
    return {**_DEFAULTS, **base, **env_set}


def error_file(spec: LaunchSpec, rank: int) -> str:
    """Return the path of a rank's error file: as deep below the directory of this start as torchrun's."""
    folder = JobPaths(spec.run_dir).folder
    return os.path.join(folder, spec.run_id, f"attempt_{spec.restart_count}", str(rank), "error.json")


def rank_environments(base: Mapping[str, str], spec: LaunchSpec) -> tuple[dict[str, str], ...]:
    """Return each rank's own variables, to be merged over the group's: one mapping per rank, for all nodes."""

    def scheduler_names(rank: int) -> dict[str, str]:
        own = {"rank": rank, "local_rank": rank % spec.nproc, "node": rank // spec.nproc}
        return {name: str(own[key]) for names in _tables(base) for key in own for name in names[key]}

    return tuple(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % spec.nproc),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": str(rank // spec.nproc),
            "NODE_RANK": str(rank // spec.nproc),
            "TORCHELASTIC_ERROR_FILE": error_file(spec, rank),
            **scheduler_names(rank),
        }
        for rank in range(spec.world_size)
    )


def identity(now: Mapping[str, str], at_start: Mapping[str, str] | None) -> dict[str, str]:
    """Return the launcher's own variables of this rank, with the values with which it was started.

    Args:
        now: Its current environment, which the program may have changed.
        at_start: Environment with which it was started, or None if that is not known.
    """
    # A program that sets its process title may have overwritten the environment at the start.
    known = at_start is not None and all(name in at_start for name in ("RANK", JOB_NUM, _RUN_ID))
    started = at_start if known and at_start is not None else now
    names = (*RANK_VARIABLES, started.get(_DEVICE_ENV_VAR, ""))
    return {name: started[name] for name in names if name in started}


def locked_for_this_rank(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the devices locked for the job that this process is a rank of."""
    return frozenset(map(unquote, environ.get(_LOCKED, "").split()))


def refuse_as_rank(environ: Mapping[str, str], orig_argv: Sequence[str] = ()) -> None:
    """Refuse to launch from a process that is itself a rank.

    Raises:
        StartError: naming the variables that show it, and how to start instead.
    """
    variables = [name for name in (PAYLOAD_DIGEST, JOB_NUM) if name in environ]
    if variables and "ddp_rank" in orig_argv:
        raise StartError(
            "This process is a rank of a job, and its program sweeps again: it has replaced sys.argv, which had the "
            "rank's own command, or calls hydra.main within the job. Let it add to sys.argv instead, or set "
            "hydra.launcher.entry=function to hand the job function to the ranks by pickle."
        )
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
    """Add COLUMNS and LINES, as a rank writes to a file; the user's values stay.

    Args:
        size: Size of the launching process's terminal, or None if it has none.
    """
    # A terminal that does not know its size reports 0.
    if size is None or 0 in size:
        return dict(environment)
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines), **environment}


def with_omp_threads(
    environment: Mapping[str, str], chosen: int | None, cores: int, ranks_at_once: int
) -> dict[str, str]:
    """Add OMP_NUM_THREADS: the option, else the user's value, else a share of the cores.

    Args:
        chosen: The option `omp_num_threads`, or None if it is not set.
        cores: Number of processor cores that may be used.
        ranks_at_once: Maximum number of ranks that run at the same time.
    """
    if chosen is None and environment.get("OMP_NUM_THREADS"):
        return dict(environment)
    threads = chosen or max(1, cores // max(1, ranks_at_once))
    return {**environment, "OMP_NUM_THREADS": str(threads)}
