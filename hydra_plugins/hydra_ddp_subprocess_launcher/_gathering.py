"""The launching processes of one sweep that was started by hand on several nodes: they find and watch each other."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable

from . import _machine
from ._errors import StartError
from ._files import write_text
from ._nodes import JobEnd, JobFolder
from ._peers import Peers
from ._specs import GroupReport, Meeting, StopReason
from ._start import JobStart

_log = logging.getLogger(__name__)
# Seconds between two looks while the processes gather, until a line says who is missing, and between two such lines.
_INTERVAL_S = 0.2
_NOTE_S = 5.0
_NOTE_AGAIN_S = 60.0
# Seconds between two looks later on.
_LOOK_S = 1.0


class Gathering:
    """One sweep's launching processes.

    Args:
        folder: Of this run of the sweep alone.
        node: Number of this node.
        nnodes: Number of nodes.
    """

    def __init__(self, folder: str, node: int, nnodes: int) -> None:
        self._folder = folder
        self._peers = Peers(Meeting(folder, node, nnodes), _machine.host(), time.monotonic())
        self._looked_at = 0.0
        self._starts: dict[int, int] = {}

    @classmethod
    def gather(cls, meetings: str, node: int, nnodes: int) -> Gathering:
        """Wait until the launching processes of all nodes are there.

        Args:
            meetings: Folder on a file system that all nodes see, absolute.
            node: Number of this node.
            nnodes: Number of nodes.

        Raises:
            StartError: when the folder cannot be written.
        """
        try:
            os.makedirs(meetings, exist_ok=True)
            session = os.path.join(meetings, "session")
            if node == 0:
                return cls._call(meetings, session, nnodes)
            return cls._join(meetings, session, node, nnodes)
        except FileExistsError:
            raise StartError(
                f"Another process takes part in this sweep as node {node}: give each node a "
                "hydra.launcher.node_rank of its own."
            ) from None
        except OSError as error:
            raise StartError(
                f"The nodes of the sweep cannot meet in {meetings}: {error.strerror}: {error.filename}. Set "
                "hydra.sweep.dir to a directory that all nodes can write."
            ) from None

    @classmethod
    def _call(cls, meetings: str, session: str, nnodes: int) -> Gathering:
        name = uuid.uuid4().hex[:12]
        gathering = cls(os.path.join(meetings, name), 0, nnodes)
        calls = 0

        def call() -> bool:
            # The others tell by the growing number that this run is alive, and not what an earlier one left.
            nonlocal calls
            calls += 1
            write_text(session, f"{name} {calls}\n")
            return not gathering.missing

        _wait(call, lambda: f"Waiting for {', '.join(gathering.missing)} (hydra.launcher.nnodes={nnodes})")
        return gathering

    @classmethod
    def _join(cls, meetings: str, session: str, node: int, nnodes: int) -> Gathering:
        first = _read(session)

        def is_called() -> bool:
            JobFolder(meetings).refresh()
            nonlocal first
            now = _read(session)
            if now == first:
                return False
            called_again = now is not None and first is not None and now[0] == first[0]
            first = now
            return called_again

        _wait(is_called, lambda: f"Waiting for node 0 in {meetings}, which all nodes have to see")
        assert first is not None
        gathering = cls(os.path.join(meetings, first[0]), node, nnodes)
        _wait(
            lambda: not gathering.missing,
            lambda: f"Waiting for {', '.join(gathering.missing)} (hydra.launcher.nnodes={nnodes})",
        )
        return gathering

    @property
    def missing(self) -> list[str]:
        """Nodes that have not come yet."""
        self._peers.look(time.monotonic())
        self._peers.refresh()
        return self._peers.missing

    def job_folder(self, number: int) -> str:
        """Return the folder of a job, absolute."""
        return os.path.join(self._folder, str(number))

    @property
    def first_host(self) -> str:
        """Host name of node 0, as another node knows it."""
        return self._peers.host_of(0)

    def publish_start(self, start: JobStart) -> None:
        """Tell of a start of a job.

        Raises:
            OSError: when the folder cannot be written.
        """
        nth = self._starts.get(start.number, 0)
        self._starts[start.number] = nth + 1
        JobFolder(self.job_folder(start.number)).publish_start(str(nth), start)

    def publish_end(self, number: int, end: JobEnd) -> None:
        """Tell that a job is over. Where that cannot be written, the silence of this node will tell."""
        with contextlib.suppress(OSError):
            JobFolder(self.job_folder(number)).publish_end(end)

    def look(self) -> str:
        """Give a sign of life, and return which node has left the sweep; empty: none."""
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            self._peers.look(now)
        if self._peers.failed:
            return f"{self._peers.failed} has left the sweep"
        lost = self._peers.lost(now)
        return f"nothing has been heard of {', '.join(lost)} for long" if lost else ""

    def leave(self) -> None:
        """Tell the others that this node takes no further part."""
        self._peers.tell_failure(GroupReport((), StopReason.ORDERED, None))


def _read(session: str) -> tuple[str, str] | None:
    """Return name and number of the last call; None: there was none."""
    try:
        with open(session, encoding="utf-8") as file:
            name, calls = file.read().split()
    except (OSError, ValueError):
        return None
    return name, calls


def _wait(until: Callable[[], bool], said: Callable[[], str]) -> None:
    note_at = time.monotonic() + _NOTE_S
    while not until():
        if time.monotonic() > note_at:
            note_at = time.monotonic() + _NOTE_AGAIN_S
            _log.info("%s", said())
        time.sleep(_INTERVAL_S)
