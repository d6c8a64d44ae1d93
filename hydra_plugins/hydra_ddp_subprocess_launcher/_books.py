"""The books of a sweep: its claim on the sweep directory, its ledger, and what earlier runs have left there."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass

from . import __version__, _commands, _machine
from ._claim import Claim
from ._cluster import Cluster
from ._errors import StartError
from ._events import SweepBegan
from ._files import SweepPaths, move_aside
from ._journal import read_journal
from ._ledger import Ledger
from ._records import SweepRecord
from ._resume import Earlier
from ._settings import LaunchSettings
from ._submitit import how_to_cancel, still_there
from ._unnoted import find_unnoted
from ._words import counted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Books:
    """The books of a sweep.

    Attributes:
        claim: On its directory; None: it has none.
        ledger: What has happened.
        earlier: What earlier runs have left to do; None: nothing is resumed.
    """

    claim: Claim | None
    ledger: Ledger
    earlier: Earlier | None


def open_books(paths: SweepPaths, settings: LaunchSettings, cluster: Cluster | None) -> Books:
    """Take the sweep directory, and begin or go on with the books in it.

    Args:
        paths: Where the sweep is.
        settings: Options of the launcher.
        cluster: What jobs ask of submitit; None: they run here.

    Raises:
        StartError: when another sweep has the directory, or it cannot be used.
    """
    claim = _take_directory(paths, settings)
    record, earlier = _earlier(paths, settings, cluster, fence=True)
    ledger = Ledger(paths, record)
    ledger.note(_beginning(settings, paths.sweep_dir))
    return Books(claim, ledger, earlier)


def read_books(paths: SweepPaths, settings: LaunchSettings, cluster: Cluster | None) -> Books:
    """Return the books that a dry run reads, and does not write.

    Args:
        paths: As of `open_books`.
        settings: As of `open_books`.
        cluster: As of `open_books`.

    Raises:
        StartError: when they cannot be read.
    """
    record, earlier = _earlier(paths, settings, cluster, fence=False)
    ledger = Ledger(None, record)
    ledger.note(_beginning(settings, paths.sweep_dir))
    return Books(None, ledger, earlier)


def _earlier(
    paths: SweepPaths, settings: LaunchSettings, cluster: Cluster | None, *, fence: bool
) -> tuple[SweepRecord | None, Earlier | None]:
    if settings.resume is None:
        return None, None
    record = _read_earlier(paths)
    if record is None:
        return None, None
    find_unnoted(record, fence=fence)
    _refuse_jobs_of_other_launchers(record, cluster)
    return record, Earlier(record, settings.resume)


def _read_earlier(paths: SweepPaths) -> SweepRecord | None:
    """Return what earlier runs in the sweep directory have recorded; None: there was none."""
    try:
        record = read_journal(paths.journal)
    except FileNotFoundError:
        _log.info(
            "There is nothing to resume in %s: all jobs are new. An earlier sweep goes on in its own hydra.sweep.dir",
            paths.sweep_dir,
        )
        return None
    except OSError as error:
        raise StartError(
            f"The journal of the sweep cannot be read: {error.strerror}: {paths.journal}. Make it readable, or "
            "choose another hydra.sweep.dir."
        ) from None
    if record.unreadable:
        _log.warning(
            "In %s %s cannot be read: damaged, or of a later version of this package. The rest is used",
            paths.journal,
            counted(record.unreadable, "line"),
        )
    return record


def _take_directory(paths: SweepPaths, settings: LaunchSettings) -> Claim:
    """Claim the sweep directory, and move aside what an earlier sweep has recorded there, unless it is to be kept."""
    try:
        os.makedirs(paths.folder, exist_ok=True)
        claim = Claim(paths.claim)
        keep = settings.resume is not None
        recorded = [path for path in (paths.journal, paths.results) if os.path.exists(path) and not keep]
        if paths.journal in recorded:
            record = read_journal(paths.journal)
            find_unnoted(record, fence=True)
            _refuse_jobs_on_cluster(record, paths.sweep_dir)
        aside = move_aside(paths.folder, recorded)
    except OSError as error:
        why = error.strerror or str(error)
        where = error.filename or paths.folder
        raise StartError(
            f"The sweep directory {paths.sweep_dir} cannot be used: {why}: {where}. Mend that, or choose another "
            "hydra.sweep.dir."
        ) from None
    if aside is not None:
        _log.info("What an earlier sweep recorded in this directory is now in %s", aside)
    return claim


def _refuse_jobs_on_cluster(record: SweepRecord, sweep_dir: str) -> None:
    """Refuse a sweep whose jobs could share run directories with those that an earlier launching process has left."""
    for job in [*record.past, *record.touched()]:
        if state := still_there(job):
            raise StartError(
                f"Job {job.number} of an earlier run of the sweep {sweep_dir} is still on the cluster ({job.job_id}, "
                f"{state}). With hydra/launcher=ddp_submitit_{job.executor} and hydra.launcher.resume=unfinished a run "
                f"waits for it. {how_to_cancel(job)}, or choose another hydra.sweep.dir, to begin anew."
            )


def _refuse_jobs_of_other_launchers(record: SweepRecord, cluster: Cluster | None) -> None:
    """Refuse to go on beside jobs for which this launcher cannot wait."""
    own = "" if cluster is None else cluster.executor
    for job in [*record.past, *record.touched()]:
        if job.executor != own and (state := still_there(job)):
            raise StartError(
                f"Job {job.number} of an earlier run is still on the cluster ({job.job_id}, {state}), and this "
                f"launcher cannot wait for it. Use hydra/launcher=ddp_submitit_{job.executor}. {how_to_cancel(job)}, "
                "or wait for its end, to go on with this one."
            )


def _beginning(settings: LaunchSettings, sweep_dir: str) -> SweepBegan:
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""  # Somebody deleted it.
    return SweepBegan(
        time.time(),
        os.getpid(),
        _machine.host(),
        _commands.masked(sys.orig_argv),
        cwd,
        __version__,
        settings.limits.grace_period_s,
        sweep_dir,
    )
