"""What `hydra-ddp` shows: the status of a sweep, and its timeline."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..common.text import pluralize
from ..display.board import board, draw_board, last_line_of_rank_0
from ..display.tables import results_table
from ..display.terminal import Board
from ..records.events import Event, JobEnded, JobPaused, JobsAdded, JobStarted, SweepBegan, shortened
from .sweep_view import CommandError, SweepReader, SweepSnapshot, in_words

# Seconds between two reads of the journal.
_INTERVAL_S = 0.5
# Columns and lines if there is no terminal, so that everything that runs is shown.
_PAGE = (120, 10_000)
# Of a picture, in which rows for jobs are as many as on a screen.
_PICTURE = (110, 40)


def status(snapshot: SweepSnapshot, out: TextIO) -> str:
    """Return the state of a sweep in words, its board, and the table of its jobs if it is over.

    Args:
        out: The stream to format for, which may be a terminal.
    """
    lines = [in_words(snapshot), *_board_lines(snapshot, out)]
    if not snapshot.live and snapshot.record.jobs:
        lines += ["", results_table(list(snapshot.record.jobs.values()))]
    return "".join(f"{line}\n" for line in lines)


def _board_lines(snapshot: SweepSnapshot, out: TextIO) -> list[str]:
    now = time.time()
    if out.isatty():
        return draw_board(snapshot.record, now, (shutil.get_terminal_size().columns, _PAGE[1]), out.encoding or "utf-8")
    page = io.StringIO()
    width = shutil.get_terminal_size(_PAGE).columns
    console = Console(file=page, width=width, color_system=None, legacy_windows=False, highlight=False)
    console.print(board(snapshot.record, now, (width, _PAGE[1]), last_line_of_rank_0, ascii_only=not _is_unicode(out)))
    return [line.rstrip() for line in page.getvalue().splitlines()]


def _is_unicode(out: TextIO) -> bool:
    return (getattr(out, "encoding", None) or "utf-8").lower().startswith("utf")


def watch_status(watch: SweepReader, out: TextIO) -> None:
    """Show the state of a sweep until it is over: redraw it on a terminal, else print it at each change of a job."""
    at_terminal = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    snapshot = (_repaint if at_terminal else _print_changes)(watch, out)
    out.write(status(snapshot, out))


def _repaint(watch: SweepReader, out: TextIO) -> SweepSnapshot:
    painted = Board(out)
    with _continued(painted.forget):
        try:
            while (snapshot := watch.look()).live:
                columns, lines = painted.size
                # Of the lines one is for the words above the board.
                shown = draw_board(snapshot.record, time.time(), (columns, max(1, lines - 1)), painted.encoding)
                painted.paint([shortened(in_words(snapshot), columns - 1), *shown])
                time.sleep(_INTERVAL_S)
        finally:
            painted.take_away()
    return snapshot


@contextlib.contextmanager
def _continued(act: Callable[[], None]) -> Iterator[None]:
    """Call something whenever a shell continues this process, as it has written below the board."""
    earlier = signal.signal(signal.SIGCONT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, earlier)


def _print_changes(watch: SweepReader, out: TextIO) -> SweepSnapshot:
    seen = None
    while (snapshot := watch.look()).live:
        states = [(job.state, job.attempts) for job in snapshot.record.jobs.values()]
        if states != seen:
            out.write(("" if seen is None else "\n") + status(snapshot, out))
            out.flush()
            seen = states
        time.sleep(_INTERVAL_S)
    if seen is not None:
        out.write("\n")
    return snapshot


def write_picture(snapshot: SweepSnapshot, path: str) -> None:
    """Write the board, and the table of jobs of a sweep that is over, as an SVG picture.

    Args:
        path: The file; its name ends in .svg.

    Raises:
        CommandError: if it does not, or cannot be written.
    """
    if not path.endswith(".svg"):
        raise CommandError(f"{path}: the picture of a board is an SVG. Name a file that ends in .svg.", 2)
    parts: list[RenderableType] = [
        board(snapshot.record, time.time(), _PICTURE, last_line_of_rank_0, ascii_only=False),
    ]
    if not snapshot.live and snapshot.record.jobs:
        parts += [Text(), Text(results_table(list(snapshot.record.jobs.values())))]
    console = Console(
        record=True, file=io.StringIO(), width=_PICTURE[0], force_terminal=True, legacy_windows=False, highlight=False
    )
    console.print(Group(*parts))
    try:
        Path(path).write_text(console.export_svg(title="hydra-ddp status"), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}. Name another file.") from None


# Stands for a device if jobs have none.
NO_DEVICE = ""


class BarStatus(Enum):
    """How one start of a job ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    FAILED_ATTEMPT = "failed, started again"
    RUNNING = "running"
    LOST = "lost"


@dataclass(frozen=True)
class Row:
    """A line of the picture: a device, or a part of one that several jobs share.

    Attributes:
        device: Its id, or NO_DEVICE for jobs without one.
        lane: Index among the jobs that share it, from 0.
    """

    device: str
    lane: int


@dataclass(frozen=True)
class Bar:
    """One start of a job.

    Attributes:
        job: Number of the job.
        attempt: Starts of it before this one.
        status: How it ended.
        began_at: Unix time in seconds.
        ended_at: Likewise.
        rows: One for each of its devices.
    """

    job: int
    attempt: int
    status: BarStatus
    began_at: float
    ended_at: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Timeline:
    """All of a sweep.

    Attributes:
        began_at: Unix time in seconds.
        ended_at: Likewise.
        jobs: How many there are, started or not.
        rows: In the order in which they are drawn, top to bottom.
        bars: In the order in which they began.
    """

    began_at: float
    ended_at: float
    jobs: int
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]


def make_timeline(events: Sequence[Event], over_at: float | None, now: float) -> Timeline:
    """Return the timeline of a sweep.

    Args:
        events: What happened, in order.
        over_at: Last sign of a sweep that is over, Unix time in seconds, or None if it runs.
        now: The same of this moment.
    """
    left, end = (BarStatus.RUNNING, now) if over_at is None else (BarStatus.LOST, over_at)
    placed = _placed(_attempts(events, left, end))
    rows = sorted({row for bar in placed for row in bar.rows}, key=_row_order)
    began_at = events[0].at if events else now
    ended_at = max([bar.ended_at for bar in placed], default=began_at)
    jobs = len({event.first + place for event in events if isinstance(event, JobsAdded) for place in _places(event)})
    return Timeline(began_at, ended_at, jobs, tuple(rows), placed)


def _places(added: JobsAdded) -> range:
    return range(len(added.overrides))


def _attempts(events: Iterable[Event], left: BarStatus, end: float) -> list[Bar]:
    """Return a bar for each start of a job; those without an end reach to the right edge."""
    done: list[Bar] = []
    running: dict[int, Bar] = {}
    last_at = 0.0
    for event in events:
        if isinstance(event, JobStarted):
            rows = tuple(Row(device, 0) for device in event.devices or (NO_DEVICE,))
            running[event.job] = Bar(event.job, event.attempt, left, event.at, max(event.at, end), rows)
        elif isinstance(event, JobPaused | JobEnded) and event.job in running:
            done.append(replace(running.pop(event.job), status=_status(event), ended_at=event.at))
        elif isinstance(event, SweepBegan):
            # The launching process before it was killed, at the latest when it had written its last event.
            done += [replace(bar, status=BarStatus.LOST, ended_at=last_at) for bar in running.values()]
            running.clear()
        last_at = event.at
    return sorted([*done, *running.values()], key=lambda bar: bar.began_at)


def _status(event: JobPaused | JobEnded) -> BarStatus:
    if isinstance(event, JobPaused):
        return BarStatus.FAILED_ATTEMPT
    return BarStatus.COMPLETED if event.completed else BarStatus.FAILED


def _placed(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """Put each bar into the lowest lane of its devices that is free while it lasts."""
    free_at: dict[str, list[float]] = {}
    placed = []
    for bar in bars:
        rows = []
        for row in bar.rows:
            lanes = free_at.setdefault(row.device, [])
            lane = next((lane for lane, at in enumerate(lanes) if at <= bar.began_at), len(lanes))
            lanes[lane : lane + 1] = [bar.ended_at]
            rows.append(Row(row.device, lane))
        placed.append(replace(bar, rows=tuple(rows)))
    return tuple(placed)


def _row_order(row: Row) -> tuple[bool, int, str, int]:
    """Numbers as numbers, names after them."""
    number = row.device.isdecimal()
    return not number, int(row.device) if number else 0, row.device, row.lane


def blocks(rows: Iterable[int]) -> list[range]:
    """Join neighbouring rows: a job on devices 0 and 1 is one block of two rows.

    Args:
        rows: Places of rows, counted from the top.
    """
    found: list[range] = []
    for row in sorted(rows):
        if found and found[-1].stop == row:
            found[-1] = range(found[-1].start, row + 1)
        else:
            found.append(range(row, row + 1))
    return found


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for a duration, as its seconds and its name."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


# Colours that the colour-blind tell apart, too, and hatches for where there are none.
_COLORS = {
    BarStatus.COMPLETED: ("#009e73", ""),
    BarStatus.FAILED: ("#d55e00", ""),
    BarStatus.FAILED_ATTEMPT: ("#f0c05a", "///"),
    BarStatus.RUNNING: ("#56b4e9", ""),
    BarStatus.LOST: ("#b0b0b0", "xxx"),
}
# What would make two pictures of one sweep differ.
_METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {"Software": None},
}
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "hydra-ddp",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "hatch.linewidth": 0.6,
}
_WIDTH_IN = 9.0
_ROW_IN = 0.3
_FRAME_IN = 1.5
# Points that a digit of a job's number takes, and the gaps beside it.
_FONT_PT = 8.0
_DIGIT_PT = 5.2
_GAPS_PT = 3.0
# Width of the line between bars; of a bar that is hardly wider, such a line would leave nothing.
_EDGE_PT = 0.8


def draw_timeline(timeline: Timeline, path: str) -> None:
    """Write a picture.

    Args:
        path: The file; its name tells the format.

    Raises:
        CommandError: when there is no such format, nothing to draw, no matplotlib, or no way to write the file.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _METADATA:
        raise CommandError(
            f"{path} is no picture that can be drawn. Name a file that ends in {', '.join(_METADATA)}.", 2
        )
    if not timeline.bars:
        raise CommandError("No job of this sweep was started, so there is no timeline yet.")
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError(
            "The timeline is drawn by matplotlib, which is not installed. Install it: pip install "
            '"hydra-ddp-subprocess-launcher[timeline]"'
        ) from None
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH_IN, _FRAME_IN + _ROW_IN * max(2, len(timeline.rows))), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), timeline)
        try:
            figure.savefig(path, dpi=150, metadata=_METADATA[suffix])
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}. Name another file.") from None


def _draw(axes: Any, timeline: Timeline) -> None:
    # A sweep that has just begun has no length.
    seconds = max(1.0, timeline.ended_at - timeline.began_at)
    scale, unit = time_unit(seconds)
    places = {row: place for place, row in enumerate(timeline.rows)}
    for bar in timeline.bars:
        _draw_bar(axes, timeline, bar, places, seconds)
    axes.set_xlim(0, seconds / scale)
    axes.set_ylim(len(timeline.rows) - 0.4, -0.6)
    axes.set_yticks(range(len(timeline.rows)), [_label(row) for row in timeline.rows])
    if timeline.rows[0].device != NO_DEVICE:
        axes.set_ylabel("device")
    axes.set_xlabel(f"{unit} since the start")
    axes.set_title(_title(timeline), loc="left", fontsize=10, pad=22)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    _draw_legend(axes, {bar.status for bar in timeline.bars})


def _draw_bar(axes: Any, timeline: Timeline, bar: Bar, places: dict[Row, int], seconds: float) -> None:
    scale, _ = time_unit(seconds)
    color, hatch = _COLORS[bar.status]
    left, width = (bar.began_at - timeline.began_at) / scale, (bar.ended_at - bar.began_at) / scale
    share = width * scale / seconds
    for block in blocks(places[row] for row in bar.rows):
        axes.broken_barh(
            [(left, width)],
            (block.start - 0.42, len(block) - 0.16),
            facecolor=color,
            hatch=hatch,
            edgecolor="white" if _points(share) > 3 * _EDGE_PT else color,
            linewidth=_EDGE_PT,
        )
        if len(str(bar.job)) * _DIGIT_PT + _GAPS_PT <= _points(share):
            middle = (block.start + block.stop - 1) / 2
            axes.text(left + width / 2, middle, str(bar.job), ha="center", va="center_baseline", fontsize=_FONT_PT)


def _points(share: float) -> float:
    """Return the width of a share of the time axis; labels and margins take a tenth of the picture."""
    return share * _WIDTH_IN * 72 * 0.9


def _label(row: Row) -> str:
    if row.device == NO_DEVICE:
        return "" if row.lane else "no device"
    return "" if row.lane else row.device if len(row.device) <= 12 else f"{row.device[:11]}…"


def _title(timeline: Timeline) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timeline.began_at))
    jobs = pluralize(timeline.jobs, "job")
    devices = len({row.device for row in timeline.rows} - {NO_DEVICE})
    where = f" on {pluralize(devices, 'device')}" if devices else ""
    return f"{jobs}{where}, started {began}"


def _draw_legend(axes: Any, statuses: set[BarStatus]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=status.value)
        for status, (color, hatch) in _COLORS.items()
        if status in statuses
    ]
    # Between the title and the first row.
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
