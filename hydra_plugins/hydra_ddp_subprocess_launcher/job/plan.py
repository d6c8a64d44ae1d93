"""Plan a job: compose and freeze its config, and build the commands and environments of its ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from omegaconf import DictConfig, OmegaConf

from ..common.errors import FreezeError, StartError
from ..common.files import JobPaths, dump, make_job_folder, write_private, write_text
from ..common.protocol import GroupSpec, LaunchSpec, Payload, RendezvousDir
from ..common.quoting import is_secret
from ..records.events import JobRecord
from ..resources.port import ReservedPort
from ..resources.schedule import JobSize
from . import frozen_config
from .environment import error_file, group_environment, rank_environments
from .frozen_config import CachedConfig, ConfigCache, Frozen
from .hydra_state import carry_resolvers, sweep_logging
from .program import FunctionEntry, ProgramEntry, function_body, rank_command
from .settings import LaunchSettings, SweepContext, read_size

_log = logging.getLogger(__name__)


class JobSizes(Protocol):
    """Limits the size of a job: the devices of this machine, or the resources requested from a cluster."""

    def size(self, asked: int | None, devices_per_rank: int) -> JobSize:
        """Return the size on each node of a job that asks for this number of ranks (None for `auto`).

        Raises:
            OptionError: if the job does not fit.
        """


class KnownJobs(Protocol):
    """Records of the sweep's jobs from its earlier runs."""

    @property
    def resumes(self) -> bool:
        """Whether the sweep resumes earlier runs."""

    def find(self, number: int, overrides: Sequence[str], task: str, config_hash: str) -> JobRecord | None:
        """Return the record of a job, each record once, or None if the job is new."""

    def directory(self, run_dir: str, known: JobRecord | None) -> str:
        """Return a run directory that no other job has, for a job that is new or whose directory is gone."""


@dataclass(frozen=True)
class Attempt:
    """Which start of a job this is.

    Attributes:
        number: Number of earlier starts, for any reason.
        restarts: Number of starts so far that followed a failure (`max_restarts`).
        port_clash: Whether one of the starts followed a port that was taken.
        unanswered: Number of earlier starts that no spawner took up.
        why: Why this start follows another; empty for the first.
        since: Time of the first start, monotonic seconds.
    """

    number: int = 0
    restarts: int = 0
    port_clash: bool = False
    unanswered: int = 0
    why: str = ""
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Allocation:
    """Devices and port that a job holds while it runs.

    Attributes:
        devices: Ids of its devices; may be empty.
        port: Its rendezvous port.
        locked: Names under which the devices are locked.
    """

    devices: tuple[str, ...]
    port: ReservedPort
    locked: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedJob:
    """One job, ready to be started.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        config: Its final config.
        cached: The same config, pickled, or None if it cannot be pickled or this was not requested.
        frozen: Resolved values of the config.
        size: Its size on each node.
        nnodes: Number of nodes.
        argv: Command of its ranks.
        cwd: Directory in which they start.
        payload: Read by the ranks.
        config_yaml: Its own config, not resolved.
        config_hash: SHA-256 of `config_yaml`, hexadecimal.
        known: Record of the job from an earlier run of the sweep, or None.
    """

    number: int
    overrides: tuple[str, ...]
    config: DictConfig
    cached: CachedConfig | None
    frozen: Frozen
    size: JobSize
    nnodes: int
    argv: tuple[str, ...]
    cwd: str
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


class JobPlanner:
    """Compose and freeze the jobs of a sweep.

    Args:
        cache: Configs that the sweeper has composed.
        sizes: Limits the size of a job.
        known: Records of earlier runs.
        job_id: Placeholder for `hydra.job.id` if that is not known before a job runs, or None to use the job's number.
        keep_configs: Whether plans also hold a pickle of their config.
    """

    def __init__(
        self,
        context: SweepContext,
        cache: ConfigCache,
        sizes: JobSizes,
        known: KnownJobs,
        job_id: str | None = None,
        *,
        keep_configs: bool = True,
    ) -> None:
        self._context = context
        self._cache = cache
        self._sizes = sizes
        self._known = known
        self._job_id = job_id
        self._keep_configs = keep_configs

    def take_cached(self, overrides: Sequence[str]) -> CachedConfig | None:
        """Return a config that the sweeper has composed from these overrides, each config once, or None."""
        return self._cache.take(overrides)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose a job's config.

        Raises:
            Exception: anything that composing raises.
        """
        loader = self._context.hydra_context.config_loader
        config: DictConfig = loader.load_sweep_config(self._context.config, list(overrides))
        return config

    def compose_and_plan(self, number: int, overrides: Sequence[str]) -> PlannedJob:
        """Compose a job's config, unless the sweeper has done so already, and plan the job.

        Raises:
            Exception: anything that composing raises, and as `plan`.
        """
        cached = self.take_cached(overrides)
        return self.plan(number, overrides, cached.load() if cached is not None else self.compose(overrides))

    def plan(self, number: int, overrides: Sequence[str], config: DictConfig) -> PlannedJob:
        """Freeze a job.

        Args:
            number: Number of the job.
            config: Config composed from the overrides; it is made final in place.

        Raises:
            FreezeError: if the config cannot be passed to ranks.
            OptionError: if the size is not possible.
        """
        context = self._context
        _refuse_other_launcher(context.config, config)
        config_yaml = frozen_config.own_yaml(config)
        config_hash = hashlib.sha256(config_yaml.encode("utf-8", "surrogateescape")).hexdigest()
        known = self._known.find(number, overrides, context.task, config_hash)
        frozen = self._freeze(number, config, known)
        argv, cwd = rank_command(context.entry, context.settings.wrapper, frozen.run_dir, tuple(overrides))
        return PlannedJob(
            number=number,
            overrides=tuple(overrides),
            config=config,
            frozen=frozen,
            size=self._sizes.size(*read_size(*frozen.size)),
            nnodes=context.settings.nnodes,
            argv=argv,
            cwd=cwd,
            payload=self._payload(overrides, config, frozen),
            # Pickle it now, which does not delay the start of the next job.
            cached=CachedConfig.store(config) if self._keep_configs else None,
            config_yaml=config_yaml,
            config_hash=config_hash,
            known=known,
        )

    def _freeze(self, number: int, config: DictConfig, known: JobRecord | None) -> Frozen:
        # Keep the directory of an earlier run of the job, which has its checkpoints.
        run_dir = known.run_dir if known is not None and os.path.isdir(known.run_dir) else None
        frozen = frozen_config.freeze(config, number, run_dir, self._job_id)
        # Without an interpolation, jobs share a directory on purpose.
        if self._known.resumes and run_dir is None and OmegaConf.is_interpolation(config.hydra.sweep, "subdir"):
            run_dir = self._known.directory(frozen.run_dir, known)
            frozen = frozen_config.freeze(config, number, run_dir, self._job_id)
        return frozen

    def _payload(self, overrides: Sequence[str], config: DictConfig, frozen: Frozen) -> Payload:
        context = self._context
        entry = context.entry
        return Payload(
            overrides=tuple(overrides),
            run_dir=frozen.run_dir,
            task=entry.task if isinstance(entry, ProgramEntry) else None,
            task_name=context.task_name,
            sys_path=entry.start.sys_path if isinstance(entry, FunctionEntry) else (),
            check_config=context.settings.check_config is not None,
            body=_body(context, config),
            argv=tuple(sys.argv),
        )


def _refuse_other_launcher(sweep_config: DictConfig, config: DictConfig) -> None:
    """Refuse a job that chooses other launcher options, as the launcher exists already. Hydra 1.4 does so itself."""
    ours, theirs = (OmegaConf.to_container(one.hydra.launcher, resolve=False) for one in (sweep_config, config))
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            raise FreezeError(
                f"This job's config sets hydra.launcher.{key}={theirs.get(key)!r}, but the launcher was made before, "
                f"with {ours.get(key)!r}. Set it for the whole sweep; ranks alone can differ between jobs, by an "
                "interpolation such as hydra.launcher.nproc_per_node='${trainer.devices}'."
            )


def _body(context: SweepContext, config: DictConfig) -> bytes:
    main_namespace = context.main_namespace
    without_program = isinstance(context.entry, FunctionEntry)

    def dump_value(value: object) -> bytes:
        return frozen_config.dumps(value, main_namespace)

    content: dict[str, object] = {
        "config": config,
        "callbacks": _callbacks(context),
        "resolvers": carry_resolvers(dump_value, without_program=without_program),
        "logging": sweep_logging(context.config),
    }
    if isinstance(context.entry, FunctionEntry):
        content |= function_body(context.task_function, context.hydra_context)
    try:
        return dump_value(content)
    except Exception as error:
        key = frozen_config.unpicklable_key(config, dump_value)
        raise FreezeError(
            f"The job's config cannot be handed to its ranks: {key or error} cannot be pickled. Build such an object "
            "inside the job instead."
        ) from error


def _callbacks(context: SweepContext) -> bytes | None:
    try:
        return frozen_config.dumps(context.hydra_context.callbacks, context.main_namespace)
    except Exception as error:  # noqa: BLE001  (pickling may raise anything)
        _log.warning(
            "The callbacks cannot be pickled (%s: %s). Ranks make new ones from the config, without their state.",
            type(error).__name__,
            error,
        )
        return None


# From a plan to a start


def build_launch_spec(
    plan: PlannedJob, attempt: Attempt, allocation: Allocation, settings: LaunchSettings, *, rendezvous_dir: str = ""
) -> LaunchSpec:
    """Build the launch spec for one start of a job, without writing anything.

    Args:
        attempt: Which start of the job this is.
        settings: Options of the sweep.
        rendezvous_dir: Rendezvous directory of the job, absolute, or empty if the job has one node.
    """
    run_id = f"hydra-ddp-{uuid.uuid4().hex[:12]}-job{plan.number}"
    return LaunchSpec(
        number=plan.number,
        overrides=plan.overrides,
        run_dir=plan.run_dir,
        sweep_dir=plan.frozen.sweep_dir,
        argv=plan.argv,
        cwd=plan.cwd,
        env_set=plan.frozen.env_set,
        nproc=plan.size.nproc,
        devices_per_rank=plan.size.devices_per_rank,
        nnodes=plan.nnodes,
        run_id=run_id,
        attempt=attempt.number,
        restart_count=attempt.restarts,
        max_restarts=settings.max_restarts,
        master_addr=allocation.port.address,
        master_port=allocation.port.number,
        devices=allocation.devices or None,
        device_env_var=settings.device_env_var,
        locked=allocation.locked,
        payload_digest=hashlib.sha256(dump(plan.payload)).hexdigest(),
        limits=settings.limits,
        rank_options=settings.rank_options,
        terminal=settings.debug,
        rendezvous_dir=os.path.join(rendezvous_dir, run_id) if rendezvous_dir else "",
    )


def build_group_spec(spec: LaunchSpec, base: Mapping[str, str], node: int = 0) -> GroupSpec:
    """Build the group spec for the keeper of one node.

    Args:
        spec: The start of the job.
        base: Environment that ranks on that node start from.
        node: Number of the node.

    Raises:
        StartError: if the job's environment contradicts its devices.
    """
    paths = JobPaths(spec.run_dir)
    ranks = range(node * spec.nproc, (node + 1) * spec.nproc)
    return GroupSpec(
        argv=spec.argv,
        cwd=spec.cwd,
        environment=group_environment(base, spec),
        rank_environments=rank_environments(base, spec)[ranks.start : ranks.stop],
        log_files=tuple(map(paths.log, ranks)),
        outcome_files=tuple(map(paths.outcome, ranks)),
        failure_files=tuple(map(paths.failure, ranks)),
        limits=spec.limits,
        terminal=spec.terminal,
        first_rank=ranks.start,
        rendezvous=RendezvousDir(spec.rendezvous_dir, node, spec.nnodes) if spec.rendezvous_dir else None,
        rank_options=spec.rank_options,
    )


def write_job_files(spec: LaunchSpec, group: GroupSpec, payload: Payload, config_yaml: str) -> None:
    """Write the files for ranks, users and later runs of the sweep into the run directory.

    Args:
        spec: The start of the job.
        config_yaml: The job's own config, not resolved.

    Raises:
        OSError: if the run directory cannot be written.
    """
    paths = JobPaths(spec.run_dir)
    make_job_folder(paths)
    write_private(paths.payload, dump(payload))
    for rank in range(spec.world_size):
        # As torchrun does: libraries write their own files next to the error file.
        os.makedirs(os.path.dirname(error_file(spec, rank)), exist_ok=True)
    write_text(paths.facts, json.dumps(job_facts(spec, group.environment), indent=2) + "\n")
    write_private(paths.config, config_yaml.encode("utf-8", "surrogateescape"))


def job_facts(spec: LaunchSpec, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the content of `job.json`: the facts of a job, with the environment as changes from this process's own.

    Args:
        spec: The start of the job.
        environment: Variables common to its ranks.
    """
    ours = os.environ

    def changes(environment: Mapping[str, str]) -> dict[str, str]:
        changed = {name: value for name, value in environment.items() if ours.get(name) != value}
        return {name: f"${name}" if is_secret(name) else value for name, value in sorted(changed.items())}

    return {
        "job": spec.number,
        "overrides": list(spec.overrides),
        "run_dir": spec.run_dir,
        "nproc": spec.world_size,
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "environment": changes(environment),
        "environment_removed": sorted(name for name in ours if name not in environment),
        "rank_environments": [changes(own) for own in rank_environments(environment, spec)],
    }


def refuse_shared_run_dir(run_dir: str, in_use: Iterable[tuple[int, str]]) -> None:
    """Refuse a run directory that another job uses.

    Args:
        in_use: Number and run directory of each job that is using one.

    Raises:
        StartError: naming that job.
    """
    directory = os.path.realpath(run_dir)
    for number, taken in in_use:
        if os.path.realpath(taken) == directory:
            raise StartError(
                f"Its run directory {run_dir} is in use by job {number}, which has not ended. Give each job one of its "
                "own (hydra.sweep.subdir), or run one at a time (hydra.launcher.max_parallel_jobs=1)."
            )


def start_error(error: Exception, job: PlannedJob) -> Exception:
    """Turn an error at the start of a job into one that names the run directory and the reason."""
    if isinstance(error, ValueError):
        # For example, a NUL in its name.
        return StartError(
            f"Cannot use run directory {job.run_dir!r}: {error}. Choose another one (hydra.sweep.subdir)."
        )
    if not isinstance(error, OSError):
        return error
    why = error.strerror or str(error)
    if error.filename is None:
        return StartError(
            f"Cannot start the job in its run directory {job.run_dir}: {why}. Fix that, and run the job again."
        )
    return StartError(
        f"Cannot use run directory {job.run_dir}: {why}: {error.filename}. Fix that, or choose another one "
        "(hydra.sweep.dir, hydra.sweep.subdir)."
    )
