"""The spawner: a small program, started once per batch of jobs, that forks a keeper for each job.

The launching process does not fork keepers itself, because it has threads, a large memory and the user's modules, none
of which a fork should copy, and because the processes of a killed keeper are reparented to the spawner, which ends
them.

`groups.spawners` is the launching process's side. This program imports the standard library only.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common import processes, signals
from ..common.protocol import Channel, GroupReport, StopReason
from .keeper import RankForked, StartRank, exec_rank, keep_job

# `-I -S`: import nothing of the user's (PYTHONPATH, site, cwd), and start in a third of the time.
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from {package} import spawner; spawner.main(*map(int, sys.argv[2:]))"
)
# Seconds of SIGKILL after which the remaining processes of a lost keeper are given up, and between two rounds.
GIVE_UP_S = 4.0
_KILL_INTERVAL_S = 0.01
# Launcher to spawner: number of a job, with the descriptor of its keeper's socket. Spawner to launcher: that number,
# the keeper's exit code, and whether processes were left.
JOB = struct.Struct("!q")
ENDED = struct.Struct("!qi?")
# In place of the job's number: a note follows, with the exit code as its length in bytes.
NOTE = -1
# Linux's maximum number of descriptors in one message; one of them is the keeper's socket.
MAX_DESCRIPTORS = 253
# Maximum bytes of a note: as many as a socket takes at once.
_LONGEST_NOTE = 4096


def spawner_command(descriptor: int, launcher: int) -> list[str]:
    """Return the command of a spawner.

    Args:
        descriptor: Socket on which jobs arrive.
        launcher: Pid of the launching process.
    """
    bootstrap = _BOOTSTRAP.format(package=__package__)
    # `-I` ignores PYTHONUTF8, and paths must mean the same files as in the launching process.
    flags = ["-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}"]
    return [sys.executable, *flags, "-c", bootstrap, str(folder_of_package()), str(descriptor), str(launcher)]


def folder_of_package() -> Path:
    """Return the `sys.path` entry from which this package is imported."""
    return Path(__file__).resolve().parents[len((__package__ or "").split("."))]


def send_note(sock: socket.socket, note: str) -> None:
    """Send the launching process a note that does not belong to a job."""
    data = note.encode("utf-8", "replace")[:_LONGEST_NOTE]
    sock.sendall(ENDED.pack(NOTE, len(data), False) + data)


def main(descriptor: int, launcher: int) -> None:
    """Run the spawner as a program of its own.

    Args:
        descriptor: Socket on which jobs arrive.
        launcher: Pid of the launching process.
    """
    processes.name_process("ddp-spawner")
    serve(socket.socket(fileno=descriptor), launcher)


def serve(sock: socket.socket, launcher: int, start_rank: StartRank = exec_rank) -> None:
    """Fork a keeper for each job until the launcher is gone and no keeper is left.

    Args:
        sock: Socket on which jobs arrive.
        launcher: Pid of the launching process.
        start_rank: Starts a rank in a keeper.
    """
    signals.reset_signals()
    processes.become_subreaper()
    # This process may have other threads: of a library in LD_PRELOAD, or of a debugger that attaches to each process. A
    # fork copies only this thread; the C library, and code that starts Python threads, handle their locks themselves.
    processes.signal_at_parents_end(launcher, signal.SIGCONT)

    sock.set_inheritable(False)
    keepers: dict[int, _OwnedJob] = {}
    dead: list[_LostJob] = []
    # Keepers and launcher handle a stop signal that is sent to all processes of an allocation.
    heard = (signal.SIGCHLD, signal.SIGCONT, *signals.STOP_SIGNALS, *signals.FORWARDED_SIGNALS)
    with signals.recorded_signals(heard) as arrived, selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(arrived.wakeup, selectors.EVENT_READ)
        connected = True
        lost_at = math.inf
        while connected or keepers or dead:
            for key, _ in selector.select(_KILL_INTERVAL_S if dead else None if connected else GIVE_UP_S):
                if key.fileobj is sock and not _accept_job(sock, keepers, dead, launcher, start_rank):
                    connected = False
            # A process forked by the launcher may hold a copy of its socket forever.
            connected = connected and os.getppid() == launcher
            if not connected and lost_at == math.inf:
                selector.unregister(sock)
                lost_at = time.monotonic()
            if signal.SIGCONT in arrived.take() or not connected:
                # A stopped keeper could neither notice that the launcher is gone nor report its start.
                signals.send_signal(list(keepers), signal.SIGCONT)
            if time.monotonic() > lost_at + GIVE_UP_S:
                # A stuck keeper, for example one that starts a rank from a dead disk, will not end by itself.
                signals.send_signal(list(keepers), signal.SIGKILL)
            _reap_and_report(sock, keepers, dead)


@dataclass(frozen=True)
class _OwnedJob:
    """A job that has a keeper.

    Attributes:
        job: Its number.
        held: Descriptors to close when no process of it is alive.
    """

    job: int
    held: tuple[int, ...]


@dataclass(frozen=True)
class _LostJob:
    """A job whose keeper has ended.

    Attributes:
        kept: The job.
        code: Exit code of the keeper.
        until: When its remaining processes are given up, in monotonic seconds.
    """

    kept: _OwnedJob
    code: int
    until: float


def _accept_job(
    sock: socket.socket,
    keepers: dict[int, _OwnedJob],
    dead: Sequence[_LostJob],
    launcher: int,
    start_rank: StartRank = exec_rank,
) -> bool:
    """Fork a keeper for the job that waits on `sock`; return whether the launcher is still there."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(sock, JOB.size, MAX_DESCRIPTORS)
    except OSError:
        return False
    if not data:
        return False
    (job,) = JOB.unpack(data)
    if flags & socket.MSG_CTRUNC:
        # The kernel has closed the descriptors over the limit, perhaps including the keeper's socket.
        _decline(sock, job, descriptors, f"{os.strerror(errno.EMFILE)}: raise the limit (`ulimit -n`)")
        return True
    try:
        pid = os.fork()
    except OSError as error:
        _decline(sock, job, descriptors, f"no process can be made for it: {error.strerror}")
        return True
    if pid == 0:
        try:
            os.setsid()
            sock.close()
            # Locks of other jobs must become free when those jobs end, not when this one does.
            others = [*keepers.values(), *(one.kept for one in dead)]
            _close(held for other in others for held in other.held)
            with socket.socket(fileno=descriptors[0]) as own:
                _keep_job(own, launcher, descriptors[1:], start_rank)
        except RankForked:
            raise
        except BaseException:  # noqa: BLE001  (a child that returns would act as a second spawner)
            try:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        os._exit(0)
    os.close(descriptors[0])
    keepers[pid] = _OwnedJob(job, tuple(descriptors[1:]))
    return True


def _keep_job(own: socket.socket, launcher: int, held: Sequence[int], start_rank: StartRank) -> None:
    """Run a keeper; if it fails, report why. Its ranks die with it."""
    try:
        keep_job(own, launcher, held, start_rank)
    except Exception as error:
        own.setblocking(True)
        Channel(own).send(GroupReport((), StopReason.KEEPER_LOST, None, f"{type(error).__name__}: {error}"))
        raise


def _decline(sock: socket.socket, job: int, descriptors: Sequence[int], why: str) -> None:
    """Report a failed start on behalf of a keeper that could not be forked."""
    sys.stderr.write(f"job {job}: {why}\n")
    sys.stderr.flush()
    if descriptors:
        with socket.socket(fileno=descriptors[0]) as own:
            Channel(own).send(GroupReport((), StopReason.START_FAILED, 0, why))
    _close(descriptors[1:])
    try:
        sock.send(ENDED.pack(job, 0, False))
    except OSError:
        return  # The launcher is gone.


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _reap_and_report(sock: socket.socket, keepers: dict[int, _OwnedJob], dead: list[_LostJob]) -> None:
    """Reap ended keepers, kill the processes that lost keepers left, and report the jobs without any process."""
    for pid, code in processes.reap():
        kept = keepers.pop(pid, None)
        if kept is not None:
            # A keeper that exits with 0 has already ended its processes.
            patience_s = 0.0 if code == 0 else GIVE_UP_S
            dead.append(_LostJob(kept, code, time.monotonic() + patience_s))
    orphans = [pid for pid in processes.own_children() if pid not in keepers] if dead else []
    signals.send_signal(processes.descendants(orphans), signal.SIGKILL)
    for one in list(dead):
        if orphans and time.monotonic() < one.until:
            continue
        dead.remove(one)
        _close(one.kept.held)
        try:
            sock.send(ENDED.pack(one.kept.job, one.code, bool(orphans) and one.code != 0))
        except OSError:
            continue  # The launcher is gone.
