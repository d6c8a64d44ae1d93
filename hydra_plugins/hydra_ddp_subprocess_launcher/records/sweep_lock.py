"""The sweep lock: held by one launching process at a time, and released however that process ends."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from ..common import processes

_log = logging.getLogger(__name__)
# Linux's maximum pid.
_MOST_PIDS = 1 << 22
# Seconds to keep trying, because a process that only checks the sweep lock holds it for an instant.
_TRY_S = 0.3
# Seconds to wait for the ranks of a killed launching process to end.
_END_S = 10.0
# Errors of file systems without `flock`.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a sweep lock, or held it last.

    Attributes:
        pid: Pid of the process.
        host: Its host name.
        since: When it acquired the lock, local time as text.
        start: Distinguishes the process from a later one with its pid; empty if the system does not say.
    """

    pid: int
    host: str
    since: str
    start: str = ""

    @classmethod
    def this_process(cls) -> LockOwner:
        """Return the entry for this process."""
        pid = os.getpid()
        return cls(pid, processes.host(), time.strftime("%Y-%m-%d %H:%M:%S"), processes.process_start(pid))

    @property
    def here(self) -> bool:
        """Whether the process is on this machine."""
        return self.host == processes.host()

    @property
    def may_run(self) -> bool:
        """Whether the process may still run; always True for another machine."""
        return not self.here or (processes.process_start(self.pid) == self.start and processes.is_running(self.pid))


class SweepLock:
    """The lock on a sweep directory, held by this process.

    It is released with this object, or once this process and all processes that received the descriptor have ended. A
    later sweep of the same process takes it over.

    Args:
        path: File of the sweep lock, in an existing folder.

    Attributes:
        descriptor: Descriptor of the locked file.

    Raises:
        StartError: if another process holds it; the message names that process.
        OSError: if the file cannot be used.
    """

    def __init__(self, path: str) -> None:
        # Import here: it imports Hydra, which `hydra-ddp` avoids if it can.
        from ..common.errors import StartError

        earlier = _HELD.get(os.path.realpath(path))
        if earlier is not None:
            earlier.release()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            locked = _lock(descriptor, shared=False, patience_s=_TRY_S)
            holder = read_owner(path)
            if locked is False and holder is not None and not holder.may_run:
                # The holder was killed, and its keepers are still ending its ranks.
                locked = _lock(descriptor, shared=False, patience_s=_END_S)
            # Without `flock`, the file's content is the lock, and only the named process shows whether it is stale.
            if locked is False or (locked is None and holder is not None and holder.may_run and not _is_own(holder)):
                raise StartError(_refusal(path, holder, by_file=locked is None))
            if locked is None:
                _log.warning(
                    "The file system of %s has no locks: a second sweep in that directory is only known by the process "
                    "that is named in this file. Start none from another machine.",
                    path,
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(LockOwner.this_process())).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self._release = weakref.finalize(self, _let_go, descriptor, os.getpid())
        _HELD[os.path.realpath(path)] = self

    def release(self) -> None:
        """Release the lock."""
        self._release()


# Sweep locks of this process, by real path.
_HELD: weakref.WeakValueDictionary[str, SweepLock] = weakref.WeakValueDictionary()


def _let_go(descriptor: int, pid: int) -> None:
    with contextlib.suppress(OSError):
        # A fork must not clear the entry of its parent.
        if os.getpid() == pid:
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _close_in_child() -> None:
    # A copy in a process that the program forks would keep the lock after the launching process has ended.
    for claim in list(_HELD.values()):
        claim.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _lock(descriptor: int, *, shared: bool, patience_s: float) -> bool | None:
    """Lock an open file; return False if another process holds it, None if the file system has no locks."""
    import fcntl  # Missing on Windows, where this module must still be importable.

    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        else:
            return True


def _is_own(holder: LockOwner) -> bool:
    return holder.here and holder.pid == os.getpid()


def _refusal(path: str, holder: LockOwner | None, *, by_file: bool) -> str:
    sweep_dir = os.path.dirname(os.path.dirname(path))
    who = "another process" if holder is None else f"process {holder.pid} on {holder.host}, since {holder.since}"
    wrong = f", or delete {path} if that process is gone" if by_file else ""
    return (
        f"The sweep directory {sweep_dir} is in use by {who}. Two sweeps in it would overwrite each other's jobs. Wait "
        f"until it ends (`hydra-ddp status -d {sweep_dir}`), or choose another hydra.sweep.dir{wrong}."
    )


def read_owner(path: str) -> LockOwner | None:
    """Return the process that holds a sweep lock, or was killed while holding it; None if there is none or unknown."""
    try:
        holder = LockOwner(**json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (holder.host, holder.since, holder.start)
    good = type(holder.pid) is int and 0 < holder.pid < _MOST_PIDS and all(isinstance(text, str) for text in texts)
    return holder if good else None


def live_owner(path: str) -> LockOwner | None:
    """Return the process that holds a sweep lock now, or None.

    Raises:
        OSError: if the file cannot be read.
    """
    holder = read_owner(path)
    if holder is None:
        return None
    # Read-only, because the directory may belong to another user.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        locked = _lock(descriptor, shared=True, patience_s=0)
    finally:
        os.close(descriptor)
    return holder if locked is False or (locked is None and holder.may_run) else None
