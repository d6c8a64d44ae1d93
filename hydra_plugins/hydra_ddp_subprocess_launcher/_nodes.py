"""What the first node of a job on several tells the others, and whoever waits for the job, through files."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass

from . import _machine, _node_file, _peers
from ._files import read_own_pickle, write_private
from ._specs import GroupReport, Meeting, StopReason
from ._start import JobStart

_START = "start_"


@dataclass(frozen=True)
class JobEnd:
    """The end of a job.

    Attributes:
        completed: Whether it completed.
        cause: Why it did not, one line; empty when it did.
        start: Its last start; None: it was not started.
        report: What the keepers reported of that; None: it was not started, or its keeper was lost.
    """

    completed: bool
    cause: str = ""
    start: JobStart | None = None
    report: GroupReport | None = None


@dataclass(frozen=True)
class StartFile:
    """A file that tells of a start. One that is equal need not be read again.

    Attributes:
        path: Absolute.
        inode: Of the file, as it may be replaced.
        changed_at: Nanoseconds, by the file server's clock.
        size: In bytes.
    """

    path: str
    inode: int
    changed_at: int
    size: int

    def read(self) -> JobStart | None:
        """Return the start; None: the file cannot be read."""
        return _read_start(self.path)


def _read_start(path: str) -> JobStart | None:
    start = read_own_pickle(path)
    return start if isinstance(start, JobStart) else None


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job, on a file system that all its nodes see.

    Attributes:
        path: Absolute.
    """

    path: str

    def publish_start(self, key: str, start: JobStart) -> None:
        """Tell of a start.

        Args:
            key: Which one it is, so that nobody takes an earlier one for it.
            start: The start.

        Raises:
            OSError: when the folder cannot be written.
        """
        os.makedirs(start.meeting or self.path, exist_ok=True)
        write_private(self._start(key), pickle.dumps(start))

    def read_start(self, key: str) -> JobStart | None:
        """Return a start; None: it is not known yet."""
        return _read_start(self._start(key))

    @property
    def starts(self) -> int:
        """How many starts were told of."""
        try:
            return sum(name.startswith(_START) for name in os.listdir(self.path))
        except OSError:
            return 0

    def find_last_start(self) -> StartFile | None:
        """Return the file that told of a start last; None: none is known yet."""
        self.refresh()
        try:
            entries = [entry for entry in os.scandir(self.path) if entry.name.startswith(_START)]
            files = [(entry.path, entry.stat()) for entry in entries]
        except OSError:
            return None
        found = (StartFile(path, now.st_ino, now.st_mtime_ns, now.st_size) for path, now in files)
        return max(found, key=lambda file: file.changed_at, default=None)

    def _start(self, key: str) -> str:
        return os.path.join(self.path, f"{_START}{key}.pkl")

    def publish_end(self, end: JobEnd) -> None:
        """Tell that the job is over.

        Raises:
            OSError: when the folder cannot be written.
        """
        os.makedirs(self.path, exist_ok=True)
        write_private(self._end, pickle.dumps(end))

    def read_end(self) -> JobEnd | None:
        """Return the end; None: it is not known yet."""
        end = read_own_pickle(self._end)
        return end if isinstance(end, JobEnd) else None

    @property
    def _end(self) -> str:
        return os.path.join(self.path, "end.pkl")

    def refresh(self) -> None:
        """Have names in the folder read from the server, where they may be cached for half a minute (NFS)."""
        _peers.refresh_names(self.path)


def tell_for_keeper(start: JobStart, node: int, report: GroupReport | None) -> None:
    """Tell a job's other nodes that this one's group has ended, where its keeper could not meet theirs, or was killed.

    Where that cannot be written either, they are left to the silence of this node.

    Args:
        start: The start of the job.
        node: Number of this node.
        report: What its keeper reported; None: nothing, as it was killed.
    """
    if not start.meeting or (report is not None and report.hosts):
        return
    meeting = Meeting(start.meeting, node, start.group.nnodes)
    with contextlib.suppress(OSError):
        _node_file.tell_for_keeper(meeting, _machine.host(), report or GroupReport((), StopReason.KEEPER_LOST, None))
