"""A job before it runs: composed, frozen, and written down for its ranks."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf

from . import _commands, _environment, _files, _freeze, _pickling, _program
from ._entry import FunctionEntry, ProgramEntry, function_body, rank_command
from ._errors import FreezeError, StartError
from ._port import ReservedPort
from ._settings import read_nproc
from ._setup import Sweep
from ._specs import GroupSpec, Payload

_log = logging.getLogger(__name__)


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
class PlannedJob:
    """One job, ready to be started.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        config: Its final config.
        frozen: What is resolved of it.
        nproc: Number of ranks.
        payload: What its ranks will read.
    """

    number: int
    overrides: tuple[str, ...]
    config: DictConfig
    frozen: _freeze.Frozen
    nproc: int
    payload: Payload

    @property
    def run_dir(self) -> str:
        """Run directory, absolute."""
        return self.frozen.run_dir


def compose_job(sweep: Sweep, overrides: Sequence[str]) -> DictConfig:
    """Compose a job's config.

    Raises:
        Exception: whatever composing raises.
    """
    config: DictConfig = sweep.context.config_loader.load_sweep_config(sweep.config, list(overrides))
    return config


def plan_job(sweep: Sweep, number: int, overrides: Sequence[str], config: DictConfig) -> PlannedJob:
    """Freeze a job.

    Args:
        sweep: The sweep.
        number: Number of the job.
        overrides: Its override strings.
        config: Composed from them; it is made final in place.

    Raises:
        FreezeError: for what cannot be handed to ranks.
        OptionError: for a number of ranks that cannot be.
    """
    _refuse_other_launcher(sweep.config, config)
    frozen = _freeze.freeze(config, number)
    nproc = sweep.pool.nproc(read_nproc(frozen.nproc_per_node))
    payload = Payload(
        overrides=tuple(overrides),
        run_dir=frozen.run_dir,
        task=sweep.entry.task if isinstance(sweep.entry, ProgramEntry) else None,
        task_name=sweep.task_name,
        sys_path=sweep.entry.start.sys_path if isinstance(sweep.entry, FunctionEntry) else (),
        check_config=sweep.settings.check_config is not None,
        body=_body(sweep, config),
    )
    return PlannedJob(number, tuple(overrides), config, frozen, nproc, payload)


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
    content: dict[str, object] = {"config": config, "callbacks": _callbacks(sweep)}
    if isinstance(sweep.entry, FunctionEntry):
        content |= function_body(sweep.task_function, sweep.context)
    try:
        return _pickling.dumps(content, main)
    except Exception as error:
        key = _freeze.unpicklable_key(config, lambda value: _pickling.dumps(value, main))
        raise FreezeError(
            f"The job's config cannot be handed to its ranks: {key or error} cannot be pickled. Build such an object "
            "inside the job instead."
        ) from error


def _callbacks(sweep: Sweep) -> bytes | None:
    try:
        return _pickling.dumps(sweep.context.callbacks, sweep.main)
    except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
        _log.warning(
            "The callbacks cannot be pickled (%s: %s): ranks make new ones from the config, without their state.",
            type(error).__name__,
            error,
        )
        return None


@dataclass(frozen=True)
class Place:
    """What a job holds while it runs.

    Attributes:
        devices: Ids of its devices; empty: none.
        port: Its rendezvous port.
    """

    devices: tuple[str, ...]
    port: ReservedPort


def write_job(
    sweep: Sweep, job: PlannedJob, attempt: Attempt, place: Place, base: Mapping[str, str]
) -> tuple[_files.JobPaths, GroupSpec]:
    """Write what the ranks read into the run directory and return what a keeper needs.

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
    paths = _files.JobPaths(job.run_dir)
    _files.make_job_folder(paths)
    group = describe_group(sweep, job, attempt, place, _files.write_payload(paths, job.payload))
    spec, facts = describe_job(sweep, job, group, base)
    _files.write_text(paths.facts, json.dumps(facts, indent=2) + "\n")
    return paths, spec


def describe_group(
    sweep: Sweep, job: PlannedJob, attempt: Attempt, place: Place, payload_digest: str | None
) -> _environment.GroupEnvironment:
    """Return what the variables of a job's ranks are made from.

    Args:
        sweep: The sweep.
        job: The job.
        attempt: Which start of it this is.
        place: Where it runs.
        payload_digest: SHA-256 of the payload; None: its ranks compose its config themselves.
    """
    paths = _files.JobPaths(job.run_dir)
    return _environment.GroupEnvironment(
        nproc=job.nproc,
        master_addr=place.port.address,
        master_port=place.port.number,
        run_id=f"hydra-ddp-{uuid.uuid4().hex[:12]}-job{job.number}",
        attempt=attempt.number,
        restart_count=attempt.restarts,
        max_restarts=sweep.settings.max_restarts,
        devices=place.devices or None,
        device_env_var=sweep.settings.device_env_var,
        error_files=tuple(map(paths.error, range(job.nproc))),
        payload_digest=payload_digest,
        job_num=job.number,
        sweep_dir=job.frozen.sweep_dir,
        locked=sweep.gate.lock_names(place.devices),
    )


def describe_job(
    sweep: Sweep,
    job: PlannedJob,
    group: _environment.GroupEnvironment,
    base: Mapping[str, str],
    recipe: _program.Recipe | None = None,
) -> tuple[GroupSpec, dict[str, object]]:
    """Return what a keeper needs and what `job.json` has, without writing anything.

    Args:
        sweep: The sweep.
        job: The job.
        group: What its variables are made from.
        base: What all ranks start from.
        recipe: How its ranks compose its config themselves; None: they read a payload.

    Raises:
        StartError: when the job's environment contradicts its devices.
    """
    paths = _files.JobPaths(job.run_dir)
    ranks = range(job.nproc)
    argv, cwd = rank_command(sweep.entry, sweep.settings.wrapper, job.run_dir, job.overrides, recipe)
    spec = GroupSpec(
        argv=argv,
        cwd=cwd,
        environment=_environment.group_environment(base, job.frozen.env_set, group),
        rank_environments=_environment.rank_environments(group),
        log_files=tuple(map(paths.log, ranks)),
        outcome_files=tuple(map(paths.outcome, ranks)),
        failure_files=tuple(map(paths.failure, ranks)),
        limits=sweep.settings.limits,
        terminal=sweep.settings.debug,
    )
    return spec, _facts(job, spec, os.environ)


def _facts(job: PlannedJob, spec: GroupSpec, ours: Mapping[str, str]) -> dict[str, object]:
    """Return what is worth knowing about a job; of the environment, what differs from `ours`."""

    def shown(environment: Mapping[str, str]) -> dict[str, str]:
        changed = {name: value for name, value in environment.items() if ours.get(name) != value}
        return {name: f"${name}" if _commands.is_secret(name) else value for name, value in sorted(changed.items())}

    return {
        "job": job.number,
        "overrides": list(job.overrides),
        "run_dir": job.run_dir,
        "nproc": job.nproc,
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "environment": shown(spec.environment),
        "environment_removed": sorted(name for name in ours if name not in spec.environment),
        "rank_environments": [shown(own) for own in spec.rank_environments],
    }


def start_error(error: Exception, job: PlannedJob) -> Exception:
    """Return an error that says where a job could not be started, and why."""
    if isinstance(error, ValueError):
        # Such as a NUL in its name.
        return StartError(f"The run directory {job.run_dir!r} cannot be used: {error}.")
    if not isinstance(error, OSError):
        return error
    why = error.strerror or str(error)
    if error.filename is None:
        return StartError(f"The job could not be started in its run directory {job.run_dir}: {why}.")
    return StartError(f"The run directory {job.run_dir} cannot be used: {why}: {error.filename}")
