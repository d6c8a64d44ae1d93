"""A dry run: one batch of jobs shown as shell commands. Nothing is started, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from ..common import quoting
from ..common.errors import LauncherError, StartError
from ..common.quoting import has_secret, is_secret, rank_line, shell_comment
from ..common.text import encodable
from ..display.tables import override_line
from ..job import frozen_config, results
from ..job.plan import Allocation, PlannedJob, describe_start, job_facts, start_error
from ..job.program import ProgramEntry
from ..job.results import make_job_return
from ..job.settings import Sweep
from .job_queue import JobQueue
from .resume import ResumeDecision

_ENV_SET = re.compile(r"(\+*hydra\.job\.env_set\.(\w+))=")
_HEADER = "Nothing is started. Each line below a job is one rank: run those of a job at the same time, a shell each."
_ENDS_HERE = "The dry run ends here: what the sweeper asks for next depends on the values of these jobs."
_NO_PROGRAM = "They cannot be pasted: the job function goes to the ranks by pickle, in a file that only a sweep writes."
_TOO_LONG = "The overrides are too long for a command that can be pasted. In a sweep the ranks read them from a file."


def show_batch(
    sweep: Sweep, footprint: DirSnapshot, job_overrides: list[list[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Print the commands of one batch of jobs, and take back what the sweeper has written.

    Args:
        sweep: What `prepare_sweep` returned.
        footprint: What was there before.
        job_overrides: One list of override strings a job.
        initial_job_idx: Number of the first job.

    Returns:
        One JobReturn a job, in order: completed with None, or failed where the job could not be started.

    Raises:
        SystemExit: with 0, where the sweeper would go on from values that there are not.
    """
    try:
        rehearsal = _Rehearsal(sweep, dict(enumerate(job_overrides, start=initial_job_idx)))
        jobs = rehearsal.run()
    finally:
        # Nobody tells which batch is the last.
        footprint.restore()
    lines = [shell_comment(f"dry run: {rehearsal.summary}"), shell_comment(_HEADER)]
    lines += [line for job in jobs for line in job.lines]
    print_dry_run(sweep, lines)
    return [job.job_return for job in jobs]


def print_dry_run(sweep: Sweep, lines: Sequence[str]) -> None:
    """Print what a dry run shows of one batch.

    Args:
        sweep: The sweep.
        lines: What to print, a line of the shell each.

    Raises:
        SystemExit: with 0, where the sweeper would go on from values that there are not.
    """
    ends_here = [] if sweep.has_basic_sweeper else [shell_comment(_ENDS_HERE)]
    sys.stdout.write("".join(f"{encodable(line)}\n" for line in (*lines, *ends_here)))
    sys.stdout.flush()
    if ends_here:
        raise SystemExit(0)


@dataclass(frozen=True)
class _ShownJob:
    """A job of a dry run.

    Attributes:
        lines: What is printed of it.
        job_return: What the sweeper gets.
    """

    lines: tuple[str, ...]
    job_return: JobReturn


class _Rehearsal:
    """Give the jobs of one batch their devices and ports as if all of them took equally long.

    Args:
        sweep: What is the same for all of them.
        overrides: Override strings of each job, by its number, in order.
    """

    def __init__(self, sweep: Sweep, overrides: dict[int, list[str]]) -> None:
        self._sweep = sweep
        self._overrides = overrides
        self._shown: dict[int, _ShownJob] = {}
        self._line = JobQueue(sweep, overrides, self._fail, self._settle)
        self._line.base_environment()
        self.summary = self._line.summary

    def run(self) -> list[_ShownJob]:
        """Return what is to be shown of each job, in order."""
        running: deque[tuple[int, Allocation | None]] = deque()
        try:
            while self._line.waiting:
                while self._line.has_work:
                    self._line.work()
                turn = self._line.take_next()
                if turn is not None:
                    running.append((turn[0].number, self._show(*turn)))
                elif not self._line.has_work:
                    self._end(*running.popleft())
        finally:
            while running:
                self._end(*running.popleft())
        return [self._shown[number] for number in self._overrides]

    def _end(self, number: int, place: Allocation | None) -> None:
        self._line.job_ended(number)
        if place is not None:
            place.port.release()

    def _show(self, plan: PlannedJob, devices: tuple[str, ...]) -> Allocation | None:
        """Show a job, and return what it holds; None where it could not start."""
        try:
            # Held for as long as the job would run, so that jobs that run at once have different ones.
            place = Allocation(devices, self._sweep.reserve_port())
        except LauncherError as error:
            self._fail(plan.number, error)
            return None
        try:
            lines = self._job_lines(plan, place)
        except (LauncherError, OSError, ValueError) as error:
            self._fail(plan.number, start_error(error, plan))
        else:
            verdict = results.JobResult(completed=True, value=None)
            job_return = make_job_return(plan.overrides, plan.config, plan.run_dir, verdict)
            self._shown[plan.number] = _ShownJob(lines, job_return)
        return place

    def _settle(self, plan: PlannedJob, decision: ResumeDecision | None) -> bool:
        """Show a job that an earlier run has settled; return whether there is nothing to run."""
        if decision is None or decision.verdict is None:
            return False
        line = shell_comment(f"job {plan.number}: {override_line(plan.overrides)}: is not run: {decision.why}")
        job_return = make_job_return(plan.overrides, plan.config, plan.run_dir, decision.verdict)
        self._shown[plan.number] = _ShownJob((line,), job_return)
        return True

    def _fail(self, number: int, error: Exception) -> None:
        overrides = self._overrides[number]
        verdict = results.failed_before_start(error)
        line = shell_comment(f"job {number}: {override_line(overrides)}: cannot start: {verdict.cause}")
        job_return = make_job_return(overrides, None, "", verdict)
        self._shown[number] = _ShownJob((line,), job_return)

    def _job_lines(self, plan: PlannedJob, place: Allocation) -> tuple[str, ...]:
        recipe = self._recipe(plan)
        start = describe_start(self._sweep, plan, plan.first_attempt, place, recipe)
        facts = job_facts(start, self._line.environment_of(plan))
        commands = [rank_line(facts, rank) for rank in range(plan.world_size)]
        why_not = ""
        if not isinstance(self._sweep.entry, ProgramEntry):
            why_not = _NO_PROGRAM
        elif None in (quoting.encode_overrides(plan.overrides), quoting.encode_overrides(recipe.hydra_overrides)):
            why_not = _TOO_LONG
        if why_not:
            commands = [shell_comment(f"  {why_not}"), *(shell_comment(f"  {command}") for command in commands)]
        return (
            shell_comment(f"job {plan.number}: {override_line(plan.overrides)}"),
            shell_comment(f"  run directory: {plan.run_dir}"),
            shell_comment(f"  devices: {','.join(place.devices) or 'none given out'}"),
            *commands,
        )

    def _recipe(self, plan: PlannedJob) -> quoting.ComposeArgs:
        """Return how a rank composes this job's config: with the sweep directory of now, and not as a dry run."""
        config = self._sweep.config
        typed = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
        assert isinstance(typed, list)
        sweep_dir = quoting.hydra_quoted(frozen_config.escape_interpolations(plan.frozen.sweep_dir))
        return quoting.ComposeArgs(
            config_name=config.hydra.job.config_name,
            hydra_overrides=(
                *(_without_secret(one) for one in typed if not _holds_secrets(one)),
                f"hydra.sweep.dir={sweep_dir}",
                "hydra.launcher.dry_run=false",
            ),
            task=plan.payload.task,
        )


def _holds_secrets(override: str) -> bool:
    """Return whether an override sets several variables, secrets among them: the shell has all of them anyway."""
    return override.lstrip("+").startswith("hydra.job.env_set=") and has_secret(override)


def _without_secret(override: str) -> str:
    """Return an override that takes a secret variable from the rank's environment, into which the shell puts it."""
    found = _ENV_SET.match(override)
    return f"{found[1]}=${{oc.env:{found[2]}}}" if found is not None and is_secret(found[2]) else override


@dataclass(frozen=True)
class DirSnapshot:
    """What was at the place of a sweep directory before the sweeper wrote there.

    Hydra's sweepers make the directory and write the sweep's config into it before they call the launcher.

    Attributes:
        written: The file that they write.
        content: What it held; None: it was not there.
        times_ns: When it was last read and written, nanoseconds.
        missing: Directories that were not there, innermost first.
    """

    written: Path
    content: bytes | None
    times_ns: tuple[int, int]
    missing: tuple[Path, ...]

    @classmethod
    def look(cls, sweep_dir: str) -> DirSnapshot:
        """Take down what is there now.

        Raises:
            StartError: when a file is there that cannot be read, and so could not be put back.
        """
        folder = Path(os.path.abspath(sweep_dir))
        written = folder / "multirun.yaml"
        missing = tuple(directory for directory in (folder, *folder.parents) if not directory.exists())
        try:
            status = written.stat()
            return cls(written, written.read_bytes(), (status.st_atime_ns, status.st_mtime_ns), missing)
        except (FileNotFoundError, NotADirectoryError):
            return cls(written, None, (0, 0), missing)
        except OSError as error:
            raise StartError(
                f"A dry run could not put back {written}, which cannot be read: {error.strerror}. Make it readable, or "
                "choose another hydra.sweep.dir."
            ) from None

    def restore(self) -> None:
        """Have it as it was; directories into which somebody else has written stay. May be called twice."""
        if self.content is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.written.unlink()
        else:
            if self.written.read_bytes() != self.content:
                self.written.write_bytes(self.content)
            os.utime(self.written, ns=self.times_ns)
        for directory in self.missing:
            with contextlib.suppress(OSError):
                directory.rmdir()
