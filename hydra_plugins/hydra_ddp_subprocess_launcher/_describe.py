"""What a planned job becomes at its place: the command and environment of its ranks, and its files."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from . import _commands, _environment, _files, _program
from ._entry import rank_command
from ._errors import StartError
from ._plan import Attempt, PlannedJob
from ._port import ReservedPort
from ._setup import Sweep
from ._specs import GroupSpec


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
    _files.write_private(paths.config, job.config_yaml.encode("utf-8", "surrogateescape"))
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
