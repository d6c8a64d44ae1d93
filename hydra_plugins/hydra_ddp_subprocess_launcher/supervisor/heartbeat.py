"""What the keepers of a job that runs on several nodes tell each other, by files that all nodes see.

Each node has a file of its own, to which it adds lines and which it touches regularly. Files that only grow are read
anew from the server at each opening (NFS: close-to-open consistency), while new names and replaced files may stay
unseen for the half minute for which directories are cached.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.protocol import GroupReport, RankExit, RendezvousDir, StopReason

# Seconds between two signs of life, and without one until a node counts as lost: an NFS server that restarts keeps all
# nodes waiting for a minute and more, and dead ranks are mostly noticed by their peers long before.
HEARTBEAT_INTERVAL_S = 5.0
HEARTBEAT_TIMEOUT_S = 120.0


@dataclass
class _Node:
    """What is known about one other node.

    Attributes:
        number: Its number.
        said: Its lines by their first word.
        read: Bytes of its file that were read.
        touched: When the file was last changed, as the server has it, nanoseconds.
        heard_at: When that was last seen to change, monotonic seconds.
    """

    number: int
    heard_at: float
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: int = 0
    touched: int = 0

    @property
    def name(self) -> str:
        host = self.said.get("here", {}).get("host")
        return f"node {self.number} ({host})" if host else f"node {self.number}"


class Peers:
    """This node's view of the others.

    Args:
        host: Name of this node.
        now: Monotonic seconds.

    Raises:
        OSError: when the folder cannot be written, or another process takes itself for this node.
    """

    def __init__(self, rendezvous_dir: RendezvousDir, host: str, now: float) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._host = host
        self._others = [_Node(node, now) for node in range(rendezvous_dir.nnodes) if node != rendezvous_dir.node]
        self._failed_here = False
        self._beat_at = now
        self._looked_at = now
        self._own = NodeFile(rendezvous_dir, host)

    # What this node tells

    def tell_failure(self, report: GroupReport) -> None:
        """Tell once that the group of this node is being ended, and why."""
        if self._failed_here:
            return
        self._failed_here = True
        self._own.tell_failure(report)

    def tell_end(self, report: GroupReport) -> None:
        """Tell that no process of this node's group is left."""
        self._own.tell_end(report)

    # What the others tell

    def look(self, now: float) -> None:
        """Read what is new, and give a sign of life if it is time."""
        if now - self._looked_at > 2 * HEARTBEAT_INTERVAL_S:
            # This process could not run, or the file system not answer: then the others' silence means nothing.
            for node in self._others:
                node.heard_at = now
        self._looked_at = now
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_INTERVAL_S
            self._own.touch()
        # Also of one whose group has ended: while it waits for the others, it may have to give up.
        for node in self._others:
            with contextlib.suppress(OSError):
                self._read(node, now)

    def _read(self, node: _Node, now: float) -> None:
        with open(path_of(self._rendezvous_dir.folder, node.number), "rb") as file:
            touched = os.fstat(file.fileno()).st_mtime_ns
            file.seek(node.read)
            lines = file.read()
        if touched != node.touched:
            node.touched, node.heard_at = touched, now
        whole = lines.rfind(b"\n") + 1
        node.read += whole
        for line in lines[:whole].splitlines():
            # One that lacks its end is of a keeper that was killed.
            with contextlib.suppress(ValueError):
                # What is told in the place of a killed keeper does not change what that one has told itself.
                node.said = json.loads(line) | node.said

    def refresh(self) -> None:
        """Have the folder's names read from the server at the next look."""
        refresh_names(self._rendezvous_dir.folder)

    @property
    def missing(self) -> list[str]:
        """Nodes that have not come yet."""
        return [node.name for node in self._others if "here" not in node.said]

    def host_of(self, node: int) -> str:
        """Return the host name of another node; empty: it has not come yet."""
        said = next(other.said for other in self._others if other.number == node)
        return str(said.get("here", {}).get("host", ""))

    @property
    def failed(self) -> str:
        """A node whose group is being ended; empty: there is none."""
        return next((node.name for node in self._others if "failing" in node.said), "")

    @property
    def why_failed(self) -> str:
        """What that one told about it; may be empty."""
        return next((str(node.said["failing"]["detail"]) for node in self._others if "failing" in node.said), "")

    @property
    def ended_well(self) -> bool:
        """Whether the ranks of another node have all ended by themselves, and none of its failed."""
        return any("ended" in node.said and "failing" not in node.said for node in self._others)

    @property
    def unfinished(self) -> list[str]:
        """Nodes that came and still have processes of the job, as far as is known."""
        # Where one has not come, no node has started a rank.
        return [node.name for node in self._others if "here" in node.said and "ended" not in node.said]

    def lost(self, now: float) -> list[str]:
        """Return the nodes that came, have not ended, and have given no sign of life for too long."""
        waiting = [node for node in self._others if "here" in node.said and "ended" not in node.said]
        return [node.name for node in waiting if now - node.heard_at > HEARTBEAT_TIMEOUT_S]

    def merge(self, own: GroupReport) -> GroupReport:
        """Return one report about the groups of all nodes, as far as they have told theirs."""
        reports = {self._rendezvous_dir.node: own}
        hosts = {self._rendezvous_dir.node: self._host}
        failing = {self._rendezvous_dir.node: own} if self._failed_here else {}
        for node in self._others:
            hosts[node.number] = node.said.get("here", {}).get("host", "")
            if "ended" in node.said:
                reports[node.number] = report_of(node.said["ended"])
            if "failing" in node.said:
                failing[node.number] = report_of(node.said["failing"])
        exits = [ended for report in reports.values() for ended in report.exits]
        whole = replace(
            own,
            exits=tuple(sorted(exits, key=lambda ended: ended.after_s)),
            reason=None,
            cause=None,
            detail="",
            finished=len(reports) == len(hosts) and all(report.finished for report in reports.values()),
            left=any(report.left for report in reports.values()),
            hosts=tuple(hosts[node] for node in sorted(hosts)),
        )
        cause = self._first_failure(failing)
        if cause is not None:
            said = failing[cause]
            detail = said.detail
            if said.reason not in (StopReason.NODE_FAILED, StopReason.NODE_LOST):
                where = f"on node {cause} ({hosts[cause]})"
                detail = f"{where}: {detail}" if detail else where
            return replace(whole, reason=said.reason, cause=said.cause, detail=detail, first_node=cause)
        if len(reports) < len(hosts):
            silent = ", ".join(node.name for node in self._others if "ended" not in node.said)
            return replace(whole, reason=StopReason.NODE_LOST, detail=silent)
        # One of which every rank had finished may have been ended for what lingered.
        return replace(whole, reason=next((report.reason for report in reports.values() if report.reason), None))

    def _first_failure(self, failing: dict[int, GroupReport]) -> int | None:
        first = read_first_failure(self._rendezvous_dir.folder)
        if first in failing:
            return first
        own_causes = [node for node, report in failing.items() if report.reason is not StopReason.NODE_FAILED]
        return min(own_causes or failing, default=None)

    def close(self) -> None:
        """Give no more signs of life."""
        self._own.close()


def refresh_names(folder: str) -> None:
    """Have the names in a folder read from the server, where they may be cached for half a minute (NFS)."""
    with contextlib.suppress(OSError):
        # A change of the folder, if only in name, brings the news of all others.
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode))


# Its content is the number of the node whose group failed first. Made exclusively, as nodes have different clocks.
_FIRST_FAILURE = "first_failure"
_GROWING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class NodeFile:
    """This node's file, which it alone writes. A node that could not say how its group fares gives no sign of life.

    Args:
        meeting: Where the others read it.
        host: Name of this node.

    Raises:
        OSError: when the folder cannot be written, or another process takes itself for this node.
    """

    def __init__(self, rendezvous_dir: RendezvousDir, host: str) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._mute = False
        os.makedirs(rendezvous_dir.folder, exist_ok=True)
        self._path = path_of(rendezvous_dir.folder, rendezvous_dir.node)
        self._file = os.open(self._path, _GROWING | os.O_EXCL, 0o600)
        _add_line(self._file, self._path, "here", host=host)

    def tell_failure(self, report: GroupReport) -> None:
        """Tell that the group of this node is being ended, and why."""
        with self._muted_by_errors():
            _claim_first_failure(self._rendezvous_dir)
            _add_line(self._file, self._path, "failing", **_as_json(report))

    def tell_end(self, report: GroupReport) -> None:
        """Tell that no process of this node's group is left."""
        with self._muted_by_errors():
            _add_line(self._file, self._path, "ended", **_as_json(report))

    @contextlib.contextmanager
    def _muted_by_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # The others take it for lost, and do not wait for words that will not come.
            self._mute = True

    def touch(self) -> None:
        """Give a sign of life."""
        if not self._mute:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def close(self) -> None:
        """Give no more signs of life."""
        os.close(self._file)


def report_for_keeper(rendezvous_dir: RendezvousDir, host: str, report: GroupReport) -> None:
    """Tell in the place of a keeper that cannot, such as one that was killed, that its group has failed and ended.

    Args:
        meeting: Where the others are told.
        host: Name of this node.
        report: Why the group has ended.

    Raises:
        OSError: when the folder cannot be written.
    """
    os.makedirs(rendezvous_dir.folder, exist_ok=True)
    path = path_of(rendezvous_dir.folder, rendezvous_dir.node)
    file = os.open(path, _GROWING, 0o600)
    try:
        _claim_first_failure(rendezvous_dir)
        # What it was about to write may lack its end.
        os.write(file, b"\n")
        _add_line(file, path, "here", host=host)
        _add_line(file, path, "failing", **_as_json(report))
        _add_line(file, path, "ended", **_as_json(report))
    finally:
        os.close(file)


def path_of(folder: str, node: int) -> str:
    """Return the file of a node."""
    return os.path.join(folder, f"node_{node}.jsonl")


def _add_line(file: int, path: str, word: str, **facts: object) -> None:
    line = (json.dumps({word: facts}) + "\n").encode()
    try:
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _claim_first_failure(rendezvous_dir: RendezvousDir) -> None:
    try:
        first = os.open(os.path.join(rendezvous_dir.folder, _FIRST_FAILURE), _GROWING | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    os.write(first, str(rendezvous_dir.node).encode())
    os.close(first)


def read_first_failure(folder: str) -> int | None:
    """Return the node whose group failed first; None: none has said so."""
    try:
        with open(os.path.join(folder, _FIRST_FAILURE), encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _as_json(report: GroupReport) -> dict[str, Any]:
    exits = [[ended.rank, ended.code, ended.after_s, ended.stopped] for ended in report.exits]
    return {**vars(report), "exits": exits, "reason": report.reason.name if report.reason is not None else None}


def report_of(facts: dict[str, Any]) -> GroupReport:
    """Return the report that was told with `failing` or `ended`."""
    exits: Sequence[Sequence[Any]] = facts["exits"]
    reason = StopReason[facts["reason"]] if facts["reason"] is not None else None
    return GroupReport(**{**facts, "exits": tuple(RankExit(*one) for one in exits), "reason": reason, "hosts": ()})
