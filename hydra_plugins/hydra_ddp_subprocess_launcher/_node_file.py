"""The file by which one node of a job tells the others how its group fares: a line of JSON a word, and a touch a beat.

Keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ._specs import GroupReport, Meeting, RankExit, StopReason

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

    def __init__(self, meeting: Meeting, host: str) -> None:
        self._meeting = meeting
        self._mute = False
        os.makedirs(meeting.folder, exist_ok=True)
        self._path = path_of(meeting.folder, meeting.node)
        self._file = os.open(self._path, _GROWING | os.O_EXCL, 0o600)
        _add_line(self._file, self._path, "here", host=host)

    def tell_failure(self, report: GroupReport) -> None:
        """Tell that the group of this node is being ended, and why."""
        with self._muted_by_errors():
            _claim_first_failure(self._meeting)
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


def tell_for_keeper(meeting: Meeting, host: str, report: GroupReport) -> None:
    """Tell in the place of a keeper that cannot, such as one that was killed, that its group has failed and ended.

    Args:
        meeting: Where the others are told.
        host: Name of this node.
        report: Why the group has ended.

    Raises:
        OSError: when the folder cannot be written.
    """
    os.makedirs(meeting.folder, exist_ok=True)
    path = path_of(meeting.folder, meeting.node)
    file = os.open(path, _GROWING, 0o600)
    try:
        _claim_first_failure(meeting)
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


def _claim_first_failure(meeting: Meeting) -> None:
    try:
        first = os.open(os.path.join(meeting.folder, _FIRST_FAILURE), _GROWING | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    os.write(first, str(meeting.node).encode())
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
