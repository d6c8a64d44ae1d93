"""The board: what runs, what is done, and how long the rest will take."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..common.files import JobPaths
from ..records.events import JobRecord, JobState, SweepRecord
from .logs import last_lines, printable
from .tables import override_line

_ByState: TypeAlias = Mapping[JobState, Sequence[JobRecord]]
# Below it there is no room for a table with the last line of a log in it.
_NARROW = 70
# Of the screen's lines, what rows of jobs may take; the rest is for the lines above.
_SHARE_OF_LINES = 0.6
# From here on there is room for more than is needed.
_WIDE = 100
_BAR = (
    (JobState.COMPLETED, "━", "=", "green"),
    (JobState.FAILED, "x", "x", "red"),
    (JobState.RUNNING, ">", ">", "yellow"),
    (JobState.PENDING, ":", ":", "dim"),
    (JobState.WAITING, "·", ".", "dim"),
)


def draw_board(record: SweepRecord, now: float, size: tuple[int, int], encoding: str) -> list[str]:
    """Return the board, line by line, as a terminal shows it.

    Args:
        record: What is known about the sweep.
        now: Unix time in seconds.
        size: Columns and lines of the terminal.
        encoding: Of the terminal. It has colours unless `NO_COLOR` is set.
    """
    # One column stays free: at the last one terminals differ in when they go to the next line.
    console = Console(
        file=io.StringIO(),
        width=max(1, size[0] - 1),
        force_terminal=not os.environ.get("NO_COLOR"),
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(board(record, now, size, last_line_of_rank_0, ascii_only=not _encodes(encoding)))
    return [line.rstrip() for line in captured.get().split("\n")[:-1]]


def _encodes(encoding: str) -> bool:
    try:
        "━·…".encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def last_line_of_rank_0(job: JobRecord) -> str:
    """Return the last line in the log of a job's rank 0; empty: there is none yet."""
    return "".join(last_lines(JobPaths(job.run_dir).log(0), 1))


def board(
    record: SweepRecord, now: float, size: tuple[int, int], last_line: Callable[[JobRecord], str], *, ascii_only: bool
) -> RenderableType:
    """Return the board, to be shown by rich.

    Args:
        record: What is known about the sweep.
        now: Unix time in seconds.
        size: Columns and lines to show it in.
        last_line: Returns the last line that rank 0 of a job has printed.
        ascii_only: Whether nothing but ASCII can be shown.
    """
    width, height = size
    by_state = record.by_state()
    running = sorted(by_state[JobState.RUNNING] + by_state[JobState.PAUSED], key=lambda job: job.number)
    narrow = width < _NARROW
    most = max(1, int(height * _SHARE_OF_LINES) // (2 if narrow else 1))
    shown, more = running[:most], len(running) - most
    parts: list[RenderableType] = []
    if shown:
        parts.append((_narrow_table if narrow else _wide_table)(record, shown, now, last_line))
    if more > 0:
        parts.append(Text(f"… and {more} more running", style="dim"))
    parts.append(_summary(by_state, seconds_left(by_state, record.at_once, now), now, width, ascii_only=ascii_only))
    return Group(*parts)


def _wide_table(
    record: SweepRecord, jobs: Sequence[JobRecord], now: float, last_line: Callable[[JobRecord], str]
) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    devices, cluster = any(job.devices for job in jobs), any(job.job_id for job in jobs)
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("overrides", no_wrap=True, overflow="ellipsis", max_width=40)
    if devices:
        table.add_column("devices", no_wrap=True, overflow="ellipsis", max_width=16)
    if cluster:
        table.add_column("id", no_wrap=True)
        table.add_column("nodes", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("last line of rank 0", no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        cells = [str(job.number), differing(record, job), str(job.nproc), _elapsed(job, now), _last(job, last_line)]
        placed = [",".join(job.devices)] if devices else []
        placed += [job.job_id, ",".join(job.nodes)] if cluster else []
        cells[2:2] = placed
        table.add_row(*map(Text, cells))
    return table


def _narrow_table(
    record: SweepRecord, jobs: Sequence[JobRecord], now: float, last_line: Callable[[JobRecord], str]
) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, show_header=False)
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("overrides", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    for job in jobs:
        table.add_row(f"#{job.number}", Text(differing(record, job)), _elapsed(job, now))
        table.add_row("", Text(_last(job, last_line), style="dim"), "")
    return table


def differing(record: SweepRecord, job: JobRecord) -> str:
    """Return the overrides of a job that not all jobs have, as the basic launcher shows them."""
    return printable(override_line([one for one in job.overrides if one not in record.shared]))


def _last(job: JobRecord, last_line: Callable[[JobRecord], str]) -> str:
    if job.state is JobState.PAUSED:
        return "waits for its next start"
    return printable(last_line(job))


def _elapsed(job: JobRecord, now: float) -> str:
    return clock(now - (job.began_at or now))


def clock(seconds: float) -> str:
    """Return a duration as `0:05`, `3:05`, `1:02:03`."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _summary(by_state: _ByState, left: float | None, now: float, width: int, *, ascii_only: bool) -> RenderableType:
    counts = {state: len(jobs) for state, jobs in by_state.items()}
    counts[JobState.RUNNING] += counts.pop(JobState.PAUSED)
    said = [f"{counts[JobState.COMPLETED]}/{sum(counts.values())} done"]
    said += [
        f"{counts[state]} {state.value.lower()}"
        for state in (JobState.FAILED, JobState.RUNNING, JobState.PENDING, JobState.WAITING)
        if counts[state]
    ]
    if left is not None:
        until = f", until {time.strftime('%H:%M', time.localtime(now + left))}" if width >= _WIDE else ""
        said.append(f"{clock(left)} left{until}")
    text = Text(", ".join(said))
    if width < _NARROW:
        return Group(_bar(counts, width - 1, ascii_only=ascii_only), text)
    return Text(" ").join([_bar(counts, 30 if width >= _WIDE else 20, ascii_only=ascii_only), text])


def _bar(counts: dict[JobState, int], length: int, *, ascii_only: bool) -> Text:
    total = max(1, sum(counts.values()))
    bar = Text()
    done = 0
    for state, mark, plain_mark, style in _BAR:
        before = len(bar)
        done += counts[state]
        bar.append((plain_mark if ascii_only else mark) * (round(done * length / total) - before), style)
    return bar


def seconds_left(by_state: _ByState, at_once: int, now: float) -> float | None:
    """Estimate how long the jobs that are known will take; None before one has ended.

    As if each took as long as the mean of those that completed, or failed where none has, and no device were idle.

    Args:
        at_once: Most of them that run at a time.
        now: Unix time in seconds.
    """
    over = by_state[JobState.COMPLETED] or by_state[JobState.FAILED]
    took = [job.seconds for job in over if job.seconds is not None]
    rest = [
        job
        for state in (JobState.RUNNING, JobState.PAUSED, JobState.PENDING, JobState.WAITING)
        for job in by_state[state]
    ]
    if not took or not rest:
        return None
    mean = sum(took) / len(took)
    left = [max(0.0, mean - (now - job.began_at)) if job.began_at is not None else mean for job in rest]
    return max(sum(left) / max(1, at_once), *left)
