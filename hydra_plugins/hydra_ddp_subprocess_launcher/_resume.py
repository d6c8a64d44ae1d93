"""What an earlier run of the sweep has left to do: `resume`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import _pickling, _results
from ._choices import Resume
from ._events import NO_NUMBERS, shortened
from ._files import JobPaths, read_outcome
from ._records import JobRecord, JobState, SweepRecord
from ._results import Verdict

_MOST_KEYS = 3
_ABSENT = object()


@dataclass(frozen=True)
class Decision:
    """What becomes of a job.

    Attributes:
        why: In a few words.
        verdict: How it ended, if it is not run; None: it is run.
    """

    why: str
    verdict: Verdict | None = None


class Earlier:
    """The jobs of the earlier runs of a sweep.

    Args:
        record: What is known about them.
        choice: What to do about them.
    """

    def __init__(self, record: SweepRecord, choice: Resume) -> None:
        self._choice = choice
        known = [job for job in (*record.past, *record.jobs.values()) if job.attempts or job.state.over]
        # The last one counts.
        self._exact = {(job.number, job.overrides): job for job in known}
        self._alike: dict[tuple[str, ...], list[JobRecord]] = {}
        for job in self._exact.values():
            self._alike.setdefault(job.overrides, []).append(job)
        self._said_new = False
        self._directories = {job.run_dir: job.overrides for job in known if job.run_dir}

    def __len__(self) -> int:
        return len(self._exact)

    def first_new(self) -> bool:
        """Return whether this is called for the first time, for what is to be said once."""
        first, self._said_new = not self._said_new, True
        return first

    def find(self, number: int, overrides: Sequence[str]) -> JobRecord | None:
        """Return what is known about a job: about the one with its number, or another one with its overrides."""
        wanted = tuple(overrides)
        alike = self._alike.get(wanted, [])
        return self._exact.get((number, wanted)) or (alike[0] if alike else None)

    def directory(self, run_dir: str, overrides: Sequence[str]) -> str:
        """Return the run directory of a job that is new: another one where an earlier job has that.

        Args:
            run_dir: What its config says.
            overrides: Its override strings.
        """
        found, count = run_dir, 1
        while self._directories.setdefault(found, tuple(overrides)) != tuple(overrides):
            count += 1
            found = f"{run_dir}-{count}"
        return found

    def decide(self, job: JobRecord | None, config_yaml: str, config_hash: str) -> Decision:
        """Decide what becomes of a job.

        Args:
            job: What is known about it; None: nothing.
            config_yaml: Its own config now.
            config_hash: SHA-256 of that, hexadecimal.
        """
        if job is None or job.state not in (JobState.COMPLETED, JobState.FAILED):
            why = "new" if job is None else "not finished before"
            return Decision(why) if self._choice is Resume.unfinished else _left_out(why)
        if job.state is JobState.FAILED:
            return Decision(f"failed before ({shortened(job.cause)})")
        if job.config_hash != config_hash:
            why = f"config changed in {_difference(job, config_yaml)}"
            return Decision(why) if self._choice is Resume.unfinished else _left_out(why)
        verdict = _stored(job)
        if verdict is None:
            return Decision("done, but its value cannot be read any more")
        return Decision("done", verdict)


def _left_out(why: str) -> Decision:
    return Decision(why, _results.skipped(f"{why}, and hydra.launcher.resume=failed runs only what has failed before"))


def _stored(job: JobRecord) -> Verdict | None:
    """Return how a completed job ended, with its value; None where that is lost."""
    outcome = read_outcome(JobPaths(job.run_dir), 0, job.run_id)
    if outcome is not None and outcome.completed and outcome.value is not None:
        # A pickle can fail with anything; then the journal may do.
        with contextlib.suppress(Exception, SystemExit):
            return Verdict(completed=True, value=_pickling.loads(outcome.value), kept=job)
    return Verdict(completed=True, value=_from_json(job.value), kept=job) if job.exact else None


def _from_json(value: Any) -> Any:
    """Return what `json_value` was made from, as far as JSON can tell."""
    if isinstance(value, str) and value in NO_NUMBERS:
        return float(value)
    if isinstance(value, Mapping):
        return {key: _from_json(part) for key, part in value.items()}
    return [_from_json(part) for part in value] if isinstance(value, list | tuple) else value


def _difference(job: JobRecord, config_yaml: str) -> str:
    """Say in which keys a job's config has changed."""
    try:
        before = yaml.safe_load(Path(JobPaths(job.run_dir).config).read_text(encoding="utf-8"))
        now = yaml.safe_load(config_yaml)
    except (OSError, ValueError, yaml.YAMLError):
        return "keys that are not known any more"
    old, new = dict(_leaves(before)), dict(_leaves(now))
    changed = [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    said = [f"{key}: {_said(old, key)} → {_said(new, key)}" for key in changed[:_MOST_KEYS]]
    more = [f"{len(changed) - _MOST_KEYS} more"] if len(changed) > _MOST_KEYS else []
    return ", ".join([*said, *more]) or "the order of its keys"


def _said(values: Mapping[str, Any], key: str) -> str:
    return shortened(str(values[key])) if key in values else "(absent)"


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, part in value.items() for leaf in _leaves(part, f"{prefix}.{key}".lstrip("."))]
    return [(prefix, value)]
