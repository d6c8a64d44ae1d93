"""The end of a sweep for people: the table of its jobs, and how to run those again that have failed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from . import _commands
from ._ledger import Ledger
from ._records import JobRecord, JobState
from ._report import results_table, shown

_log = logging.getLogger(__name__)
_MOST_AGAIN = 10
_TOLD = (JobState.COMPLETED, JobState.FAILED, JobState.NEVER_STARTED)


@dataclass(frozen=True)
class Summary:
    """What is shown at the end of a sweep.

    Attributes:
        command: Command that started it, up to `-m`; empty: there is no program.
        hydra_overrides: Hydra's own overrides of it.
        overrides: All others, sweeps among them.
        sweep_dir: Sweep directory.
        repeatable: Whether the sweeper would propose the same jobs once more.
        one_batch: Whether it hands over all of them at once.
        nnodes: Number of nodes on which that command is started.
    """

    command: tuple[str, ...]
    hydra_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    sweep_dir: str
    repeatable: bool
    one_batch: bool
    nnodes: int = 1

    def show(self, ledger: Ledger, numbers: Collection[int] | None = None) -> None:
        """Show the jobs that are over.

        Args:
            ledger: What has happened.
            numbers: Of which jobs; None: of all.
        """
        ledger.settle(last=True)
        jobs = [job for number, job in ledger.record.jobs.items() if numbers is None or number in numbers]
        told = [job for job in jobs if job.state in _TOLD]
        if told:
            lines = [results_table(told), *self.again(told, stopped=bool(ledger.record.stopped_by))]
            if ledger.results is not None:
                lines += ["", f"Results: {ledger.results}"]
            _log.info("\n%s", shown("\n".join(lines)))

    def again(self, jobs: Sequence[JobRecord], *, stopped: bool = False) -> list[str]:
        """Return lines with the commands that run just the failed ones of some jobs once more; none without a program.

        Args:
            jobs: Jobs that are over.
            stopped: Whether the sweep was, so that there may be others, which wait.
        """
        failed = [job.overrides for job in jobs if job.state is JobState.FAILED]
        skipped = stopped or not self.one_batch or any(job.state is JobState.NEVER_STARTED for job in jobs)
        if not self.command or not failed:
            return []
        resume = None if not self.repeatable else "unfinished" if skipped else "failed"
        command = [
            *self.command,
            *_commands.overrides_again(self.hydra_overrides, self.sweep_dir, resume=resume),
        ]
        chosen = [self.overrides] if self.repeatable else failed[:_MOST_AGAIN]
        lines = [_commands.shell_words([*command, *overrides]) for overrides in chosen]
        if not self.repeatable and len(failed) > len(chosen):
            lines.append(f"(and {len(failed) - len(chosen)} more)")
        what = "Run what failed, and what was not run" if skipped and self.repeatable else "Run again only what failed"
        where = ", on each node with its own node_rank" if self.nnodes > 1 else ""
        return ["", f"{what}{where}:", *lines]
