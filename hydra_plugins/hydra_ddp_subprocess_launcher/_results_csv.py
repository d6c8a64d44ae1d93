"""results.csv: one row a job that is over, for a spreadsheet and for pandas."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ._files import write_text
from ._records import JobRecord
from ._words import bounded

_DELETED = "(deleted)"
# Longer lists stand in one cell: nobody wants a column for each of a thousand numbers.
_MOST_PARTS = 32
# Less than what a cell of a spreadsheet can hold.
_LONGEST_CELL = 10_000


def write_results(path: str, jobs: Sequence[JobRecord]) -> None:
    """Write the table, whole or not at all.

    Args:
        path: The file.
        jobs: Those that are over.

    Raises:
        OSError: when it cannot be written.
    """
    # What is no text, such as bytes of a file name, would make it unreadable for others.
    write_text(path, as_csv(results_table(jobs)).encode("utf-8", "backslashreplace").decode())


def as_csv(table: Sequence[Sequence[str]]) -> str:
    """Return a table as a CSV file has it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # A carriage return alone would be the end of a row for pandas, but not for the writer, which does not quote it.
    writer.writerows([re.sub("\r\n?", "\n", cell) for cell in row] for row in table)
    return text.getvalue()


def sorted_table(table: list[list[str]], column: str, *, descending: bool) -> list[list[str]]:
    """Return a table with its rows sorted: numbers by size, before texts; empty cells and NaN come last either way.

    Args:
        table: As of `results_table`.
        column: Name of a column.
        descending: The largest first.

    Raises:
        KeyError: when there is no such column.
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
    """Return the rows of a table as JSON: an object a job, with its value, overrides and devices as they are.

    Args:
        table: As of `results_table`.
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
    """Return the rows, the first one with the names of the columns.

    Columns: job, one a key of an override, then status, value (one a part, such as `value.loss` and `value.0`, where
    it is a dict, list or tuple), duration_s, devices, attempts, run_dir, cause. A key of the user's that has such a
    name is called `override.<key>`.
    """
    rows = [(job, _override_cells(job.overrides), dict(_parts("value", job.value))) for job in jobs]
    # Dicts, as sets that keep their order.
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


# To parse one takes longer than all else that a job costs here.
@functools.cache
def _override_cell(text: str) -> tuple[str, str]:
    if len(text) > _LONGEST_CELL:
        # To parse it would take seconds.
        key, _, value = text.partition("=")
        return bounded(key.lstrip("+~")), value
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except (HydraException, ValueError):
        return text, text  # A sweeper's own language.
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
