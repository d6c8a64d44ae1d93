"""From a planned job to one on a cluster: submitted anew, or found there."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence

from . import _machine, _submitit
from ._cluster_job import ClusterJob
from ._describe import describe_start
from ._errors import StartError
from ._events import JobSubmitted
from ._nodes import JobEnd, JobFolder
from ._part import RunPart
from ._plan import PlannedJob
from ._port import ReservedPort
from ._records import JobRecord
from ._report import override_line
from ._setup import Sweep
from ._specs import JOB_ID_TOKEN
from ._start import Place
from ._submission import SubmittedJob

_log = logging.getLogger(__name__)


def submit(sweep: Sweep, plans: Sequence[PlannedJob], folder: str) -> list[ClusterJob]:
    """Submit jobs, several of them as one array, and return them in order.

    Args:
        sweep: The sweep.
        plans: The jobs.
        folder: In which each of them gets one where its nodes meet, absolute.

    Raises:
        Exception: whatever submitit, and what it calls, raise.
    """
    assert sweep.cluster is not None
    sweep.sources.check(sweep.settings.code_changed)
    jobs = [_describe(sweep, plan, os.path.join(folder, str(plan.number))) for plan in plans]
    for plan, job in zip(plans, jobs, strict=True):
        os.makedirs(job.folder, exist_ok=True)
        _note_intent(sweep, plan, job.folder)
    try:
        with _submitit.outside_allocation(), _submitit.undisturbed(sweep.cluster):
            handles = sweep.executor.map_array(RunPart(), jobs)
    except BaseException:
        # Some of them may be on the cluster all the same: they shall not run, as nobody knows of them.
        for job in jobs:
            with contextlib.suppress(OSError):
                JobFolder(job.folder).publish_end(JobEnd(False, "its submission failed"))
        raise
    for handle in handles:
        # The payload is in it.
        with contextlib.suppress(OSError):
            os.chmod(handle.paths.submitted_pickle, 0o600)
    together = zip(plans, jobs, handles, strict=True)
    return [ClusterJob(plan, JobFolder(job.folder), handle) for plan, job, handle in together]


def _note_intent(sweep: Sweep, plan: PlannedJob, folder: str) -> None:
    """Note what is about to be submitted: a launching process that is killed before it has the id leaves the job."""
    assert sweep.cluster is not None
    planned_dir = "" if JOB_ID_TOKEN in plan.run_dir else plan.run_dir
    facts = (folder, plan.config_hash, sweep.cluster.executor, planned_dir, _submitit.folder_of(sweep.cluster))
    sweep.ledger.note(JobSubmitted(time.time(), plan.number, "", *facts))


def _describe(sweep: Sweep, plan: PlannedJob, folder: str) -> SubmittedJob:
    settings = sweep.settings
    at_start = _machine.start_environment() or {}
    return SubmittedJob(
        start=describe_start(sweep, plan, plan.first_attempt, Place((), ReservedPort("", 0, None)), ""),
        payload=plan.payload,
        config_yaml=plan.config_yaml,
        folder=folder,
        first_attempt=plan.first_attempt.number,
        master_addr=settings.master_addr,
        master_port=settings.master_port,
        omp_num_threads=settings.omp_num_threads,
        seed=at_start.get("PL_GLOBAL_SEED"),
    )


def adopt(sweep: Sweep, plan: PlannedJob) -> ClusterJob | None:
    """Return a job that an earlier launching process has left on the cluster; None: it is not there.

    Raises:
        StartError: when it is there with another config, or the cluster does not say.
    """
    lost = [] if sweep.earlier is None else sweep.earlier.lost(plan.number, plan.overrides, sweep.task)
    found = (_adopt_run(sweep, plan, run) for run in reversed(lost))
    return next((job for job in found if job is not None), None)


def _adopt_run(sweep: Sweep, plan: PlannedJob, known: JobRecord) -> ClusterJob | None:
    assert sweep.cluster is not None
    state = _submitit.still_there(known)
    if state and known.config_hash != plan.config_hash:
        raise StartError(
            f"It is on the cluster with another config ({known.job_id}, {state}), and would share its run "
            f"directory with that. {_submitit.how_to_cancel(known)}, or wait for its end."
        )
    folder = JobFolder(known.folder)
    folder.refresh()
    # Its end may have come since the journal was read.
    if known.config_hash != plan.config_hash or (not state and folder.read_end() is None):
        return None
    state = state or "has just ended"
    _log.info("\t#%d : is on the cluster already (%s, %s): waiting for it", plan.number, known.job_id, state)
    return ClusterJob(plan, folder, _submitit.find_job(sweep.cluster, known.job_id), began_at=known.began_at)


def name_left_out(sweep: Sweep) -> None:
    """Say which jobs of earlier runs are still on the cluster although this run has not asked for them."""
    for record in [] if sweep.earlier is None else sweep.earlier.left_out():
        if state := _submitit.still_there(record):
            _log.warning(
                "Job %d of an earlier run (%s) is still on the cluster (%s, %s). This run has no such job, and does "
                "not wait for it. %s, if it is not wanted any more",
                record.number,
                override_line(record.overrides),
                record.job_id,
                state,
                _submitit.how_to_cancel(record),
            )
