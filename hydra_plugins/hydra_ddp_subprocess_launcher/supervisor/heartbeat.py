"""Status and heartbeats that the keepers of a multi-node job exchange through files on a shared file system.

Each node appends lines to its own file and touches it regularly. NFS rereads a file that only grows at each open
(close-to-open consistency), while new names and replaced files may stay invisible for the half minute for which
directories are cached.
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

# Seconds between two heartbeats, and without one until a node counts as lost. The timeout is long, because a restart of
# the NFS server blocks all nodes for a minute and more, and because ranks usually notice a dead peer much earlier.
HEARTBEAT_INTERVAL_S = 5.0
HEARTBEAT_TIMEOUT_S = 120.0


@dataclass
class _Node:
    """State of one other node.

    Attributes:
        number: Its number.
        said: Content of its lines, by event: `here`, `failing`, `ended`.
        read: Bytes of its file read so far.
        touched: Modification time of the file on the server, in nanoseconds.
        heard_at: When `touched` was last seen to change, in monotonic seconds.
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
    """This node's view of the other nodes.

    Args:
        host: Name of this node.
        now: Monotonic seconds.

    Raises:
        OSError: if the folder cannot be written, or another process claims to be this node.
    """

    def __init__(self, rendezvous_dir: RendezvousDir, host: str, now: float) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._host = host
        self._others = [_Node(node, now) for node in range(rendezvous_dir.nnodes) if node != rendezvous_dir.node]
        self._failed_here = False
        self._beat_at = now
        self._looked_at = now
        self._own = NodeFile(rendezvous_dir, host)

    # Reports of this node

    def tell_failure(self, report: GroupReport) -> None:
        """Report, once, that the group of this node is being ended, and why."""
        if self._failed_here:
            return
        self._failed_here = True
        self._own.tell_failure(report)

    def tell_end(self, report: GroupReport) -> None:
        """Report that no process of this node's group is left."""
        self._own.tell_end(report)

    # Reports of the other nodes

    def look(self, now: float) -> None:
        """Read new reports, and send a heartbeat if it is due."""
        if now - self._looked_at > 2 * HEARTBEAT_INTERVAL_S:
            # This process was suspended or the file system did not respond, so missing heartbeats mean nothing.
            for node in self._others:
                node.heard_at = now
        self._looked_at = now
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_INTERVAL_S
            self._own.touch()
        # Also read nodes whose group has ended: they may still report a failure while they wait for the others.
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
            # A killed keeper may leave an incomplete line.
            with contextlib.suppress(ValueError):
                # A report on behalf of a killed keeper does not override the keeper's own.
                node.said = json.loads(line) | node.said

    def refresh(self) -> None:
        """Make the next look read the folder's names from the server."""
        refresh_names(self._rendezvous_dir.folder)

    @property
    def missing(self) -> list[str]:
        """Nodes that have not joined yet."""
        return [node.name for node in self._others if "here" not in node.said]

    def host_of(self, node: int) -> str:
        """Return the host name of another node, or an empty string if it has not joined yet."""
        said = next(other.said for other in self._others if other.number == node)
        return str(said.get("here", {}).get("host", ""))

    @property
    def failed(self) -> str:
        """A node whose group is being ended; empty if there is none."""
        return next((node.name for node in self._others if "failing" in node.said), "")

    @property
    def why_failed(self) -> str:
        """Detail that the `failed` node reported; may be empty."""
        return next((str(node.said["failing"]["detail"]) for node in self._others if "failing" in node.said), "")

    @property
    def ended_well(self) -> bool:
        """Whether all ranks of another node have exited by themselves without a failure."""
        return any("ended" in node.said and "failing" not in node.said for node in self._others)

    @property
    def unfinished(self) -> list[str]:
        """Nodes that joined and, as far as is known, still run processes of the job."""
        # As long as a node is missing, no node has started a rank.
        return [node.name for node in self._others if "here" in node.said and "ended" not in node.said]

    def lost(self, now: float) -> list[str]:
        """Return the nodes that joined, have not ended, and have exceeded the heartbeat timeout."""
        waiting = [node for node in self._others if "here" in node.said and "ended" not in node.said]
        return [node.name for node in waiting if now - node.heard_at > HEARTBEAT_TIMEOUT_S]

    def merge(self, own: GroupReport) -> GroupReport:
        """Return one report that combines the reports received from all nodes."""
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
        # A group whose ranks have all finished may still have been stopped because of lingering processes.
        return replace(whole, reason=next((report.reason for report in reports.values() if report.reason), None))

    def _first_failure(self, failing: dict[int, GroupReport]) -> int | None:
        first = read_first_failure(self._rendezvous_dir.folder)
        if first in failing:
            return first
        own_causes = [node for node, report in failing.items() if report.reason is not StopReason.NODE_FAILED]
        return min(own_causes or failing, default=None)

    def close(self) -> None:
        """Stop sending heartbeats."""
        self._own.close()


def refresh_names(folder: str) -> None:
    """Invalidate the cached names of a folder, which NFS may keep for half a minute."""
    with contextlib.suppress(OSError):
        # Any change of the folder, even one without effect, makes the client reread it.
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode))


# Contains the number of the node whose group failed first. Created exclusively, because node clocks differ.
_FIRST_FAILURE = "first_failure"
_GROWING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class NodeFile:
    """This node's file, which only this node writes. A node that failed to write a report sends no more heartbeats.

    Args:
        rendezvous_dir: Directory in which the other nodes read the file.
        host: Name of this node.

    Raises:
        OSError: if the folder cannot be written, or another process claims to be this node.
    """

    def __init__(self, rendezvous_dir: RendezvousDir, host: str) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._mute = False
        os.makedirs(rendezvous_dir.folder, exist_ok=True)
        self._path = path_of(rendezvous_dir.folder, rendezvous_dir.node)
        self._file = os.open(self._path, _GROWING | os.O_EXCL, 0o600)
        _add_line(self._file, self._path, "here", host=host)

    def tell_failure(self, report: GroupReport) -> None:
        """Report that the group of this node is being ended, and why."""
        with self._muted_by_errors():
            _claim_first_failure(self._rendezvous_dir)
            _add_line(self._file, self._path, "failing", **_as_json(report))

    def tell_end(self, report: GroupReport) -> None:
        """Report that no process of this node's group is left."""
        with self._muted_by_errors():
            _add_line(self._file, self._path, "ended", **_as_json(report))

    @contextlib.contextmanager
    def _muted_by_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # The other nodes then consider this one lost, and do not wait for a report that never comes.
            self._mute = True

    def touch(self) -> None:
        """Send a heartbeat."""
        if not self._mute:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def close(self) -> None:
        """Stop sending heartbeats."""
        os.close(self._file)


def report_for_keeper(rendezvous_dir: RendezvousDir, host: str, report: GroupReport) -> None:
    """Report, on behalf of a keeper that cannot (such as a killed one), that its group has failed and ended.

    Args:
        rendezvous_dir: Directory in which the other nodes read the report.
        host: Name of this node.
        report: Why the group has ended.

    Raises:
        OSError: if the folder cannot be written.
    """
    os.makedirs(rendezvous_dir.folder, exist_ok=True)
    path = path_of(rendezvous_dir.folder, rendezvous_dir.node)
    file = os.open(path, _GROWING, 0o600)
    try:
        _claim_first_failure(rendezvous_dir)
        # Terminate a line that the keeper may have left incomplete.
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
    """Return the node whose group failed first, or None if no node has reported a failure."""
    try:
        with open(os.path.join(folder, _FIRST_FAILURE), encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _as_json(report: GroupReport) -> dict[str, Any]:
    exits = [[ended.rank, ended.code, ended.after_s, ended.stopped] for ended in report.exits]
    return {**vars(report), "exits": exits, "reason": report.reason.name if report.reason is not None else None}


def report_of(facts: dict[str, Any]) -> GroupReport:
    """Return the report of a `failing` or `ended` line."""
    exits: Sequence[Sequence[Any]] = facts["exits"]
    reason = StopReason[facts["reason"]] if facts["reason"] is not None else None
    return GroupReport(**{**facts, "exits": tuple(RankExit(*one) for one in exits), "reason": reason, "hosts": ()})
