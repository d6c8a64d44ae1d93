"""What the user reads about jobs: the lines while they run and the table at the end."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.utils import JobReturn, filter_overrides

_LEAST_WIDTH = 60
_WIDTH_WITHOUT_TERMINAL = 120


@dataclass(frozen=True)
class JobResult:
    """One finished job.

    Attributes:
        number: Number of the job.
        job_return: What the sweeper gets.
        completed: Whether it did.
        cause: Why not, one line.
        seconds: From the start of its ranks to the end of the last; None: they were never started.
    """

    number: int
    job_return: JobReturn
    completed: bool
    cause: str
    seconds: float | None


def override_line(overrides: Sequence[str]) -> str:
    """Return the overrides of a job as the basic launcher shows them."""
    return " ".join(filter_overrides(overrides))


def shown(text: str) -> str:
    """Return a text in a form that standard output can take: escapes for what its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float | None) -> str:
    """Return a duration for people: `0.8 s`, `3:05`, `1:02:03`."""
    if seconds is None:
        return "-"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def results_table(results: Sequence[JobResult]) -> str:
    """Return a table with one row a job."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="")
    for title, style in (
        ("job", "right"),
        ("overrides", "left"),
        ("status", "left"),
        ("value", "left"),
        ("time", "right"),
    ):
        table.add_column(title, justify=style, overflow="fold")  # type: ignore[arg-type]
    for result in results:
        value = result.cause if not result.completed else _short(result.job_return._return_value)
        cells = (
            str(result.number),
            override_line(result.job_return.overrides or ()),
            "completed" if result.completed else "FAILED",
            value,
            duration(result.seconds),
        )
        table.add_row(*map(Text, cells))
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(table)
    failed = sum(not result.completed for result in results)
    last = f"{len(results)} jobs: {len(results) - failed} completed, {failed} failed"
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + f"\n{last}"


def _short(value: object) -> str:
    try:
        text = f"{value:.6g}" if isinstance(value, float) else " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  (a user's __repr__ may raise anything)
        text = type(value).__name__
    return text if len(text) <= 60 else text[:59] + "…"
