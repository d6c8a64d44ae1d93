"""The end of a sweep for people: the table of its jobs, and how to run those again that have failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from . import _commands
from ._ledger import Ledger
from ._records import JobRecord, JobState
from ._report import results_table, shown
from ._words import bounded

_log = logging.getLogger(__name__)
_MOST_AGAIN = 10
# Characters: nobody pastes a longer one, and a terminal would be full of it.
_LONGEST_COMMAND = 16 * 1024
_TOO_LONG = (
    "the command is too long to be shown; add hydra.launcher.resume=failed and the same hydra.sweep.dir to yours"
)
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
        compose: Composes the config of a sweep from overrides, as the command would; raises whatever that raises.
        nnodes: Number of nodes on which that command is started.
    """

    command: tuple[str, ...]
    hydra_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    sweep_dir: str
    repeatable: bool
    one_batch: bool
    compose: Callable[[list[str]], DictConfig]
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
        failed = [job for job in jobs if job.state is JobState.FAILED]
        skipped = stopped or not self.one_batch or any(job.state is JobState.NEVER_STARTED for job in jobs)
        if not self.command or not failed:
            return []
        if self.repeatable:
            resume = "unfinished" if skipped else "failed"
            hydra = _commands.overrides_again(self.hydra_overrides, self.sweep_dir, resume=resume)
            lines = [self._line([[*hydra, *self.overrides]])]
        else:
            lines = [self._line_of_job(job) for job in failed[:_MOST_AGAIN]]
            if len(failed) > len(lines):
                lines.append(f"(and {len(failed) - len(lines)} more)")
        what = "Run what failed, and what was not run" if skipped and self.repeatable else "Run again only what failed"
        where = ", on each node with its own node_rank" if self.nnodes > 1 else ""
        return ["", f"{what}{where}:", *lines]

    def _line_of_job(self, job: JobRecord) -> str:
        # A directory of its own: the number of the job is 0 in all of them.
        choices = _commands.overrides_of_given_jobs(self.hydra_overrides, f"{self.sweep_dir}_again_{job.number}")
        return self._line([[*hydra, *job.overrides] for hydra in choices])

    def _line(self, choices: Sequence[Sequence[str]]) -> str:
        """Return the first command that Hydra can compose, or a comment that says why there is none."""
        for overrides in choices:
            try:
                config = self.compose(list(overrides))
                if self.repeatable or _runs_given_jobs(config):
                    line = _commands.shell_words([*self.command, *overrides])
                    return line if len(line) <= _LONGEST_COMMAND else _commands.shell_comment(_TOO_LONG)
                why = "the config has sweeps of its own (hydra.sweeper.params)"
            except Exception as error:  # noqa: BLE001  (a resolver or a plugin of the user's may raise anything)
                why = bounded(" ".join(f"{type(error).__name__}: {error}".split()))
        return _commands.shell_comment(f"there is no command that does this: {why}")


def _runs_given_jobs(config: DictConfig) -> bool:
    """Return whether a sweep runs the jobs of its command line, and no others."""
    sweeper = config.hydra.sweeper
    # With Hydra's own sweeper, what else the config sweeps over would be run, too.
    return sweeper._target_ == _commands.GIVEN_JOBS or not OmegaConf.select(sweeper, "params")
