"""A dry run: show one batch of jobs as shell commands. It starts nothing and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from ..common import quoting
from ..common.errors import LauncherError, StartError
from ..common.quoting import has_secret, is_secret, rank_line, shell_comment
from ..common.text import encodable
from ..display.tables import override_line
from ..job.environment import group_environment
from ..job.plan import Allocation, JobPlanner, PlannedJob, build_launch_spec, job_facts, start_error
from ..job.program import ProgramEntry
from ..job.results import JobResult, failed_before_start, make_job_return
from ..job.settings import SweepContext
from ..resources.devices import DeviceAllocator
from ..resources.schedule import DevicePool
from .batch import reserve_job_port
from .job_queue import JobQueue
from .resume import PreviousRuns

_ENV_SET = re.compile(r"(\+*hydra\.job\.env_set\.(\w+))=")
_HEADER = "Nothing is started. Each line below a job is one rank: run those of a job at the same time, a shell each."
_ENDS_HERE = "The dry run ends here: what the sweeper asks for next depends on the values of these jobs."
_NO_PROGRAM = "They cannot be pasted: the job function goes to the ranks by pickle, in a file that only a sweep writes."
_TOO_LONG = "The overrides are too long for a command that can be pasted. In a sweep the ranks read them from a file."


class DryRun:
    """Show the jobs of a sweep as shell commands, starting nothing and leaving nothing behind.

    Args:
        pool: The devices that the jobs would share.
        previous: Jobs of earlier runs of the sweep.
        snapshot: State of the sweep directory before the sweeper wrote to it.
    """

    def __init__(
        self,
        context: SweepContext,
        planner: JobPlanner,
        pool: DevicePool,
        allocator: DeviceAllocator,
        previous: PreviousRuns,
        snapshot: DirSnapshot,
    ) -> None:
        self._context = context
        self._planner = planner
        self._pool = pool
        self._allocator = allocator
        self._previous = previous
        self._snapshot = snapshot

    def run_batch(self, overrides: Mapping[int, Sequence[str]]) -> list[JobReturn]:
        """Print the commands of one batch of jobs, and undo what the sweeper has written.

        Returns:
            One JobReturn per job, in order: completed with None, or failed if the job could not be started.

        Raises:
            SystemExit: with code 0, if the sweeper needs the jobs' values to continue.
        """
        try:
            queue = JobQueue(self._context, self._planner, self._pool, self._allocator, overrides)
            rehearsal = _Rehearsal(self._context, queue, self._previous, overrides)
            jobs = rehearsal.run()
        finally:
            # Restore after each batch, as Hydra does not say which one is the last.
            self._snapshot.restore()
        lines = [shell_comment(f"dry run: {queue.summary}"), shell_comment(_HEADER)]
        lines += [line for job in jobs for line in job.lines]
        print_dry_run(self._context, lines)
        return [job.job_return for job in jobs]


def print_dry_run(context: SweepContext, lines: Sequence[str]) -> None:
    """Print what a dry run shows for one batch.

    Args:
        lines: Lines of shell input.

    Raises:
        SystemExit: with code 0, if the sweeper needs the jobs' values to continue.
    """
    ends_here = [] if context.has_basic_sweeper else [shell_comment(_ENDS_HERE)]
    sys.stdout.write("".join(f"{encodable(line)}\n" for line in (*lines, *ends_here)))
    sys.stdout.flush()
    if ends_here:
        raise SystemExit(0)


@dataclass(frozen=True)
class ShownJob:
    """A job of a dry run.

    Attributes:
        lines: Lines printed for it.
        job_return: Returned to the sweeper.
    """

    lines: tuple[str, ...]
    job_return: JobReturn


def shown_failure(number: int, overrides: Sequence[str], error: Exception) -> ShownJob:
    """Show a job that could not be started."""
    result = failed_before_start(error)
    line = shell_comment(f"job {number}: {override_line(overrides)}: cannot start: {result.cause}")
    return ShownJob((line,), make_job_return(overrides, None, "", result))


def shown_decision(plan: PlannedJob, previous: PreviousRuns) -> ShownJob | None:
    """Show a job that would not be run because of an earlier run. Return None if it would be run."""
    decision = previous.decide(plan.known, plan.config_yaml, plan.config_hash)
    if decision is None or decision.result is None:
        return None
    line = shell_comment(f"job {plan.number}: {override_line(plan.overrides)}: is not run: {decision.why}")
    return ShownJob((line,), make_job_return(plan.overrides, plan.config, plan.run_dir, decision.result))


def shown_job(plan: PlannedJob, lines: Sequence[str]) -> ShownJob:
    """Show a job that would be run."""
    result = JobResult(completed=True, value=None)
    return ShownJob(tuple(lines), make_job_return(plan.overrides, plan.config, plan.run_dir, result))


class _Rehearsal:
    """Assign devices and ports to the jobs of one batch as if all jobs took equally long.

    Args:
        previous: Jobs of earlier runs of the sweep.
        overrides: Override strings of each job, by its number, in order.
    """

    def __init__(
        self,
        context: SweepContext,
        queue: JobQueue,
        previous: PreviousRuns,
        overrides: Mapping[int, Sequence[str]],
    ) -> None:
        self._context = context
        self._queue = queue
        self._previous = previous
        self._overrides = overrides
        self._shown: dict[int, ShownJob] = {}
        queue.base_environment()

    def run(self) -> list[ShownJob]:
        """Return what to show for each job, in order."""
        running: deque[tuple[int, Allocation | None]] = deque()
        try:
            while self._queue.waiting:
                while self._queue.can_prepare:
                    self._prepare_next()
                turn = self._queue.take_next()
                if turn is not None:
                    running.append((turn[0].number, self._show(*turn)))
                elif not self._queue.can_prepare:
                    self._end(*running.popleft())
        finally:
            while running:
                self._end(*running.popleft())
        return [self._shown[number] for number in self._overrides]

    def _prepare_next(self) -> None:
        prepared = self._queue.prepare_next()
        if prepared is None:
            return
        if prepared.plan is None:
            assert prepared.error is not None
            self._fail(prepared.number, prepared.error)
        elif (shown := shown_decision(prepared.plan, self._previous)) is not None:
            self._queue.discard(prepared.number)
            self._shown[prepared.number] = shown

    def _end(self, number: int, allocation: Allocation | None) -> None:
        self._queue.job_ended(number)
        if allocation is not None:
            allocation.port.release()

    def _show(self, plan: PlannedJob, devices: tuple[str, ...]) -> Allocation | None:
        """Show a job, and return its allocation, or None if it could not be started."""
        try:
            # Keep the port for as long as the job would run, so that concurrent jobs get different ports.
            allocation = Allocation(devices, reserve_job_port(self._context.settings))
        except LauncherError as error:
            self._fail(plan.number, error)
            return None
        try:
            self._shown[plan.number] = shown_job(plan, self._job_lines(plan, allocation))
        except (LauncherError, OSError, ValueError) as error:
            self._fail(plan.number, start_error(error, plan))
        return allocation

    def _fail(self, number: int, error: Exception) -> None:
        self._shown[number] = shown_failure(number, self._overrides[number], error)

    def _job_lines(self, plan: PlannedJob, allocation: Allocation) -> tuple[str, ...]:
        args = self._compose_args(plan)
        spec = build_launch_spec(plan, plan.first_attempt, allocation, self._context.settings)
        spec = replace(spec, payload_digest=None)
        why_not = ""
        if not isinstance(self._context.entry, ProgramEntry):
            why_not = _NO_PROGRAM
        else:
            spec = replace(spec, argv=(*spec.argv, *quoting.compose_arguments(args)))
            if None in (quoting.encode_overrides(plan.overrides), quoting.encode_overrides(args.hydra_overrides)):
                why_not = _TOO_LONG
        facts = job_facts(spec, group_environment(self._queue.environment_of(plan), spec))
        commands = [rank_line(facts, rank) for rank in range(plan.world_size)]
        if why_not:
            commands = [shell_comment(f"  {why_not}"), *(shell_comment(f"  {command}") for command in commands)]
        return (
            shell_comment(f"job {plan.number}: {override_line(plan.overrides)}"),
            shell_comment(f"  run directory: {plan.run_dir}"),
            shell_comment(f"  devices: {','.join(allocation.devices) or 'none given out'}"),
            *commands,
        )

    def _compose_args(self, plan: PlannedJob) -> quoting.ComposeArgs:
        """Return how a rank composes this job's config: with the current sweep directory and without `dry_run`."""
        config = self._context.config
        typed = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
        assert isinstance(typed, list)
        sweep_dir = quoting.hydra_quoted(quoting.escape_interpolations(plan.frozen.sweep_dir))
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
    """Return whether an override sets several variables, including secrets. The shell line sets all of them anyway."""
    return override.lstrip("+").startswith("hydra.job.env_set=") and has_secret(override)


def _without_secret(override: str) -> str:
    """Return an override that reads a secret variable from the rank's environment, where the shell line puts it."""
    found = _ENV_SET.match(override)
    return f"{found[1]}=${{oc.env:{found[2]}}}" if found is not None and is_secret(found[2]) else override


@dataclass(frozen=True)
class DirSnapshot:
    """State of a sweep directory before the sweeper wrote to it.

    Hydra's sweepers create the directory and write the sweep's config into it before they call the launcher.

    Attributes:
        written: The file that they write.
        content: Its content, or None if it did not exist.
        times_ns: When it was last read and written, in nanoseconds.
        missing: Directories that did not exist, innermost first.
    """

    written: Path
    content: bytes | None
    times_ns: tuple[int, int]
    missing: tuple[Path, ...]

    @classmethod
    def look(cls, sweep_dir: str) -> DirSnapshot:
        """Record the current state.

        Raises:
            StartError: if a file exists that cannot be read, and so could not be restored.
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
        """Restore the state; directories that other processes have written to stay. May be called more than once."""
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
