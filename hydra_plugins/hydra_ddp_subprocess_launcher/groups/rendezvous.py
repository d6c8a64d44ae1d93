"""The rendezvous of a job's nodes: they find and watch each other through files, and exchange messages."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from .. import __version__
from ..common import processes
from ..common.errors import LauncherError, StartError
from ..common.files import dump, read_stored, write_private, write_text
from ..common.protocol import GroupReport, JobEnd, LaunchSpec, RendezvousDir, StopReason
from ..common.signals import STOP_SIGNALS, RepeatedSignal
from ..common.text import pluralize
from ..supervisor import heartbeat
from ..supervisor.heartbeat import HEARTBEAT_INTERVAL_S, Peers, refresh_names

_log = logging.getLogger(__name__)
# Seconds between two checks while nodes join, until the first log line about missing nodes, and between two such lines.
_INTERVAL_S = 0.2
_NOTE_S = 5.0
_NOTE_AGAIN_S = 60.0
# Seconds between two checks after all nodes have joined.
_LOOK_S = 1.0
_NNODES = "hydra.launcher.nnodes"


class Rendezvous:
    """The rendezvous of a sweep on one node, which does nothing."""

    def job_dir(self, number: int) -> str:
        """Return the rendezvous directory of a job, absolute, or an empty string if the job has one node."""
        return ""

    def check(self) -> str:
        """Return which node has left the sweep and why, or an empty string."""
        return ""

    def publish_start(self, spec: LaunchSpec) -> None:
        """Publish a start, so that the other nodes start the job, too.

        Raises:
            OSError: if the directory cannot be written.
            StartError: if one of them has left.
        """

    def publish_end(self, number: int, end: JobEnd) -> None:
        """Publish the end of a job to the other nodes."""

    def observe(self, report: GroupReport | None) -> None:
        """Take over what the keepers of a job have reported about another node."""

    def leave(self, why: str = "") -> None:
        """Report to the other nodes that this one leaves."""


class NodeRendezvous(Rendezvous):
    """The rendezvous of the launching processes of one sweep on several nodes.

    Args:
        folder: Folder of this run of the sweep only.
        node: Number of this node.
        arrive_s: Seconds after which a node that has not joined counts as departed.
    """

    def __init__(self, folder: str, node: int, nnodes: int, arrive_s: float = math.inf) -> None:
        self._folder = folder
        self._arrive_by = time.monotonic() + arrive_s
        self._pid = os.getpid()
        self._node = node
        self._nnodes = nnodes
        self._peers = Peers(RendezvousDir(folder, node, nnodes), processes.host(), time.monotonic())
        self._looked_at = 0.0
        self._called_at = 0.0
        self._departed = ""
        self._starts: dict[int, int] = {}
        # Announces this run to joining nodes; only the first node does so.
        self._call: Callable[[], None] = lambda: None

    @classmethod
    def join(cls, rendezvous_root: str, node: int, nnodes: int) -> NodeRendezvous:
        """Wait until the launching processes of all nodes have joined.

        Args:
            rendezvous_root: Folder on a file system that all nodes share, absolute.
            node: Number of this node.

        Raises:
            StartError: if the nodes cannot join, or one of them leaves before all have joined.
        """
        session = os.path.join(rendezvous_root, "session")
        try:
            os.makedirs(rendezvous_root, exist_ok=True)
            name = uuid.uuid4().hex[:12] if node == 0 else _wait_for_call(rendezvous_root, session, nnodes)
            gathering = cls(os.path.join(rendezvous_root, name), node, nnodes)
            if node == 0:
                gathering._call = _caller(session, name, nnodes)
            gathering._wait_for_all()
        except FileExistsError:
            raise StartError(
                f"Another process takes part in this sweep as node {node}, or has done so. Give each node a "
                "hydra.launcher.node_rank of its own, and start all of them again once one has gone."
            ) from None
        except OSError as error:
            raise StartError(
                f"The nodes of the sweep cannot meet in {rendezvous_root}: {error.strerror}: {error.filename}. Set "
                "hydra.sweep.dir to a directory that all nodes can write."
            ) from None
        return gathering

    def _wait_for_all(self) -> None:
        # Leave at any exit of the process, also between two batches.
        atexit.register(self.leave, "its process has ended")
        try:
            _wait(self._all_are_here, lambda: f"Waiting for {', '.join(self.missing)} ({_NNODES}={self._nnodes})")
        except BaseException as error:
            self.leave(why_it_ends(error))
            raise

    def _all_are_here(self) -> bool:
        self._call()
        if not self.missing:
            return True
        if departed := self.check():
            raise StartError(f"The sweep cannot begin: {departed}.")
        return False

    @property
    def missing(self) -> list[str]:
        """Nodes that have not joined yet."""
        self._peers.look(time.monotonic())
        self._peers.refresh()
        return self._peers.missing

    def job_dir(self, number: int) -> str:
        """Return the rendezvous directory of a job, absolute."""
        return os.path.join(self._folder, str(number))

    @property
    def first_host(self) -> str:
        """Host name of node 0, as node 0 has published it."""
        return self._peers.host_of(0)

    def publish_start(self, spec: LaunchSpec) -> None:
        """Publish a start, so that the other nodes start the job, too.

        Raises:
            OSError: if the directory cannot be written.
            StartError: if one of them has left.
        """
        if departed := self.check():
            raise StartError(f"It runs on {pluralize(spec.nnodes, 'node')}, but {departed}.")
        nth = self._starts.get(spec.number, 0)
        self._starts[spec.number] = nth + 1
        JobFolder(self.job_dir(spec.number)).publish_start(str(nth), spec)

    def publish_end(self, number: int, end: JobEnd) -> None:
        """Publish the end of a job. If that fails, this node leaves, as the others would wait forever."""
        try:
            JobFolder(self.job_dir(number)).publish_end(end)
        except OSError as error:
            self._departed = f"the other nodes cannot be told of the end of job {number}: {error.strerror}"
            self.leave(self._departed)

    def observe(self, report: GroupReport | None) -> None:
        """Record that a node has left, if keepers have reported that."""
        if report is None or report.first_node in (None, self._node) or self._departed:
            return
        if report.reason is StopReason.LAUNCHER_LOST:
            self._departed = f"{StopReason.LAUNCHER_LOST.value} {report.detail}"
        elif report.reason is StopReason.ORDERED and self._node == 0:
            # Only the first node can order a stop without leaving.
            self._departed = f"a node was stopped ({report.detail})"

    def check(self) -> str:
        """Send a heartbeat, and return which node has left the sweep and why, or an empty string."""
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            self._peers.look(now)
        if now >= self._called_at + HEARTBEAT_INTERVAL_S:
            # Keep announcing the run, as a node that joins too late would wait forever without it.
            self._called_at = now
            with contextlib.suppress(OSError):
                self._call()
        if not self._departed and self._peers.failed:
            why = self._peers.why_failed
            self._departed = f"{self._peers.failed} has left the sweep{f' ({why})' if why else ''}"
        if not self._departed and (lost := self._peers.lost(now)):
            self._departed = f"nothing has been heard of {', '.join(lost)} for long"
        if not self._departed and now > self._arrive_by:
            self._peers.refresh()
            self._peers.look(now)
            self._departed = f"{missing} has not come" if (missing := ", ".join(self._peers.missing)) else ""
            self._arrive_by = math.inf
        return self._departed

    def leave(self, why: str = "") -> None:
        """Report to the other nodes that this one leaves."""
        # A process that the user's program forked also runs this at exit, and must not leave.
        if os.getpid() == self._pid:
            self._peers.tell_failure(GroupReport((), StopReason.ORDERED, None, " ".join(why.split()).rstrip(".")))


def why_it_ends(error: BaseException) -> str:
    """Describe to the other nodes why this process leaves the sweep."""
    if isinstance(error, LauncherError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return signal.Signals(error.number if isinstance(error, RepeatedSignal) else signal.SIGINT).name
    stopped_by = {128 + number: signal.Signals(number).name for number in STOP_SIGNALS}
    if isinstance(error, SystemExit) and error.code in stopped_by:
        return stopped_by[error.code]
    return f"{type(error).__name__}: {error}"


def _caller(session: str, name: str, nnodes: int) -> Callable[[], None]:
    """Return a function that announces this run of a sweep to joining nodes."""
    calls, alike = itertools.count(1), f"{nnodes} {__version__}"

    def call() -> None:
        # The growing number shows that this is not a leftover of an earlier run.
        write_text(session, f"{name} {next(calls)} {alike}\n")

    return call


def _wait_for_call(rendezvous_root: str, session: str, nnodes: int) -> str:
    """Wait for the first node, and return the name of the run that it announces."""
    last = _read(session)

    def is_called() -> bool:
        nonlocal last
        refresh_names(rendezvous_root)
        before, last = last, _read(session)
        return None not in (before, last) and last != before and last[0] == before[0]  # type: ignore[index]

    _wait(is_called, lambda: f"Waiting for node 0 in {rendezvous_root}, which all nodes have to see")
    assert last is not None
    if int(last[2]) != nnodes:
        raise StartError(
            f"{_NNODES}={nnodes} here, but {last[2]} at node 0. Start all nodes with the same command but for "
            "hydra.launcher.node_rank."
        )
    if last[3] != __version__:
        raise StartError(f"Version {__version__} of the launcher is here, but {last[3]} at node 0. Install one on all.")
    if os.stat(session).st_uid != os.getuid():
        raise StartError(
            f"{session} is another user's. Run all nodes as one user, whom all of them know by one number."
        )
    return last[0]


def _read(session: str) -> tuple[str, str, str, str] | None:
    """Return run name, count, number of nodes and version of the last announcement, or None."""
    try:
        with open(session, encoding="utf-8") as file:
            name, calls, nnodes, version = file.read().split()
    except (OSError, ValueError):
        return None
    return name, calls, nnodes, version


def _wait(until: Callable[[], bool], said: Callable[[], str]) -> None:
    note_at = time.monotonic() + _NOTE_S
    while not until():
        if time.monotonic() > note_at:
            note_at = time.monotonic() + _NOTE_AGAIN_S
            _log.info("%s", said())
        time.sleep(_INTERVAL_S)


_START = "start_"


@dataclass(frozen=True)
class StartFile:
    """A file with a start. If it is equal to an earlier one, it need not be read again.

    Attributes:
        path: Absolute path.
        inode: Inode of the file, as it may be replaced.
        changed_at: Modification time in nanoseconds, by the file server's clock.
        size: Size in bytes.
    """

    path: str
    inode: int
    changed_at: int
    size: int

    def read(self) -> LaunchSpec | None:
        """Return the start, or None if the file cannot be read."""
        return _read_start(self.path)


def _read_start(path: str) -> LaunchSpec | None:
    spec = read_stored(path)
    return spec if isinstance(spec, LaunchSpec) else None


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job, on a file system that all its nodes share.

    Attributes:
        path: Absolute path.
    """

    path: str

    def publish_start(self, key: str, spec: LaunchSpec) -> None:
        """Publish a start.

        Args:
            key: Identifies the start, so that no node mistakes an earlier one for it.

        Raises:
            OSError: if the folder cannot be written.
        """
        os.makedirs(spec.rendezvous_dir or self.path, exist_ok=True)
        write_private(self._start(key), dump(spec))

    def read_start(self, key: str) -> LaunchSpec | None:
        """Return a start, or None if it is not published yet."""
        return _read_start(self._start(key))

    @property
    def starts(self) -> int:
        """Number of published starts."""
        try:
            return sum(name.startswith(_START) for name in os.listdir(self.path))
        except OSError:
            return 0

    def find_last_start(self) -> StartFile | None:
        """Return the file with the latest start, or None if no start is published yet."""
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
        """Publish the end of the job.

        Raises:
            OSError: if the folder cannot be written.
        """
        os.makedirs(self.path, exist_ok=True)
        write_private(self._end, dump(end))

    def read_end(self) -> JobEnd | None:
        """Return the end, or None if it is not published yet."""
        end = read_stored(self._end)
        return end if isinstance(end, JobEnd) else None

    @property
    def _end(self) -> str:
        return os.path.join(self.path, "end.pkl")

    def refresh(self) -> None:
        """Reread the names in the folder from the server, as NFS may cache them for half a minute."""
        heartbeat.refresh_names(self.path)


def report_for_keeper(spec: LaunchSpec, node: int, report: GroupReport | None) -> None:
    """Report to a job's other nodes that this node's group has ended, if its keeper could not join or was killed.

    If that cannot be written either, the other nodes detect the end by the missing heartbeat.

    Args:
        spec: The start of the job.
        node: Number of this node.
        report: The keeper's report, or None if it was killed.
    """
    if not spec.rendezvous_dir or (report is not None and report.hosts):
        return
    rendezvous_dir = RendezvousDir(spec.rendezvous_dir, node, spec.nnodes)
    with contextlib.suppress(OSError):
        heartbeat.report_for_keeper(
            rendezvous_dir, processes.host(), report or GroupReport((), StopReason.KEEPER_LOST, None)
        )
