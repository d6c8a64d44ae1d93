"""The journal of a sweep: one line of JSON an event, appended as it happens, and readable whatever was killed since."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._events import EVENTS, Event, JobEnded, JobKept, JobStarted, JobSubmitted, SweepBegan
from ._records import SweepRecord

_log = logging.getLogger(__name__)
# Unix time in seconds of the year 9999: what lies beyond is no time.
_LATEST = 253402300800
_HINTS = {kind: typing.get_type_hints(kind) for kind in EVENTS.values()}


class Journal:
    """Append events to a file.

    Args:
        path: The file; None: events go nowhere.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._waiting = b""
        self._mended = False
        self._said = False

    def append(self, event: Event) -> None:
        """Write an event down. What cannot be written now, as on a full disk, is tried again with the next one."""
        if self._path is None:
            return
        # All ASCII, as JSON escapes the rest, such as bytes of a file name. One write: whole, or torn at its end.
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
                    # Hours of work shall not be lost with the power.
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
    """Let what an earlier process was killed at writing not spoil the next line."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")


def read_journal(path: str) -> SweepRecord:
    """Return what the events in a journal tell, as far as its lines can be read.

    Raises:
        OSError: when it cannot be read.
    """
    record = SweepRecord()
    for event in _parsed_lines(path):
        if event is None:
            record.unreadable += 1
        else:
            record.apply(event)
    return record


def read_events(path: str) -> list[Event]:
    """Return the events of a journal. A line that is torn, or that a later version wrote, is passed over.

    Raises:
        OSError: when it cannot be read.
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
    """Return whether a value is what an event's field can hold."""
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
