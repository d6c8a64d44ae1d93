"""Which rank failed first, and how to say it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._files import JobPaths, write_private
from ._port import is_of_spawned, says_taken
from ._signals import advice_on_exit, describe_end, describe_exit
from ._specs import OUTPUT_LOST, GroupReport, Outcome, RankExit, StopReason

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|remote process (has )?(exited|terminated)"
    r"|logs of the remote worker",
    re.IGNORECASE,
)
LOST_PEER_ADVICE = (
    "This rank lost a peer, which is seldom the cause: look at the logs of the other ranks beside this one."
)
SPAWN_ADVICE = (
    "Each rank has started processes of its own (torch.multiprocessing.spawn, Lightning's strategy=ddp_spawn), and "
    "these got in each other's way at the port of the job. The launcher starts the ranks: call the function that you "
    "spawn, or use strategy=ddp."
)
NO_TERMINAL_ADVICE = (
    "A rank has no terminal, as it writes to its log file. For the size use shutil.get_terminal_size(), which knows "
    "that of the launching process; hydra.launcher.debug=true gives rank 0 the terminal itself."
)
_SEE_STACKS = "Where each rank was, the Python stacks at the end of its log tell."
# More than what a full disk may still give to a small file.
_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """What is known about one rank's failure.

    Attributes:
        rank: The rank.
        at: When it failed, Unix time in seconds.
        summary: Type and message of its error; empty when only the exit code tells.
        traceback: May be empty.
    """

    rank: int
    at: float
    summary: str = ""
    traceback: str = ""


def root_cause(report: GroupReport, outcomes: Sequence[Outcome | None], paths: JobPaths) -> Failure | None:
    """Return the failure that came first; None when the group was ended although no rank had failed.

    The first to exit need not be the first to fail: what a failed rank cuts off from its peers can end before it.
    """
    exits = {ended.rank: ended for ended in report.exits}
    failures = []
    for rank, outcome in enumerate(outcomes):
        ended = exits.get(rank)
        error = _error_file(paths, rank)
        exited_at = report.began_at + ended.after_s if ended is not None else time.time()
        if outcome is not None and not outcome.completed:
            at = outcome.failed_at or exited_at
            failures.append(Failure(rank, at, outcome.summary, outcome.traceback))
        elif outcome is None and error is not None:
            failures.append(error)
        elif ended is not None and (not ended.reached_end or outcome is None) and not ended.stopped:
            failures.append(Failure(rank, exited_at))
    if not failures and report.cause is not None:
        return Failure(report.cause, report.began_at)
    hung = report.cause is None and report.reason is not None
    before = [failure for failure in failures if not hung or not _was_stopped(exits, failure.rank)]

    def order(failure: Failure) -> tuple[bool, bool, float]:
        # Clocks of several nodes differ: of those the one that told of a failure first has the cause.
        elsewhere = _node_of(report, failure.rank, len(outcomes)) != report.first_node
        return lost_a_peer(failure), elsewhere, failure.at

    # A rank whose peer went away often fails first: the peer is still on its way out of its `finally`.
    return min(before, key=order, default=None)


def lost_a_peer(failure: Failure) -> bool:
    """Return whether an error only says that another rank went away, by the words of gloo, NCCL and torch's store."""
    return _LOST_PEER.search(f"{failure.summary}\n{failure.traceback}") is not None


def advice_on(failure: Failure, shown: str, world_size: int) -> str:
    """Return what to do about an error of a known kind; empty: it is of none.

    Args:
        failure: The failure.
        shown: What is shown of its traceback or log.
        world_size: Number of ranks.
    """
    if f"OSError: [Errno {errno.ENOTTY}]" in shown:
        return NO_TERMINAL_ADVICE
    if world_size == 1:
        return ""
    lost = lost_a_peer(failure)
    if is_of_spawned(failure.traceback) and (lost or says_taken(failure.traceback)):
        return SPAWN_ADVICE
    return LOST_PEER_ADVICE if lost else ""


def _was_stopped(exits: Mapping[int, RankExit], rank: int) -> bool:
    return rank in exits and exits[rank].stopped


def _error_file(paths: JobPaths, rank: int) -> Failure | None:
    """Read the error that a rank stored in torchrun's format; torch's `record` writes it, too."""
    try:
        with open(paths.error(rank), encoding="utf-8") as file:
            at = os.fstat(file.fileno()).st_mtime
            message = json.load(file)["message"]
        if isinstance(message, str):
            return Failure(rank, at, message)
        # Not its own time stamp, which is in whole seconds.
        extra = message.get("extraInfo", {})
        return Failure(rank, at, str(message["message"]), str(extra.get("py_callstack", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def unusable_folder(paths: JobPaths) -> str | None:
    """Return why a job's folder cannot be used any more; None when it can."""
    if not os.path.exists(paths.payload):
        return "its files were deleted while the job ran"
    try:
        write_private(os.path.join(paths.folder, "probe"), bytes(_PROBE_BYTES))
        os.unlink(os.path.join(paths.folder, "probe"))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _node_of(report: GroupReport, rank: int, world_size: int) -> int:
    return rank * len(report.hosts) // world_size


def rank_name(report: GroupReport, rank: int, world_size: int) -> str:
    """Return how to call a rank: on several nodes with its own node."""
    if not report.hosts:
        return f"rank {rank}"
    node = _node_of(report, rank, world_size)
    return f"rank {rank} (node {node}, {report.hosts[node] or 'unknown host'})"


def describe(report: GroupReport, outcomes: Sequence[Outcome | None], failure: Failure | None) -> tuple[str, str]:
    """Return what happened, and what to do about it."""
    if failure is None:
        assert report.reason is not None
        detail = f" ({report.detail})" if report.detail else ""
        hung = report.reason in (StopReason.TIMEOUT, StopReason.EXIT_TIMEOUT)
        return f"the job was ended because {report.reason.value}{detail}", _SEE_STACKS if hung else ""
    rank = failure.rank
    name = rank_name(report, rank, len(outcomes))
    if report.reason is StopReason.START_FAILED:
        return f"{name} could not be started: {report.detail}", ""
    code, stopped = next(((ended.code, ended.stopped) for ended in report.exits if ended.rank == rank), (0, False))
    if report.reason is StopReason.FAILURE_LINGERS and rank == report.cause and code == -signal.SIGKILL:
        return (
            f"{name} failed{f': {failure.summary}' if failure.summary else ''}, and did not end until it was killed",
            f"Fix the error of {name} first. Its tear-down did not end within hydra.launcher.grace_period_s, although "
            "the other ranks had been stopped. The Python stacks at the end of its log show where it was.",
        )
    if stopped and failure.summary:
        # It had failed, but had not ended: the signal by which it did then is our own.
        return f"{name} failed: {failure.summary}", ""
    if code < 0:
        return f"{name} {describe_end(code)}", advice_on_exit(code)
    if outcomes[rank] is None and code == 0:
        return (
            f"{name} ended with exit code 0 but did not finish the job",
            "The program ended before or inside the job, for instance by os._exit(0), or never called the "
            "hydra.main function of this sweep.",
        )
    advice = "Its last output could not be written, as on a full disk." if code == OUTPUT_LOST else ""
    return f"{name} failed with {describe_exit(code)}", advice
