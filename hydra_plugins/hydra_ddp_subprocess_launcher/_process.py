"""What is particular to an operating system: sessions, signals, reaping, descendants, prctl. Linux is tested.

The spawner and the keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# From Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
FORWARDED_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def unsupported_reason() -> str | None:
    """Return why ranks cannot be launched on this system; None where they can."""
    if os.name != "posix":
        return "ddp_subprocess starts ranks by fork and signals, which Windows does not have. Use Linux (WSL 2 works)."
    return None


def _prctl(option: int, argument: int | bytes) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def become_subreaper() -> None:
    """Make this process the one to which descendants without a parent are handed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the short name (at most 15 bytes) that `top` and `ps -o comm` show."""
    _prctl(_PR_SET_NAME, name.encode())


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the parent's calling thread ends; end now if it has ended before the request.

    Args:
        parent: Pid of the process that forked this one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def thread_count() -> int:
    """Return the number of OS threads of this process; 1 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def reset_signals() -> None:
    """Forget handlers and mask that a fork or an exec handed down. Ignored signals (`nohup`) stay ignored."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (*STOP_SIGNALS, signal.SIGCHLD, *FORWARDED_SIGNALS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def start_rank(argv: Sequence[str], cwd: str, environment: Mapping[str, str], log_file: str) -> subprocess.Popen[bytes]:
    """Start one rank: own session, no stdin, output to its log, SIGKILL when this process dies.

    Raises:
        OSError: when the log cannot be opened, or the command or `cwd` cannot be used.
    """
    parent = os.getpid()
    with open(log_file, "ab", buffering=0) as log:
        return subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  (a keeper has one thread)
        )


def reap() -> Iterator[tuple[int, int]]:
    """Collect every child that has ended, adopted ones too.

    Yields:
        Pid and exit code; a signal as its negative number.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def has_children() -> bool:
    """Return whether this process has a child, running or ended, that was not reaped."""
    if not hasattr(os, "waitid"):
        return bool(own_children())
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(roots: Sequence[int]) -> list[int]:
    """Return the processes below `roots`, roots included, parents before children."""
    children = _child_lookup()
    found, queue = [], list(roots)
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue.extend(children(pid))
    return found


def _child_lookup() -> Callable[[int], list[int]]:
    # A kernel may be built without these files; then every process is looked at.
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _listed_children
    below: dict[int, list[int]] = {}
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    for line in table.splitlines():
        pid, parent = map(int, line.split())
        below.setdefault(parent, []).append(pid)
    return lambda pid: below.get(pid, [])


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    except OSError:
        pass  # It ended while we looked; its children are then handed to a subreaper above it.
    return found


def own_children() -> list[int]:
    """Return the pids of this process's children, ended ones that were not reaped included."""
    return _child_lookup()(os.getpid())


def send_signal(pids: Sequence[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def parent_watch(pid: int) -> int | None:
    """Return a descriptor that becomes readable when process `pid` ends; None where the system has none.

    A socket to that process is not enough to see it die: whatever it forked holds a copy.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def describe_exit(code: int) -> str:
    """Say an exit code in words: `exit code 3`, `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"signal {-code} ({name})"


class RecordedSignals:
    """Signals that arrived, in order, for an event loop to act on.

    Attributes:
        wakeup: Descriptor that becomes readable when one arrives.
    """

    def __init__(self) -> None:
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._arrived: list[int] = []

    def record(self, number: int, _frame: object) -> None:
        """Be the handler."""
        self._arrived.append(number)

    def take(self) -> list[int]:
        """Return and forget what arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 512):
                pass
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Close both ends of the wake-up pipe."""
        os.close(self.wakeup)
        os.close(self._write)

    @property
    def write_end(self) -> int:
        """Descriptor for `signal.set_wakeup_fd`."""
        return self._write


@contextlib.contextmanager
def recorded_signals(numbers: Sequence[int]) -> Iterator[RecordedSignals]:
    """Record the signals while the block runs, then put the earlier handlers back.

    Outside the main thread, where Python allows no handlers, nothing is recorded. A signal that is ignored stays
    ignored: `nohup` and a shell's `&` mean it.
    """
    recorder = RecordedSignals()
    earlier: dict[int, Callable[..., object] | int | None] = {}
    wakeup = None
    try:
        wakeup = signal.set_wakeup_fd(recorder.write_end, warn_on_full_buffer=False)
    except ValueError:
        numbers = ()
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                earlier[number] = signal.signal(number, recorder.record)
        yield recorder
    finally:
        for number, handler in earlier.items():
            # A handler that C code had set is not ours to restore: Python reports it as None.
            if handler is not None:
                signal.signal(number, handler)
        if wakeup is not None:
            signal.set_wakeup_fd(wakeup)
        recorder.close()


def usable_cores() -> int:
    """Return the processor cores this process may use, by affinity and cgroup quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores() or cores))


def _cgroup_cores() -> int | None:
    # cgroup v2 puts quota and period into one file, v1 into two; microseconds both.
    with contextlib.suppress(OSError, ValueError):
        group = next(
            line.split("::", 1)[1] for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line
        )
        quota, period = Path(f"/sys/fs/cgroup{group}/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota_us < 0 else max(1, quota_us // int((folder / "cpu.cfs_period_us").read_text()))
    return None


def start_environment() -> Mapping[str, str] | None:
    """Return the environment with which this process was started; None where the system does not tell."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.split(b"=", 1) for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
