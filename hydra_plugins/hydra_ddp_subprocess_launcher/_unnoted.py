"""Jobs whose launching process was killed after it had submitted them, and before it had noted their ids.

What it was about to submit it notes first. A job cannot run before submitit has renamed its file, which then has the
id in its name: so the ids are found there, and what has none yet does nothing.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ._files import read_own_pickle
from ._nodes import JobEnd, JobFolder
from ._peers import refresh_names
from ._records import JobRecord, SweepRecord
from ._specs import JOB_ID_TOKEN
from ._submission import SubmittedJob

_log = logging.getLogger(__name__)
_SUBMITTED = "_submitted.pkl"
_MARK = re.compile("%[jtAa]")
_NOBODY_WAITS = "its launching process was killed while it was being submitted"


def find_unnoted(record: SweepRecord, *, fence: bool) -> None:
    """Put the ids into the records of such jobs, as far as they are found.

    Args:
        record: What earlier runs of the sweep have recorded, which is changed.
        fence: See to it that those that are not found would end as soon as they began.
    """
    unnoted = [job for job in [*record.past, *record.touched()] if _is_unnoted(job)]
    if not unnoted:
        return
    submitted = {}
    for folder in {job.submitit_folder for job in unnoted}:
        submitted.update({_place(job.folder): (job_id, job) for job_id, job in _submitted_jobs(folder)})

    def settled(job: JobRecord) -> JobRecord:
        if job not in unnoted:
            return job
        if _place(job.folder) not in submitted:
            if fence:
                with contextlib.suppress(OSError):
                    JobFolder(job.folder).publish_end(JobEnd(False, _NOBODY_WAITS))
            return replace(job, folder="")
        job_id, found = submitted[_place(job.folder)]
        _log.info("Job %d of an earlier run was submitted as %s, which nobody had noted", job.number, job_id)
        return replace(job, job_id=job_id, planned_dir=found.start.run_dir.replace(JOB_ID_TOKEN, job_id))

    record.past = [settled(job) for job in record.past]
    record.jobs = {number: settled(job) for number, job in record.jobs.items()}


def _is_unnoted(job: JobRecord) -> bool:
    if not job.submitit_folder or job.job_id or job.state.over:
        return False
    return JobFolder(job.folder).read_end() is None


def _place(folder: str) -> str:
    """Return what a job's folder is called in its sweep, which may have been moved: no other batch has that name."""
    return os.path.join(*Path(folder).parts[-2:])


def _submitted_jobs(folder: str) -> Iterator[tuple[str, SubmittedJob]]:
    """Return the jobs of which submitit has files in a folder, with their ids."""
    # Its own layout: `submitit.core.utils.JobPaths`.
    refresh_names(os.path.dirname(_MARK.split(os.path.join(folder, ""))[0]))
    for path in glob.glob(_MARK.sub("*", os.path.join(glob.escape(folder), f"*{_SUBMITTED}"))):
        delayed = read_own_pickle(path)
        job = next(iter(getattr(delayed, "args", ())), None)
        if isinstance(job, SubmittedJob):
            yield os.path.basename(path).removesuffix(_SUBMITTED), job
