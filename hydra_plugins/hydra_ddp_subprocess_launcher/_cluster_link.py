"""What the launching process asks the cluster about the jobs of one batch, and tells it: their states, and to cancel.

How a job fares, its nodes tell through files. The cluster's word is for what they cannot tell: that the job waits
again, or was ended from outside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _submitit
from ._choices import OnInterrupt
from ._cluster import Cluster
from ._cluster_job import ClusterJob

_log = logging.getLogger(__name__)
# Seconds between two questions for the states of all jobs.
_STATE_INTERVAL_S = 1.0
# Seconds after which the cluster is asked although submitit would not do so yet: it waits for up to ten minutes.
_ASK_AGAIN_S = 60.0
# Seconds until jobs that were cancelled, and are still there, are cancelled once more.
_CANCEL_AGAIN_S = 10.0


@dataclass(frozen=True)
class StateNews:
    """What the cluster's answers change.

    Attributes:
        waiting_again: Jobs that have run, and are queued again.
        lost: Jobs that the cluster has ended without a word of their nodes.
        given_up: Cancelled jobs that have not gone in time.
    """

    waiting_again: list[ClusterJob] = field(default_factory=list)
    lost: list[ClusterJob] = field(default_factory=list)
    given_up: list[ClusterJob] = field(default_factory=list)


class ClusterLink:
    """Ask one cluster, seldom enough, and have it cancel jobs, often enough.

    Args:
        cluster: What jobs ask of it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked_at = 0.0
        # Asked for what it knows now, and not for what submitit was told some minutes ago.
        self._insisted_at = 0.0
        self._cancel_at = math.inf
        self._said_wrong = False

    def is_due(self, now: float) -> bool:
        """Return whether it is time to ask.

        Args:
            now: Monotonic seconds.
        """
        return now - self._asked_at >= _STATE_INTERVAL_S

    def ask(self, jobs: Sequence[ClusterJob], now: float) -> StateNews:
        """Ask for the states of jobs, let them take note of these, and return what follows from them.

        Args:
            jobs: All jobs of the batch that are on the cluster.
            now: Monotonic seconds.
        """
        insisting = ask = now - self._insisted_at >= _ASK_AGAIN_S or any(job.why for job in jobs)
        self._asked_at = now
        if ask:
            self._insisted_at = now
        news = StateNews()
        left = []
        for job in jobs:
            state = self._state_of(job, ask=ask)
            # Accounting does not list elements of an array that were cancelled while they waited together.
            waited = bool(job.why) or now - job.since > _ASK_AGAIN_S
            if state == "UNKNOWN" and insisting and waited and _submitit.is_gone(job.handle):
                state = "GONE"
            # One answer is for all of them.
            ask = False
            if job.take_state(state, now):
                news.waiting_again.append(job)
            if job.is_lost(now, self._cluster.executor):
                news.lost.append(job)
            elif now > job.gone_by:
                news.given_up.append(job)
            else:
                left.append(job)
        if now > self._cancel_at:
            self._cancel_at = now + _CANCEL_AGAIN_S
            _submitit.cancel([job.handle for job in left if job.why])
        return news

    def _state_of(self, job: ClusterJob, *, ask: bool) -> str:
        try:
            return _submitit.state_of(job.handle, ask=ask)
        except Exception as error:  # noqa: BLE001  (submitit reads what SLURM's commands print, and may not understand it)
            if not self._said_wrong:
                self._said_wrong = True
                _log.warning(
                    "The states of the jobs cannot be found out: %s: %s. Their files are watched",
                    type(error).__name__,
                    error,
                )
            return "UNKNOWN"

    def cancel(self, jobs: Iterable[ClusterJob], why: str, now: float, gone_by: float = math.inf) -> None:
        """Cancel jobs, again from time to time, until the cluster says that they have gone.

        Args:
            jobs: The jobs.
            why: For what reason, in a few words.
            now: Monotonic seconds.
            gone_by: When those that are still there are given up, monotonic seconds; infinite: never.
        """
        handles = []
        for job in jobs:
            job.why, job.gone_by = why, gone_by
            handles.append(job.handle)
        self._cancel_at = now + _CANCEL_AGAIN_S if self._cluster.executor == "slurm" else math.inf
        if wrong := _submitit.cancel(handles):
            _log.error("The jobs could not be cancelled: %s. See what is left: squeue --me", wrong)
        # The states are old now.
        self._asked_at = 0.0

    def leave_for(self, error: BaseException, jobs: Iterable[ClusterJob]) -> None:
        """Cancel jobs, or say that they are left, before this process ends for an error.

        Args:
            error: The error.
            jobs: All jobs of the batch that are on the cluster.
        """
        handles = [job.handle for job in jobs]
        if not handles:
            return
        # Such as a signal that came while the cluster did not answer. A defect of ours is no reason to lose the jobs.
        if isinstance(error, KeyboardInterrupt | SystemExit) and self._cluster.on_interrupt is OnInterrupt.cancel:
            _submitit.cancel(handles)
        else:
            _log.error("Left on the cluster: %s. hydra.launcher.resume=unfinished finds them", listed(handles))


def listed(handles: Iterable[Any]) -> str:
    """Return the ids of submitit's jobs, those of one array together."""
    arrays: dict[str, list[str]] = {}
    for handle in handles:
        array, _, index = str(handle.job_id).partition("_")
        arrays.setdefault(array, []).append(index)
    return ", ".join(array if parts == [""] else f"{array}_[{','.join(parts)}]" for array, parts in arrays.items())
