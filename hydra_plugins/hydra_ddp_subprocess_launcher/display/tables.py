"""The table at the end of a sweep, and the commands that run its jobs again."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf

from ..common import quoting
from ..common.text import bounded, duration, encodable, list_numbers, pluralize
from ..records.events import JobRecord, JobState
from ..records.journal import SweepRecorder

_LEAST_WIDTH = 40
_LONGEST_OVERRIDE = 300
_WIDTH_WITHOUT_TERMINAL = 120
_TITLES = ("job", "overrides", "status", "value", "time", "devices", "cause")
UNGROUPED = (
    "its ranks opened no process group with each other, so each did the whole job by itself. Open one (Lightning: "
    "strategy=ddp), or start as many ranks as the job uses: 'hydra.launcher.nproc_per_node=${trainer.devices}'"
)
_OPTIONAL = ("value", "devices", "cause")


def override_line(overrides: Sequence[str]) -> str:
    """Return the overrides of a job as the basic launcher shows them."""
    return bounded(" ".join(bounded(part, _LONGEST_OVERRIDE) for part in filter_overrides(overrides)))


def prepare_table() -> None:
    """Load now what a table needs, where it is shown as the process ends.

    After a Ctrl-C, Python would forget what it ends of when a module with dataclasses is imported then.
    """
    results_table(())


def results_table(jobs: Sequence[JobRecord]) -> str:
    """Return a table with one row a job. Columns in which nothing would stand are left out.

    Args:
        jobs: Jobs that are over, or of a sweep that is.
    """
    rows = [
        {
            "job": str(job.number),
            "overrides": override_line(job.overrides),
            "status": job.state.value,
            "value": job.text,
            "time": duration(job.seconds),
            "devices": ",".join(job.devices),
            "cause": job.cause,
        }
        for job in jobs
    ]
    titles = [title for title in _TITLES if title not in _OPTIONAL or any(row[title] for row in rows)]
    table = text_table(titles, [[row[title] for title in titles] for row in rows], right=("job", "time"))
    counts = {state: sum(job.state is state for job in jobs) for state in JobState}
    always = (JobState.COMPLETED, JobState.FAILED)
    said = [f"{count} {state.value.lower()}" for state, count in counts.items() if count or state in always]
    last = f"{pluralize(len(jobs), 'job')}: {', '.join(said)}"
    lines = [table]
    if ungrouped := [job.number for job in jobs if job.ungrouped]:
        lines.append(f"Warning: {list_numbers('job', ungrouped)}: {UNGROUPED}")
    return "\n".join([*lines, last])


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> str:
    """Return a table as wide as the terminal.

    Args:
        right: Titles of the columns that are set flush right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="")
    for title in titles:
        # A title is no markup.
        table.add_column(Text(title), justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


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

    def show(self, recorder: SweepRecorder, numbers: Collection[int] | None = None) -> None:
        """Show the jobs that are over.

        Args:
            numbers: Of which jobs; None: of all.
        """
        recorder.flush(last=True)
        jobs = [job for number, job in recorder.sweep.jobs.items() if numbers is None or number in numbers]
        told = [job for job in jobs if job.state in _TOLD]
        if told:
            lines = [results_table(told), *self.again(told, stopped=bool(recorder.sweep.stopped_by))]
            if recorder.results is not None:
                lines += ["", f"Results: {recorder.results}"]
            _log.info("\n%s", encodable("\n".join(lines)))

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
            hydra = quoting.overrides_again(self.hydra_overrides, self.sweep_dir, resume=resume)
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
        choices = quoting.overrides_of_given_jobs(self.hydra_overrides, f"{self.sweep_dir}_again_{job.number}")
        return self._line([[*hydra, *job.overrides] for hydra in choices])

    def _line(self, choices: Sequence[Sequence[str]]) -> str:
        """Return the first command that Hydra can compose, or a comment that says why there is none."""
        for overrides in choices:
            try:
                config = self.compose(list(overrides))
                if self.repeatable or _runs_given_jobs(config):
                    line = quoting.shell_words([*self.command, *overrides])
                    return line if len(line) <= _LONGEST_COMMAND else quoting.shell_comment(_TOO_LONG)
                why = "the config has sweeps of its own (hydra.sweeper.params)"
            except Exception as error:  # noqa: BLE001  (a resolver or a plugin of the user's may raise anything)
                why = bounded(" ".join(f"{type(error).__name__}: {error}".split()))
        return quoting.shell_comment(f"there is no command that does this: {why}")


def _runs_given_jobs(config: DictConfig) -> bool:
    """Return whether a sweep runs the jobs of its command line, and no others."""
    sweeper = config.hydra.sweeper
    # With Hydra's own sweeper, what else the config sweeps over would be run, too.
    return sweeper._target_ == quoting.GIVEN_JOBS or not OmegaConf.select(sweeper, "params")
