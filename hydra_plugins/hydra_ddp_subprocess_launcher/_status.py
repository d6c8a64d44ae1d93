"""The state of a sweep for people: now, again and again, or as a picture."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ._board import board, draw_board, last_line_of_rank_0
from ._events import shortened
from ._report import results_table
from ._terminal import Board
from ._watching import CommandError, Sight, Watch, in_words

# Seconds between two looks.
_INTERVAL_S = 0.5
# Columns and lines of what is no terminal: all that runs is shown.
_PAGE = (120, 10_000)
# Of a picture, in which rows for jobs are as many as on a screen.
_PICTURE = (110, 40)


def status(sight: Sight, out: TextIO) -> str:
    """Return the state of a sweep in words, its board, and the table of its jobs when it is over.

    Args:
        sight: The sweep.
        out: For which terminal, if it is one.
    """
    lines = [in_words(sight), *_board_lines(sight, out)]
    if not sight.live and sight.record.jobs:
        lines += ["", results_table(list(sight.record.jobs.values()))]
    return "".join(f"{line}\n" for line in lines)


def _board_lines(sight: Sight, out: TextIO) -> list[str]:
    now = time.time()
    if out.isatty():
        return draw_board(sight.record, now, (shutil.get_terminal_size().columns, _PAGE[1]), out.encoding or "utf-8")
    page = io.StringIO()
    width = shutil.get_terminal_size(_PAGE).columns
    console = Console(file=page, width=width, color_system=None, legacy_windows=False, highlight=False)
    console.print(board(sight.record, now, (width, _PAGE[1]), last_line_of_rank_0, ascii_only=not _is_unicode(out)))
    return [line.rstrip() for line in page.getvalue().splitlines()]


def _is_unicode(out: TextIO) -> bool:
    return (getattr(out, "encoding", None) or "utf-8").lower().startswith("utf")


def watch_status(watch: Watch, out: TextIO) -> None:
    """Show the state of a sweep until it is over: on a terminal painted anew, else again whenever a job goes on.

    Args:
        watch: On the sweep.
        out: Where.
    """
    at_terminal = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    sight = (_repaint if at_terminal else _print_changes)(watch, out)
    out.write(status(sight, out))


def _repaint(watch: Watch, out: TextIO) -> Sight:
    painted = Board(out)
    with _continued(painted.forget):
        try:
            while (sight := watch.look()).live:
                columns, lines = painted.size
                # Of the lines one is for the words above the board.
                shown = draw_board(sight.record, time.time(), (columns, max(1, lines - 1)), painted.encoding)
                painted.paint([shortened(in_words(sight), columns - 1), *shown])
                time.sleep(_INTERVAL_S)
        finally:
            painted.take_away()
    return sight


@contextlib.contextmanager
def _continued(act: Callable[[], None]) -> Iterator[None]:
    """Do something whenever a shell has continued this process: it has written below the board."""
    earlier = signal.signal(signal.SIGCONT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, earlier)


def _print_changes(watch: Watch, out: TextIO) -> Sight:
    seen = None
    while (sight := watch.look()).live:
        states = [(job.state, job.attempts) for job in sight.record.jobs.values()]
        if states != seen:
            out.write(("" if seen is None else "\n") + status(sight, out))
            out.flush()
            seen = states
        time.sleep(_INTERVAL_S)
    if seen is not None:
        out.write("\n")
    return sight


def write_picture(sight: Sight, path: str) -> None:
    """Write the board, and the table of jobs of a sweep that is over, as an SVG picture.

    Args:
        sight: The sweep.
        path: The file; its name ends in .svg.

    Raises:
        CommandError: when it does not, or cannot be written.
    """
    if not path.endswith(".svg"):
        raise CommandError(f"{path}: the picture of a board is an SVG. Name a file that ends in .svg.", 2)
    parts: list[RenderableType] = [
        board(sight.record, time.time(), _PICTURE, last_line_of_rank_0, ascii_only=False),
    ]
    if not sight.live and sight.record.jobs:
        parts += [Text(), Text(results_table(list(sight.record.jobs.values())))]
    console = Console(
        record=True, file=io.StringIO(), width=_PICTURE[0], force_terminal=True, legacy_windows=False, highlight=False
    )
    console.print(Group(*parts))
    try:
        Path(path).write_text(console.export_svg(title="hydra-ddp status"), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}. Name another file.") from None
