"""A job before its start: composed, frozen, and turned into commands and environments."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf

from ..common import files, quoting
from ..common.errors import FreezeError, StartError
from ..common.files import JobPaths, write_private, write_text
from ..common.protocol import JOB_ID_TOKEN, GroupSpec, Limits, Payload, RendezvousDir
from ..records.events import JobRecord
from ..resources.port import ReservedPort
from ..resources.schedule import JobSize
from . import environment, frozen_config
from .environment import GroupEnvironment, group_environment, rank_environments
from .frozen_config import CachedConfig
from .hydra_state import carry_resolvers, sweep_logging
from .program import FunctionEntry, ProgramEntry, function_body, rank_command
from .settings import Sweep, read_size

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedJob:
    """One job, ready to be started.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        config: Its final config.
        kept: The same, put by; None: it was not, or cannot be.
        frozen: What is resolved of it.
        size: How large it is on each node.
        nnodes: Number of nodes.
        payload: What its ranks will read.
        config_yaml: Its own config, not resolved.
        config_hash: SHA-256 of that, hexadecimal.
        known: What an earlier run of the sweep has recorded about it; None: nothing.
    """

    number: int
    overrides: tuple[str, ...]
    config: DictConfig
    kept: CachedConfig | None
    frozen: frozen_config.Frozen
    size: JobSize
    nnodes: int
    payload: Payload
    config_yaml: str
    config_hash: str
    known: JobRecord | None = None

    @property
    def first_attempt(self) -> Attempt:
        """Its first start in this run of the sweep."""
        return Attempt(number=self.known.attempts if self.known is not None else 0)

    @property
    def run_dir(self) -> str:
        """Run directory, absolute."""
        return self.frozen.run_dir

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.size.nproc


def compose_job(sweep: Sweep, overrides: Sequence[str]) -> DictConfig:
    """Compose a job's config.

    Raises:
        Exception: whatever composing raises.
    """
    config: DictConfig = sweep.context.config_loader.load_sweep_config(sweep.config, list(overrides))
    return config


def compose_and_plan(sweep: Sweep, number: int, overrides: Sequence[str]) -> PlannedJob:
    """Compose a job's config, unless the sweeper has done so already, and freeze the job.

    Raises:
        Exception: whatever composing raises, and as `plan_job`.
    """
    kept = sweep.spool.take(overrides)
    config = kept.load() if kept is not None else compose_job(sweep, overrides)
    return plan_job(sweep, number, overrides, config)


def plan_job(sweep: Sweep, number: int, overrides: Sequence[str], config: DictConfig) -> PlannedJob:
    """Freeze a job.

    Args:
        sweep: The sweep.
        number: Number of the job.
        overrides: Its override strings.
        config: Composed from them; it is made final in place.

    Raises:
        FreezeError: for what cannot be handed to ranks.
        OptionError: for a size that cannot be.
    """
    _refuse_other_launcher(sweep.config, config)
    config_yaml = frozen_config.own_yaml(config)
    config_hash = hashlib.sha256(config_yaml.encode("utf-8", "surrogateescape")).hexdigest()
    known = sweep.earlier.find(number, overrides, sweep.task, config_hash) if sweep.earlier is not None else None
    # Where its checkpoints are.
    run_dir = known.run_dir if known is not None and os.path.isdir(known.run_dir) else None
    # Of jobs on a cluster the id is known when they run.
    job_id = None if sweep.cluster is None else JOB_ID_TOKEN
    frozen = frozen_config.freeze(config, number, run_dir, job_id)
    # Not where jobs share a directory on purpose.
    if sweep.earlier is not None and run_dir is None and OmegaConf.is_interpolation(config.hydra.sweep, "subdir"):
        frozen = frozen_config.freeze(config, number, sweep.earlier.directory(frozen.run_dir, known), job_id)
    size = (sweep.cluster or sweep.pool).size(*read_size(*frozen.size))
    payload = Payload(
        overrides=tuple(overrides),
        run_dir=frozen.run_dir,
        task=sweep.entry.task if isinstance(sweep.entry, ProgramEntry) else None,
        task_name=sweep.task_name,
        sys_path=sweep.entry.start.sys_path if isinstance(sweep.entry, FunctionEntry) else (),
        check_config=sweep.settings.check_config is not None,
        body=_body(sweep, config),
        argv=tuple(sys.argv),
    )
    nnodes = sweep.settings.nnodes
    # Now, where it costs no time between two jobs.
    kept = CachedConfig.store(config) if sweep.cluster is None else None
    return PlannedJob(
        number, tuple(overrides), config, kept, frozen, size, nnodes, payload, config_yaml, config_hash, known
    )


def _refuse_other_launcher(sweep_config: DictConfig, config: DictConfig) -> None:
    """Refuse a job that chose other launcher options, which came too late. Hydra 1.4 does so itself."""
    ours, theirs = (OmegaConf.to_container(one.hydra.launcher, resolve=False) for one in (sweep_config, config))
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            raise FreezeError(
                f"This job's config sets hydra.launcher.{key}={theirs.get(key)!r}, but the launcher was made before, "
                f"with {ours.get(key)!r}. Set it for the whole sweep; ranks alone can differ between jobs, by an "
                "interpolation such as hydra.launcher.nproc_per_node='${trainer.devices}'."
            )


def _body(sweep: Sweep, config: DictConfig) -> bytes:
    main = sweep.main
    without_program = isinstance(sweep.entry, FunctionEntry)
    content: dict[str, object] = {
        "config": config,
        "callbacks": _callbacks(sweep),
        "resolvers": carry_resolvers(lambda value: frozen_config.dumps(value, main), without_program=without_program),
        "logging": sweep_logging(sweep.config),
    }
    if isinstance(sweep.entry, FunctionEntry):
        content |= function_body(sweep.task_function, sweep.context)
    try:
        return frozen_config.dumps(content, main)
    except Exception as error:
        key = frozen_config.unpicklable_key(config, lambda value: frozen_config.dumps(value, main))
        raise FreezeError(
            f"The job's config cannot be handed to its ranks: {key or error} cannot be pickled. Build such an object "
            "inside the job instead."
        ) from error


def _callbacks(sweep: Sweep) -> bytes | None:
    try:
        return frozen_config.dumps(sweep.context.callbacks, sweep.main)
    except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
        _log.warning(
            "The callbacks cannot be pickled (%s: %s). Ranks make new ones from the config, without their state.",
            type(error).__name__,
            error,
        )
        return None


def write_job(
    sweep: Sweep, job: PlannedJob, attempt: Attempt, place: Allocation, base: Mapping[str, str]
) -> tuple[JobStart, GroupSpec]:
    """Write what the ranks read into the run directory, and return the start of the job and what a keeper needs.

    Args:
        sweep: The sweep.
        job: The job.
        attempt: Which start of it this is.
        place: Where it runs.
        base: What all ranks start from.

    Raises:
        OSError: when the run directory cannot be written.
        StartError: when the job's environment contradicts its devices.
    """
    paths = files.JobPaths(job.run_dir)
    files.make_job_folder(paths)
    start = describe_start(sweep, job, attempt, place, files.write_payload(paths, job.payload))
    spec = group_spec(start, base)
    write_facts(start, base, job.config_yaml)
    return start, spec


def describe_start(
    sweep: Sweep,
    job: PlannedJob,
    attempt: Attempt,
    place: Allocation,
    source: str | quoting.ComposeArgs,
) -> JobStart:
    """Return one start of a job, without writing anything.

    Args:
        sweep: The sweep.
        job: The job.
        attempt: Which start of it this is.
        place: Where it runs.
        source: SHA-256 of the payload that its ranks read, or how they compose its config themselves.
    """
    paths = files.JobPaths(job.run_dir)
    recipe, payload_digest = (None, source) if isinstance(source, str) else (source, None)
    argv, cwd = rank_command(sweep.entry, sweep.settings.wrapper, job.run_dir, job.overrides, recipe)
    run_id = f"hydra-ddp-{uuid.uuid4().hex[:12]}-job{job.number}"
    group = environment.GroupEnvironment(
        nproc=job.size.nproc,
        master_addr=place.port.address,
        master_port=place.port.number,
        run_id=run_id,
        attempt=attempt.number,
        restart_count=attempt.restarts,
        max_restarts=sweep.settings.max_restarts,
        devices=place.devices or None,
        device_env_var=sweep.settings.device_env_var,
        folder=paths.folder,
        payload_digest=payload_digest,
        job_num=job.number,
        sweep_dir=job.frozen.sweep_dir,
        locked=sweep.gate.lock_names(place.devices),
        nnodes=job.nnodes,
    )
    return JobStart(
        number=job.number,
        overrides=job.overrides,
        run_dir=job.run_dir,
        argv=argv,
        cwd=cwd,
        env_set=job.frozen.env_set,
        group=group,
        limits=sweep.settings.limits,
        terminal=sweep.settings.debug,
        devices_per_rank=job.size.devices_per_rank,
        meeting=os.path.join(sweep.gathering.job_folder(job.number), run_id) if sweep.gathering is not None else "",
    )


def start_error(error: Exception, job: PlannedJob) -> Exception:
    """Return an error that says where a job could not be started, and why."""
    if isinstance(error, ValueError):
        # Such as a NUL in its name.
        return StartError(
            f"The run directory {job.run_dir!r} cannot be used: {error}. Choose another (hydra.sweep.subdir)."
        )
    if not isinstance(error, OSError):
        return error
    why = error.strerror or str(error)
    if error.filename is None:
        return StartError(
            f"The job could not be started in its run directory {job.run_dir}: {why}. Mend that, and run the job again."
        )
    return StartError(
        f"The run directory {job.run_dir} cannot be used: {why}: {error.filename}. Mend that, or choose another "
        "(hydra.sweep.dir, hydra.sweep.subdir)."
    )


@dataclass(frozen=True)
class Attempt:
    """Which start of a job this is.

    Attributes:
        number: Starts before this one, for whatever reason.
        restarts: Those of them that followed a failure (`max_restarts`).
        port_clash: Whether one of them followed a port that was taken.
        unanswered: Those of them that no spawner took up.
        why: Why this start follows another; empty for the first.
        since: The first start, monotonic seconds.
    """

    number: int = 0
    restarts: int = 0
    port_clash: bool = False
    unanswered: int = 0
    why: str = ""
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Allocation:
    """What a job holds while it runs.

    Attributes:
        devices: Ids of its devices; empty: none.
        port: Its rendezvous port.
    """

    devices: tuple[str, ...]
    port: ReservedPort


@dataclass(frozen=True)
class JobStart:
    """One start of a job.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        run_dir: Run directory, absolute.
        argv: Command of its ranks.
        cwd: Directory in which they start.
        env_set: `hydra.job.env_set`, into which Hydra has merged `env_copy`.
        group: What the variables of its ranks are made from.
        limits: Its time limits.
        terminal: Whether rank 0 has the terminal.
        devices_per_rank: Devices that each rank uses, if there are any.
        meeting: Folder in which its nodes meet, absolute; empty: it has one node.
        ignored: Signals that its ranks ignore unless they set a handler.
        hosts: Host names of its nodes on a cluster; empty: it is on none.
    """

    number: int
    overrides: tuple[str, ...]
    run_dir: str
    argv: tuple[str, ...]
    cwd: str
    env_set: Mapping[str, str]
    group: GroupEnvironment
    limits: Limits
    terminal: bool = False
    devices_per_rank: int = 1
    meeting: str = ""
    ignored: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def paths(self) -> JobPaths:
        """Its files."""
        return JobPaths(self.run_dir)

    @property
    def run_id(self) -> str:
        """Name of this start, which every process of it has in its environment."""
        return self.group.run_id


def group_spec(start: JobStart, base: Mapping[str, str], node: int = 0) -> GroupSpec:
    """Return what the keeper of one node needs.

    Args:
        start: The start.
        base: What ranks on that node start from.
        node: Number of the node.

    Raises:
        StartError: when the job's environment contradicts its devices.
    """
    group, paths = start.group, start.paths
    ranks = range(node * group.nproc, (node + 1) * group.nproc)
    return GroupSpec(
        argv=start.argv,
        cwd=start.cwd,
        environment=group_environment(base, start.env_set, group),
        rank_environments=rank_environments(base, group)[ranks.start : ranks.stop],
        log_files=tuple(map(paths.log, ranks)),
        outcome_files=tuple(map(paths.outcome, ranks)),
        failure_files=tuple(map(paths.failure, ranks)),
        limits=start.limits,
        terminal=start.terminal,
        first_rank=ranks.start,
        meeting=RendezvousDir(start.meeting, node, group.nnodes) if start.meeting else None,
        ignored=start.ignored,
    )


def write_facts(start: JobStart, base: Mapping[str, str], config_yaml: str) -> None:
    """Write what people, and later runs of the sweep, want to know of a job into its folder; make those of its errors.

    Args:
        start: Its start.
        base: What all ranks start from.
        config_yaml: Its own config, not resolved.

    Raises:
        OSError: when the folder cannot be written.
        StartError: when the job's environment contradicts its devices.
    """
    for rank in range(start.group.world_size):
        # As torchrun does: libraries put files of their own beside it.
        os.makedirs(os.path.dirname(start.group.error_file(rank)), exist_ok=True)
    write_text(start.paths.facts, json.dumps(job_facts(start, base), indent=2) + "\n")
    write_private(start.paths.config, config_yaml.encode("utf-8", "surrogateescape"))


def job_facts(start: JobStart, base: Mapping[str, str]) -> dict[str, object]:
    """Return what `job.json` has: what is worth knowing about a job; of the environment, what differs from ours.

    Args:
        start: Its start.
        base: What all ranks start from.

    Raises:
        StartError: when the job's environment contradicts its devices.
    """
    ours = os.environ
    environment = group_environment(base, start.env_set, start.group)

    def shown(environment: Mapping[str, str]) -> dict[str, str]:
        changed = {name: value for name, value in environment.items() if ours.get(name) != value}
        return {name: f"${name}" if quoting.is_secret(name) else value for name, value in sorted(changed.items())}

    return {
        "job": start.number,
        "overrides": list(start.overrides),
        "run_dir": start.run_dir,
        "nproc": start.group.world_size,
        "argv": list(start.argv),
        "cwd": start.cwd,
        "environment": shown(environment),
        "environment_removed": sorted(name for name in ours if name not in environment),
        "rank_environments": [shown(own) for own in rank_environments(base, start.group)],
    }
