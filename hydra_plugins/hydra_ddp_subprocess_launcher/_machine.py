"""What the machine tells: its system and name, this process's cores and first environment, and other processes."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from ._process import can_list_children


def unsupported_reason() -> str | None:
    """Return why ranks cannot be launched on this system; None where they can."""
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
    """Return the processor cores this process may use, by affinity, cgroup quota and SLURM's word; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    # Not every SLURM binds a job to the cores that it has.
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return max(1, min(cores, _cgroup_cores() or cores, int(allocated) if allocated.isdecimal() else cores))


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


def terminal_size() -> os.terminal_size | None:
    """Return the size of the terminal that this process prints to; None: it prints to none."""
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()) if sys.__stdout__ is not None else None
    except (OSError, ValueError):  # No terminal; closed.
        return None


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def process_start(pid: int) -> str:
    """Return what tells a process from a later one with its number: boot and start; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""
    return f"{boot} {ticks}"


def is_running(pid: int) -> bool:
    """Return whether there is a process with this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Somebody else's.
    return True
