"""What has happened in a sweep: known to the launching process, and written into the sweep directory as it happens."""

from __future__ import annotations

import logging
import time

from ._events import Event, JobEnded, JobKept, JobSkipped
from ._files import SweepPaths
from ._journal import Journal
from ._records import JobState, SweepRecord
from ._results_csv import write_results

_log = logging.getLogger(__name__)
# Most of the time that may go into results.csv, which is written as a whole: it counts with many thousands of jobs.
_SHARE_OF_TIME = 0.02


class Ledger:
    """Keep the records of a sweep, its journal and its results.csv.

    Args:
        paths: Where the sweep is; None: nothing is written.
        record: What is known from an earlier run.

    Attributes:
        record: What is known by now.
        failures: Jobs that have failed in this run.
        results: The table of the jobs that are over; None: none is written.
    """

    def __init__(self, paths: SweepPaths | None, record: SweepRecord | None = None) -> None:
        self._journal = Journal(None if paths is None else paths.journal)
        self.results = None if paths is None else paths.results
        self.record = SweepRecord() if record is None else record
        self.failures = 0
        self._results_are_old = False
        self._said = False
        self._write_after = 0.0

    def note(self, event: Event) -> None:
        """Take note of an event."""
        self.record.apply(event)
        self._journal.append(event)
        if isinstance(event, JobEnded | JobKept | JobSkipped):
            self.failures += isinstance(event, JobEnded) and not event.completed
            self._results_are_old = True
            self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Write results.csv if it is old, and its turn has come.

        Args:
            last: Nothing more will come for a while.
        """
        began = time.monotonic()
        if self.results is None or not self._results_are_old or (began < self._write_after and not last):
            return
        self._results_are_old = False
        over = self.record.in_state(JobState.COMPLETED, JobState.FAILED, JobState.NEVER_STARTED)
        try:
            write_results(self.results, sorted(over, key=lambda job: job.number))
        except OSError as error:
            why = error.strerror or error
            if not self._said:
                _log.warning("%s cannot be written: %s. It is tried again when the next job ends", self.results, why)
            # Perhaps at the next job's end.
            self._said = True
        ended = time.monotonic()
        self._write_after = ended + (ended - began) / _SHARE_OF_TIME
