"""A timeline as a picture, by matplotlib."""

from __future__ import annotations

import os
import time
from typing import Any

from ._timeline import NO_DEVICE, Bar, BarStatus, Row, Timeline, blocks, time_unit
from ._watching import CommandError
from ._words import counted

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
        timeline: Of which sweep.
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
    jobs = counted(timeline.jobs, "job")
    devices = len({row.device for row in timeline.rows} - {NO_DEVICE})
    where = f" on {counted(devices, 'device')}" if devices else ""
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
