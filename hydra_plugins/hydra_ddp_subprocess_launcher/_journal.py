"""The journal of a sweep: one line of JSON an event, appended as it happens, and readable whatever was killed since."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._events import EVENTS, Event
from ._records import SweepRecord

_log = logging.getLogger(__name__)


class Journal:
    """Append events to a file.

    Args:
        path: The file; None: events go nowhere.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._mended = False

    def append(self, event: Event) -> None:
        """Write an event down. One that cannot be written is said once; the sweep goes on."""
        if self._path is None:
            return
        # All ASCII, as JSON escapes the rest, such as bytes of a file name. One write: whole, or torn at its end.
        line = json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}) + "\n"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if not self._mended:
                    self._mended = True
                    _end_torn_line(descriptor)
                if os.write(descriptor, line.encode()) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning(
                "%s cannot be written: %s. `hydra-ddp` will not know what happens from now on; the jobs go on.",
                self._path,
                error.strerror or error,
            )
            self._path = None


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
    for line in _lines(path):
        event = _parse(line)
        if event is None:
            record.unreadable += 1
        else:
            record.apply(event)
    return record


def read_events(path: str) -> Iterator[Event]:
    """Yield the events of a journal. A line that is torn, or that a later version wrote, is passed over.

    Raises:
        OSError: when it cannot be read.
    """
    for line in _lines(path):
        event = _parse(line)
        if event is not None:
            yield event


def _lines(path: str) -> list[bytes]:
    return [line for line in Path(path).read_bytes().split(b"\n") if line.strip()]


def _parse(line: bytes) -> Event | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        kind = EVENTS[fields.pop("event")]
        names = {field.name for field in dataclasses.fields(kind)}
        event: Event = kind(**{name: _hashable(value) for name, value in fields.items() if name in names})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return event


def _hashable(value: Any) -> Any:
    return tuple(_hashable(part) for part in value) if isinstance(value, list) else value
