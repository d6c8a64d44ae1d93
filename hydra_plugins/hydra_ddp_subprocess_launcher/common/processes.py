"""Processes and the machine: start, name, find, watch and reap processes; cores, host name and start environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .protocol import RankOptions, RankSpec
from .signals import send_signal

# From Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int | bytes) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def become_subreaper() -> None:
    """Make this process the one to which orphaned descendants are reparented."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the short name (at most 15 bytes) that `top` and `ps -o comm` show."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, name.encode())


def signal_at_parents_end(parent: int, number: int) -> None:
    """Request this signal for when the parent's forking thread ends; send it now if the parent has already ended.

    Args:
        parent: Pid of the process that forked this one.
        number: The signal.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def thread_count() -> int:
    """Return the number of OS threads of this process, or 1 if the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def start_rank(spec: RankSpec) -> subprocess.Popen[bytes]:
    """Start one rank in its own session, with output to its log and SIGKILL if this process dies.

    Raises:
        OSError: if the log cannot be opened, or the command or `cwd` cannot be used.
    """
    parent = os.getpid()

    def before_exec() -> None:
        set_up_rank(spec.options)
        signal_at_parents_end(parent, signal.SIGKILL)

    with open(spec.log_file, "ab", buffering=0) as log:
        stdin, stdout, stderr = spec.terminal or (subprocess.DEVNULL, log, log)
        if spec.terminal:
            log.write(b"The output of this rank went to the terminal (hydra.launcher.debug=true).\n")
        return subprocess.Popen(
            list(spec.argv),
            cwd=spec.cwd,
            env=dict(spec.environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=spec.held,
            preexec_fn=before_exec,  # noqa: PLW1509  (a keeper has one thread)
        )


def set_up_rank(options: RankOptions) -> None:
    """Apply the options to this process, a rank whose program is about to start."""
    for number in options.ignored_signals:
        signal.signal(number, signal.SIG_IGN)


def reap() -> Iterator[tuple[int, int]]:
    """Reap all ended children, including adopted ones.

    Yields:
        Pid and exit code; the negative number of a signal.
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
    """Return whether this process has an unreaped child, running or ended."""
    if not hasattr(os, "waitid"):
        return bool(own_children())
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(roots: Sequence[int]) -> list[int]:
    """Return `roots` and all their descendants, parents before children."""
    children = _child_lookup()
    found, queue = [], list(roots)
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue.extend(children(pid))
    return found


def topmost(roots: Sequence[int], wanted: Callable[[int], bool]) -> list[int]:
    """Return the wanted processes among `roots` and their descendants that have no wanted ancestor there."""
    children = _child_lookup()
    found, queue = [], list(roots)
    while queue:
        pid = queue.pop(0)
        if wanted(pid):
            found.append(pid)
        else:
            queue.extend(children(pid))
    return found


def can_list_children() -> bool:
    """Return whether the system can list the children of a process."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        # If /proc belongs to another pid namespace, its pids mean other processes.
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _child_lookup() -> Callable[[int], list[int]]:
    # A kernel may be built without these files; then build the tree from all processes.
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _listed_children
    below: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        below.setdefault(parent, []).append(pid)
    return lambda pid: below.get(pid, [])


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    if not sys.platform.startswith("linux"):
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return dict(map(int, line.split()) for line in table.splitlines())
    # Without `ps`, which many containers lack.
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                found[int(entry)] = int(_stat_fields(int(entry))[1])
    return found


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on, after the name, which may contain any character."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    except OSError:
        pass  # It has ended meanwhile; its children are reparented to a subreaper above it.
    return found


def own_children() -> list[int]:
    """Return the pids of this process's children, including unreaped ended ones."""
    return _child_lookup()(os.getpid())


def name_of(pid: int) -> str:
    """Return the name of a process as `ps` shows it, with the script of an interpreter; "process" if unknown."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "process"
    return " ".join([name, *(os.fsdecode(os.path.basename(part)) for part in command[1:2] if part.endswith(b".py"))])


def kill_marked(marks: Mapping[str, str], within_s: float) -> list[int]:
    """Send SIGKILL to this user's processes that have these variables in their environment, and return what is left.

    A last resort, because a process may have cleared its environment.

    Args:
        marks: The variables with their values.
        within_s: Seconds after which to give up.
    """
    needles = {os.fsencode(f"{name}={value}") for name, value in marks.items()}
    deadline = time.monotonic() + within_s
    while found := [pid for pid in _all_pids() if needles.issubset(_environment_of(pid))]:
        if time.monotonic() > deadline:
            break
        send_signal(found, signal.SIGKILL)
        time.sleep(0.01)
    return found


def _all_pids() -> list[int]:
    try:
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    except OSError:
        return []


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # It has ended, or belongs to another user.


def parent_watch(pid: int) -> int | None:
    """Return a descriptor that becomes readable when process `pid` ends, or None if the system has none.

    A socket to that process does not suffice, because processes that it forked may hold a copy.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class ProcessHandle:
    """Handle of another process, safe against reuse of its pid by a later process.

    Args:
        pid: Its pid; the process must be known to run.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = parent_watch(pid)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._descriptor is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self._descriptor, number)

    @property
    def ended(self) -> bool:
        """Whether the process has ended, reaped or not; False if the system does not say."""
        if self._descriptor is None:
            return False
        watch = select.poll()
        watch.register(self._descriptor, select.POLLIN)
        return bool(watch.poll(0))

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by a signal (not by a debugger); False if the system does not say."""
        try:
            return _stat_fields(self._pid)[0] == "T"
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def unsupported_reason() -> str | None:
    """Return why ranks cannot be launched on this system, or None if they can."""
    if os.name != "posix":
        return "ddp_subprocess starts ranks by fork and signals, which Windows does not have. Use Linux (WSL 2 works)."
    if not can_list_children():
        return (
            "ddp_subprocess cannot see which processes a job starts, so it could not end them: /proc is not mounted, "
            "or belongs to another PID namespace. Mount it (`mount -t proc proc /proc`; `unshare --mount-proc`), or "
            "use hydra/launcher=basic."
        )
    return None


def usable_cores() -> int:
    """Return the number of cores that affinity, cgroup quota and SLURM allow this process; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    # Not every SLURM setup binds a job to its allocated cores.
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return max(1, min(cores, _cgroup_cores() or cores, int(allocated) if allocated.isdecimal() else cores))


def _cgroup_cores() -> int | None:
    # cgroup v2 has quota and period in one file, v1 in two; both in microseconds.
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


# The start environment of a process that was forked instead of started as a new interpreter; else empty.
_forked_with: list[Mapping[str, str]] = []


def forked_with(environment: Mapping[str, str]) -> None:
    """Record the environment with which a new interpreter would have been started."""
    _forked_with[:] = [dict(environment)]


def start_environment() -> Mapping[str, str] | None:
    """Return the environment with which this process was started, or None if the system does not say."""
    if _forked_with:
        return _forked_with[0]
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.split(b"=", 1) for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def terminal_size() -> os.terminal_size | None:
    """Return the size of the terminal on stdout, or None if stdout is not a terminal."""
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()) if sys.__stdout__ is not None else None
    except (OSError, ValueError):  # Not a terminal; closed.
        return None


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def process_start(pid: int) -> str:
    """Return boot id and start time, which distinguish a process from a later one with its pid; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""
    return f"{boot} {ticks}"


def is_running(pid: int) -> bool:
    """Return whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It belongs to another user.
    return True
