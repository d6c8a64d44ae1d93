"""What a planned job becomes at its place: the command and environment of its ranks, and its files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

from . import _encoded, _environment, _files
from ._entry import rank_command
from ._errors import StartError
from ._plan import PlannedJob
from ._setup import Sweep
from ._specs import GroupSpec
from ._start import Attempt, JobStart, Place, group_spec, write_facts


def write_job(
    sweep: Sweep, job: PlannedJob, attempt: Attempt, place: Place, base: Mapping[str, str]
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
    paths = _files.JobPaths(job.run_dir)
    _files.make_job_folder(paths)
    start = describe_start(sweep, job, attempt, place, _files.write_payload(paths, job.payload))
    spec = group_spec(start, base)
    write_facts(start, base, job.config_yaml)
    return start, spec


def describe_start(
    sweep: Sweep,
    job: PlannedJob,
    attempt: Attempt,
    place: Place,
    source: str | _encoded.Recipe,
) -> JobStart:
    """Return one start of a job, without writing anything.

    Args:
        sweep: The sweep.
        job: The job.
        attempt: Which start of it this is.
        place: Where it runs.
        source: SHA-256 of the payload that its ranks read, or how they compose its config themselves.
    """
    paths = _files.JobPaths(job.run_dir)
    recipe, payload_digest = (None, source) if isinstance(source, str) else (source, None)
    argv, cwd = rank_command(sweep.entry, sweep.settings.wrapper, job.run_dir, job.overrides, recipe)
    run_id = f"hydra-ddp-{uuid.uuid4().hex[:12]}-job{job.number}"
    group = _environment.GroupEnvironment(
        nproc=job.size.nproc,
        master_addr=place.port.address,
        master_port=place.port.number,
        run_id=run_id,
        attempt=attempt.number,
        restart_count=attempt.restarts,
        max_restarts=sweep.settings.max_restarts,
        devices=place.devices or None,
        device_env_var=sweep.settings.device_env_var,
        error_files=tuple(map(paths.error, range(job.world_size))),
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
