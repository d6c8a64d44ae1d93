"""Records of a sweep on disk: the journal with one line per event, and the table of results."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import functools
import io
import json
import logging
import os
import re
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.files import SweepPaths, write_text
from ..common.text import bounded
from .events import (
    EVENTS,
    Event,
    JobEnded,
    JobKept,
    JobRecord,
    JobSkipped,
    JobStarted,
    JobState,
    JobSubmitted,
    SweepBegan,
    SweepRecord,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_log = logging.getLogger(__name__)
# The year 9999 as Unix time in seconds; anything beyond is not a valid time.
_LATEST = 253402300800
_HINTS = {kind: typing.get_type_hints(kind) for kind in EVENTS.values()}


class Journal:
    """Append events to a file.

    Args:
        path: The file; None to discard events.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._waiting = b""
        self._mended = False
        self._said = False

    def append(self, event: Event) -> None:
        """Write an event. If that fails, for example on a full disk, try again with the next event."""
        if self._path is None:
            return
        # JSON escapes all but ASCII, such as bytes of a file name. A single write is complete, or torn at its end.
        self._waiting += json.dumps({"event": type(event).__name__, **vars(event)}).encode() + b"\n"
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o666)
            try:
                if not self._mended:
                    _end_torn_line(descriptor)
                    self._mended = True
                self._waiting = self._waiting[os.write(descriptor, self._waiting) :]
                if isinstance(event, JobEnded):
                    # A power failure must not lose hours of work.
                    with contextlib.suppress(OSError):
                        os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if self._waiting:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._said:
                _log.warning(
                    "%s cannot be written: %s. The jobs go on; until it can be, neither `hydra-ddp` nor a sweep that "
                    "is resumed knows what happens.",
                    self._path,
                    error.strerror or error,
                )
            self._said = True


def _end_torn_line(descriptor: int) -> None:
    """Terminate a line that a killed process left incomplete, so that it does not corrupt the next one."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")


def read_journal(path: str) -> SweepRecord:
    """Return the record of a sweep from its journal, and count the unreadable lines.

    Raises:
        OSError: if it cannot be read.
    """
    record = SweepRecord()
    for event in _parsed_lines(path):
        if event is None:
            record.unreadable += 1
        else:
            record.apply(event)
    return record


def read_events(path: str) -> list[Event]:
    """Return the events of a journal; skip lines that are torn or written by a later version.

    Raises:
        OSError: if it cannot be read.
    """
    return [event for event in _parsed_lines(path) if event is not None]


def _parsed_lines(path: str) -> Iterator[Event | None]:
    sweep_dir = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    written_in = sweep_dir
    for line in Path(path).read_bytes().split(b"\n"):
        if not line.strip():
            continue
        event = _parse(line)
        if isinstance(event, SweepBegan):
            written_in = event.sweep_dir or sweep_dir
        # The sweep directory may have been moved, or copied.
        elif isinstance(event, JobStarted | JobKept) and event.run_dir.startswith(written_in + os.sep):
            event = dataclasses.replace(event, run_dir=sweep_dir + event.run_dir[len(written_in) :])
        elif isinstance(event, JobSubmitted):
            names = ("folder", "planned_dir", "submitit_folder")
            below = {name: path for name in names if (path := getattr(event, name)).startswith(written_in + os.sep)}
            moved: dict[str, Any] = {name: sweep_dir + path[len(written_in) :] for name, path in below.items()}
            event = dataclasses.replace(event, **moved)
        yield event


def _parse(line: bytes) -> Event | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        kind = EVENTS[fields.pop("event")]
        hints = _HINTS[kind]
        known = {name: _frozen(value) for name, value in fields.items() if name in hints}
        if all(_fits(value, hints[name]) for name, value in known.items()):
            event: Event = kind(**known)
            return event
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # Torn, damaged, or of a later version.
    return None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value matches the type hint of an event's field."""
    if hint is Any:
        return True
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(part, kinds[0]) for part in value)
    if kinds:
        return any(_fits(value, kind) for kind in kinds)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LATEST
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


# Maximum share of the time spent on results.csv. It is always rewritten as a whole, which takes long for many thousands
# of jobs.
_SHARE_OF_TIME = 0.02


class SweepRecorder:
    """Keep the record of a sweep, its journal and its results.csv up to date.

    Args:
        paths: Paths of the sweep; None to write nothing.
        record: Record from earlier runs.

    Attributes:
        sweep: Current record of the sweep.
        failures: Number of jobs that failed in this run.
        results: Path of the table of finished jobs; None if none is written.
    """

    def __init__(self, paths: SweepPaths | None, record: SweepRecord | None = None) -> None:
        self._journal = Journal(None if paths is None else paths.journal)
        self.results = None if paths is None else paths.results
        self.sweep = SweepRecord() if record is None else record
        self.failures = 0
        self._results_are_old = False
        self._said = False
        self._write_after = 0.0

    def record(self, event: Event) -> None:
        """Record an event."""
        self.sweep.apply(event)
        self._journal.append(event)
        if isinstance(event, JobEnded | JobKept | JobSkipped):
            self.failures += isinstance(event, JobEnded) and not event.completed
            self._results_are_old = True
            self.flush()

    def flush(self, *, last: bool = False) -> None:
        """Write results.csv if it is outdated and the next write is due.

        Args:
            last: Write now, because no event will follow for a while.
        """
        began = time.monotonic()
        if self.results is None or not self._results_are_old or (began < self._write_after and not last):
            return
        self._results_are_old = False
        over = self.sweep.in_state(JobState.COMPLETED, JobState.FAILED, JobState.NEVER_STARTED)
        try:
            write_results(self.results, sorted(over, key=lambda job: job.number))
        except OSError as error:
            why = error.strerror or error
            if not self._said:
                _log.warning("%s cannot be written: %s. It is tried again when the next job ends", self.results, why)
            # The end of the next job tries again.
            self._said = True
        ended = time.monotonic()
        self._write_after = ended + (ended - began) / _SHARE_OF_TIME


_DELETED = "(deleted)"
# Longer lists go into one cell, to avoid a column for each of a thousand numbers.
_MOST_PARTS = 32
# Less than the maximum of a spreadsheet's cell.
_LONGEST_CELL = 10_000


def write_results(path: str, jobs: Sequence[JobRecord]) -> None:
    """Write the table of results atomically.

    Args:
        path: The file.
        jobs: The finished jobs.

    Raises:
        OSError: if it cannot be written.
    """
    # Undecodable bytes, for example of a file name, would make the file unreadable for other programs.
    write_text(path, as_csv(results_table(jobs)).encode("utf-8", "backslashreplace").decode())


def as_csv(table: Sequence[Sequence[str]]) -> str:
    """Return a table as CSV."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # A single carriage return would end a row for pandas, but the writer does not quote it.
    writer.writerows([re.sub("\r\n?", "\n", cell) for cell in row] for row in table)
    return text.getvalue()


def sorted_table(table: list[list[str]], column: str, *, descending: bool) -> list[list[str]]:
    """Return a table with its rows sorted: numbers by size, before texts; empty cells and NaN always come last.

    Args:
        table: The table, with a header.
        column: Name of the column to sort by.
        descending: Whether to reverse the order.

    Raises:
        KeyError: if there is no such column.
    """
    header, *rows = table
    if column not in header:
        raise KeyError(column)
    place = header.index(column)

    def order(row: list[str]) -> tuple[bool, float, str]:
        try:
            return False, float(row[place]), ""
        except ValueError:
            return True, 0.0, row[place]

    last = [row for row in rows if row[place].lower() in ("", "nan")]
    rest = [row for row in rows if row[place].lower() not in ("", "nan")]
    return [header, *sorted(rest, key=order, reverse=descending), *last]


def as_json(table: Sequence[Sequence[str]], jobs: Mapping[int, JobRecord]) -> str:
    """Return the rows of a table as JSON: one object per job, with value, overrides and devices in full.

    Args:
        table: The table, with a header.
        jobs: The jobs in it, by number.
    """
    found = [jobs[int(row[0])] for row in table[1:]]
    rows = [
        {
            "job": job.number,
            "overrides": _override_cells(job.overrides),
            "status": job.state.name,
            "value": job.value,
            "duration_s": job.seconds,
            "devices": job.devices,
            "attempts": job.attempts,
            "run_dir": job.run_dir,
            "cause": job.cause,
        }
        for job in found
    ]
    return json.dumps(rows, indent=2) + "\n"


def results_table(jobs: Sequence[JobRecord]) -> list[list[str]]:
    """Return the rows of the results table, with a header row first.

    Columns: job, one per override key, status, value (if a dict, list or tuple: one per part, such as `value.loss` and
    `value.0`), duration_s, devices, attempts, run_dir, cause. An override key with one of these names becomes
    `override.<key>`.
    """
    rows = [(job, _override_cells(job.overrides), dict(_parts("value", job.value))) for job in jobs]
    # Dicts serve as ordered sets.
    keys = list(dict.fromkeys(key for _, cells, _ in rows for key in cells))
    parts = list(dict.fromkeys(part for _, _, cells in rows for part in cells)) or ["value"]
    last = ["duration_s", "devices", "attempts", "run_dir", "cause"]
    own = {"job", "status", *parts, *last}
    header = ["job", *(f"override.{key}" if key in own else key for key in keys), "status", *parts, *last]
    table = [header]
    bound = functools.partial(bounded, most=_LONGEST_CELL)
    for job, overrides, values in rows:
        duration = "" if job.seconds is None else f"{job.seconds:.3f}"
        table.append(
            [str(job.number)]
            + [bound(overrides.get(key, "")) for key in keys]
            + [job.state.name]
            + [bound(values.get(part, "")) for part in parts]
            + [duration, " ".join(job.devices), str(job.attempts), job.run_dir, job.cause]
        )
    return table


def _override_cells(overrides: Sequence[str]) -> dict[str, str]:
    return dict(map(_override_cell, overrides))


# Parsing takes longer than everything else done here per job.
@functools.cache
def _override_cell(text: str) -> tuple[str, str]:
    if len(text) > _LONGEST_CELL:
        # Parsing it would take seconds.
        key, _, value = text.partition("=")
        return bounded(key.lstrip("+~")), value
    # Not at the top, as `hydra-ddp` reads journals without Hydra.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except (HydraException, ValueError):
        return text, text  # A sweeper's own syntax.
    return override.get_key_element().lstrip("+~"), _override_value(override)


def _override_value(override: Override) -> str:
    if override.is_delete():
        return _DELETED
    value = override.value()
    return _text(value) if not isinstance(value, list | dict) else override.get_value_string()


def _parts(name: str, value: Any) -> list[tuple[str, str]]:
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    if not 0 < len(pairs) <= _MOST_PARTS:
        return [(name, _text(value) if not isinstance(value, list | tuple | Mapping) else json.dumps(value))]
    return [cell for key, part in pairs for cell in _parts(f"{name}.{key}", part)]


def _text(value: Any) -> str:
    return "" if value is None else str(value)
