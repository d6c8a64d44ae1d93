"""What the tests of submitit's launchers share: sweeps of tests/apps/queued.py, and what they have left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobRecord, JobState
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import read_journal
from support.runner import APPS, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Ran, Runner

QUEUED = APPS / "queued.py"
CLI = ("-m", "hydra_plugins.hydra_ddp_subprocess_launcher.cli.main")


class Submitting:
    """Sweeps of one test, all in the same sweep directory.

    Args:
        runner: Of the test.
        executor: `slurm` or `local`.
        interface: Network interface by which the nodes reach each other.
    """

    def __init__(self, runner: Runner, executor: str, interface: str = "lo") -> None:
        self.runner = runner
        self.executor = executor
        self.sweep_dir = runner.cwd / "sweep"
        self.env = {"QUEUED_DIR": str(runner.cwd), "GLOO_SOCKET_IFNAME": interface}

    def arguments(self, *overrides: str, app: Path = QUEUED) -> list[str]:
        own = ["hydra.launcher.grace_period_s=1", f"hydra.sweep.dir={self.sweep_dir}"]
        return [str(app), "-m", f"hydra/launcher=ddp_submitit_{self.executor}", *own, *overrides]

    def run(self, *overrides: str, app: Path = QUEUED, env: dict[str, str] | None = None) -> Ran:
        """Sweep to the end."""
        return self.runner.python(*self.arguments(*overrides, app=app), env={**self.env, **(env or {})})

    @contextmanager
    def running(self, *overrides: str, app: Path = QUEUED) -> Iterator[subprocess.Popen[str]]:
        """Have a sweep run meanwhile, in a session of its own, as a terminal would start it."""
        argv = [sys.executable, *self.arguments(*overrides, app=app)]
        with self.runner.start(*argv, env=self.env, start_new_session=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def notes(self, what: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return what ranks have noted, in order of time, as far as it has these facts."""
        path = self.runner.cwd / "ran.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if {**line, "what": what, **wanted} == line]

    def wait_for(self, what: str, count: int = 1, timeout_s: float = PATIENCE_S, **wanted: Any) -> list[dict[str, Any]]:
        """Return the notes as soon as there are so many."""
        said = f"{count} times {what} with {wanted}"
        self.runner.wait_until(lambda: len(self.notes(what, **wanted)) >= count, timeout_s, said)
        return self.notes(what, **wanted)

    def go(self, name: str = "go") -> None:
        """Let jobs end that wait for this."""
        (self.runner.cwd / name).touch()

    @property
    def jobs(self) -> dict[int, JobRecord]:
        """What the journal has about each job now."""
        return read_journal(str(self._journal)).jobs if self._journal.exists() else {}

    @property
    def _journal(self) -> Path:
        return self.sweep_dir / ".ddp" / "journal.jsonl"

    def events(self) -> list[str]:
        """Return what has happened in all runs of the sweep, by the names of the events."""
        return [json.loads(line)["event"] for line in self._journal.read_text().splitlines()]

    def forget(self) -> None:
        """Leave the journal as if the launching process had been killed before it could note any id."""
        lines = self._journal.read_text().splitlines(keepends=True)
        facts = [json.loads(line) for line in lines]
        early = [one["event"] in ("SweepBegan", "JobsAdded") or one.get("job_id") == "" for one in facts]
        self._journal.write_text("".join(line for line, is_early in zip(lines, early, strict=True) if is_early))

    def values(self) -> list[Any]:
        jobs = self.jobs.values()
        return [_listed(job.value) if job.state is JobState.COMPLETED else job.state for job in jobs]

    def id_of(self, job: int, timeout_s: float = PATIENCE_S) -> str:
        """Return the id of a job on the cluster, as soon as it has one."""
        self.runner.wait_until(lambda: job in self.jobs and self.jobs[job].job_id, timeout_s, f"id of job {job}")
        return self.jobs[job].job_id

    def ran(self) -> list[tuple[int, int, int]]:
        """Return (job, rank, attempt) of every rank that began, sorted."""
        return sorted((note["job"], note["rank"], note["attempt"]) for note in self.notes("began"))

    def status(self) -> str:
        """Return what `hydra-ddp status` says."""
        return self.runner.python(*CLI, "status", "-d", self.sweep_dir).output


def finish(process: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> tuple[int, str]:
    """Wait for a sweep that was started; return its exit code and what it printed."""
    stdout, stderr = process.communicate(timeout=timeout_s)
    return process.returncode, stdout + stderr


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
