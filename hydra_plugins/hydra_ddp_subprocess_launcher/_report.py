"""What the user reads about jobs: the lines while they run and the table at the end."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

from hydra.core.utils import filter_overrides

from ._records import JobRecord, JobState
from ._words import counted, numbered

_LEAST_WIDTH = 40
_WIDTH_WITHOUT_TERMINAL = 120
_TITLES = ("job", "overrides", "status", "value", "time", "devices", "cause")
UNGROUPED = (
    "its ranks opened no process group, so each of them did the whole job by itself. Open one (Lightning: "
    "strategy=ddp), or start as many ranks as the job uses: 'hydra.launcher.nproc_per_node=${trainer.devices}'"
)
_OPTIONAL = ("value", "devices", "cause")


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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
    table = Table(box=None, pad_edge=False, header_style="")
    titles = [title for title in _TITLES if title not in _OPTIONAL or any(row[title] for row in rows)]
    for title in titles:
        table.add_column(title, justify="right" if title in ("job", "time") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[title]) for title in titles))
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(table)
    counts = {state: sum(job.state is state for job in jobs) for state in JobState}
    always = (JobState.COMPLETED, JobState.FAILED)
    said = [f"{count} {state.value.lower()}" for state, count in counts.items() if count or state in always]
    last = f"{counted(len(jobs), 'job')}: {', '.join(said)}"
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if ungrouped := [job.number for job in jobs if job.ungrouped]:
        lines.append(f"Warning: {numbered('job', ungrouped)}: {UNGROUPED}")
    return "\n".join([*lines, last])
