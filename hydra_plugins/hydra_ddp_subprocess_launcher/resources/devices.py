"""Devices for jobs: find them, lock them between sweeps, and query their memory and processes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ..common.errors import OptionError
from .nvml import Nvml

_log = logging.getLogger(__name__)
# Seconds that a device may take to release ended processes.
SETTLE_S = 10.0
_GB = 10**9


def find_devices(
    chosen: tuple[str, ...] | None, variable: str, environ: Mapping[str, str], nvml: Nvml
) -> tuple[str, ...]:
    """Return the ids of the devices that jobs may use; empty if there are none.

    Args:
        chosen: The option `devices`; None for all devices visible to this process.
        variable: Name of the visible-devices variable.
        environ: Environment with that variable.
        nvml: Counts the devices if neither the option nor the variable is set.

    Raises:
        OptionError: if the option names a device that is not visible to this process.
    """
    visible = _visible_ids(environ[variable]) if variable in environ else None
    if chosen is None:
        return visible if visible is not None else tuple(map(str, range(nvml.count())))
    outside = [device for device in chosen if visible is not None and device not in visible]
    if outside:
        raise OptionError(
            f"hydra.launcher.devices={list(chosen)} has {outside[0]!r}, which {variable}={environ[variable]} does not "
            "allow. Choose among those, or change the variable."
        )
    return chosen


def _visible_ids(value: str) -> tuple[str, ...]:
    # CUDA reads the list up to the first invalid id; -1 and NoDevFiles are conventional for "no devices".
    ids = (part.strip() for part in value.split(","))
    return tuple(itertools.takewhile(lambda one: one and not one.startswith("-") and one != "NoDevFiles", ids))


@dataclass(frozen=True)
class _Settling:
    """A device whose last job has ended, but which may still hold that job's memory.

    Attributes:
        before: Pids that used it before the job.
        until: When to reuse it in any case, in monotonic seconds.
    """

    before: frozenset[int]
    until: float


def name_devices(devices: Sequence[str], variable: str, nvml: Nvml) -> dict[str, str]:
    """Return a name for each device that is the same in every sweep on this machine, regardless of its id there.

    Raises:
        OptionError: if two ids mean the same device.
    """
    names: dict[str, str] = {}
    for device in devices:
        name = nvml.uuid(device) or f"{variable}={device}"
        other = next((earlier for earlier, taken in names.items() if taken == name), None)
        if other is not None:
            raise OptionError(
                f"Devices {other} and {device} are one and the same. Name it once in hydra.launcher.devices, or in "
                f"{variable}."
            )
        names[device] = name
    return names


class DeviceAllocator:
    """Acquire and release devices that other sweeps, other users and ended jobs may still use.

    Args:
        names: Name of each device, from `name_devices`.
        nvml: Reports memory and processes.
        locks: Locks between the sweeps of this user; None if `lock_devices` is off.
        min_free_gb: Free memory, in 10^9 bytes, that a device must have when a job starts on it; None for no minimum.
        clock: Returns monotonic seconds.

    Raises:
        OptionError: if a device cannot be locked, or can never meet `min_free_memory_gb`.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        nvml: Nvml,
        locks: DeviceLocks | None,
        min_free_gb: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = nvml
        self._locks = locks
        self._min_free_gb = min_free_gb
        self._clock = clock
        self._names = dict(names)
        self._processes_before: dict[str, frozenset[int]] = {}
        self._settling: dict[str, _Settling] = {}
        self._refused: dict[str, str] = {}
        self._unlocked = False
        for device, name in names.items():
            if locks is not None:
                locks.check(name)
            if min_free_gb is not None:
                self._check_memory(device, min_free_gb)

    def _check_memory(self, device: str, wanted_gb: float) -> None:
        memory = self._nvml.memory(device)
        if memory is None or memory[1] < wanted_gb * _GB:
            why = "NVML does not tell its memory" if memory is None else f"it has {memory[1] / _GB:.1f} GB in all"
            raise OptionError(
                f"hydra.launcher.min_free_memory_gb={wanted_gb:g} cannot be met by device {device}: {why}. "
                "Ask for less, leave it null, or leave the device out of hydra.launcher.devices."
            )

    def blocked_by(self) -> dict[str, str]:
        """Return which devices could not be acquired since the last call, and why."""
        refused, self._refused = self._refused, {}
        return refused

    @property
    def is_idle(self) -> bool:
        """Whether no device is still occupied by an ended job."""
        return not any(map(self._settles, list(self._settling)))

    def acquire(self, device: str) -> bool:
        """Acquire a device for a job; return whether it was free."""
        why = self._why_not(device)
        if why:
            self._refused[device] = why
            return False
        if device not in self._processes_before:
            self._processes_before[device] = self._nvml.processes(device) or frozenset()
        return True

    def _why_not(self, device: str) -> str:
        if self._settles(device):
            return "has processes that were not there before the last job"
        # Check before taking the lock, which would block other sweeps for nothing.
        if not self._has_memory(device):
            # Without the current figure, which would make the reason differ at each call.
            return f"has less than hydra.launcher.min_free_memory_gb={self._min_free_gb:g} free"
        if self._locks is None:
            return ""
        try:
            obtained = self._locks.acquire(self._names[device])
        except OptionError as error:
            # Locking worked when the sweep began, so a failure now must not abort the running jobs.
            if not self._unlocked:
                _log.warning("Going on without locks on devices: %s", error)
            self._unlocked = True
            return ""
        return "" if obtained else f"is held by {self._locks.holder(self._names[device])}"

    def _has_memory(self, device: str) -> bool:
        memory = None if self._min_free_gb is None else self._nvml.memory(device)
        return memory is None or self._min_free_gb is None or memory[0] >= self._min_free_gb * _GB

    def _settles(self, device: str) -> bool:
        settling = self._settling.get(device)
        if settling is None:
            return False
        now = self._nvml.processes(device) or frozenset()
        if now - settling.before and self._clock() < settling.until:
            return True
        del self._settling[device]
        # The remaining processes are not the job's; do not wait for them again.
        self._processes_before[device] = now
        return False

    def release_unused(self, in_use: Iterable[str]) -> None:
        """Release every device except `in_use` and those that a finished job still occupies."""
        kept = set(in_use)
        for device, name in self._names.items():
            if device not in kept and not self._settles(device):
                self._processes_before.pop(device, None)
                if self._locks is not None:
                    self._locks.release(name)
        if self._locks is not None:
            self._locks.touch()

    def lock_names(self, devices: Iterable[str]) -> tuple[str, ...]:
        """Return the names under which these devices are locked; empty if they are not."""
        return () if self._locks is None else tuple(self._names[device] for device in devices)

    def descriptors(self, devices: Iterable[str]) -> list[int]:
        """Return the descriptors of the locks of these devices, for the keeper of their job."""
        found = [] if self._locks is None else [self._locks.descriptor(self._names[device]) for device in devices]
        return [descriptor for descriptor in found if descriptor is not None]

    def job_ended(self, devices: Iterable[str]) -> None:
        """Record that the last job on these devices has ended, although it may be restarted."""
        for device in devices:
            before = self._processes_before.get(device, frozenset())
            if (self._nvml.processes(device) or frozenset()) - before:
                self._settling[device] = _Settling(before, self._clock() + SETTLE_S)

    def ready(self, devices: Iterable[str]) -> bool:
        """Return whether a job that holds these devices can be restarted on them."""
        return not any(self._settles(device) or not self._has_memory(device) for device in devices)

    def close(self) -> None:
        """Release all devices and NVML. Jobs that still run keep their locks."""
        self._settling.clear()
        self.release_unused(())
        self._nvml.close()


# Not $XDG_RUNTIME_DIR or $TMPDIR: they differ between a login session and cron, so that two sweeps would not share
# locks; and the former is deleted when the last session ends, even if a sweep still runs.
FOLDER = f"/tmp/hydra-ddp-{os.getuid() if hasattr(os, 'getuid') else 0}"


# Seconds between two touches of held lock files, so that cleaners of old files do not delete them.
_TOUCH_INTERVAL_S = 3600.0
# Leaves room for a digest: a file name has at most 255 bytes.
_LONGEST_NAME = 150


class DeviceLocks:
    """The device locks of one sweep.

    Args:
        owner: Name of the sweep, shown to sweeps that wait for it.
        inherited: Names of devices that are already locked for this process by a sweep of which it is a rank.
        folder: Folder of the lock files; created if missing.

    Raises:
        OptionError: if the folder cannot be used.
    """

    def __init__(self, owner: str, inherited: Collection[str] = (), folder: str = FOLDER) -> None:
        self._owner = owner
        self._inherited = inherited
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._touched_at = time.monotonic()
        self._make_folder()

    def _make_folder(self) -> None:
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            found = os.lstat(self._folder)
        except OSError as error:
            raise _unusable(self._folder, error.strerror or str(error)) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise _unusable(self._folder, "it is no directory of yours")

    def check(self, name: str) -> None:
        """Check that a device can be locked in principle, even if another sweep holds it now.

        Raises:
            OptionError: if it cannot.
        """
        if self.acquire(name):
            self.release(name)

    def acquire(self, name: str) -> bool:
        """Acquire the lock of a device unless another sweep holds it; return whether this sweep holds it.

        Args:
            name: Name of the device, the same in all sweeps.

        Raises:
            OptionError: if the lock file cannot be used.
        """
        if name in self._descriptors or name in self._inherited:
            return True
        self._make_folder()
        try:
            descriptor = self._locked_file(self._path(name))
        except OSError as error:
            raise _unusable(self._path(name), error.strerror or str(error)) from error
        if descriptor is None:
            return False
        # Informational only; the lock does not depend on it.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "sweep": self._owner}).encode())
        self._descriptors[name] = descriptor
        return True

    @staticmethod
    def _locked_file(path: str) -> int | None:
        import fcntl  # Missing on Windows, where this module must still be importable.

        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            # The file was deleted between open and flock: others would lock a new file of that name.
            os.close(descriptor)

    def _path(self, name: str) -> str:
        quoted = quote(name, safe="")
        if len(quoted) > _LONGEST_NAME:
            quoted = f"{quoted[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        return os.path.join(self._folder, quoted)

    def touch(self) -> None:
        """Update the modification times of the lock files at intervals, to show that they are in use."""
        if time.monotonic() - self._touched_at > _TOUCH_INTERVAL_S:
            self._touched_at = time.monotonic()
            for descriptor in self._descriptors.values():
                with contextlib.suppress(OSError):
                    os.utime(descriptor)

    def holder(self, name: str) -> str:
        """Describe the holder of a device that could not be acquired."""
        try:
            with open(self._path(name), encoding="utf-8") as file:
                facts = json.load(file)
            return f"process {facts['pid']}, sweep {facts['sweep']}"
        except (OSError, ValueError, KeyError, TypeError):
            # The lock has just been acquired, and nothing is written yet.
            return "another sweep of yours"

    def descriptor(self, name: str) -> int | None:
        """Return the descriptor of a lock, to be passed on, or None if the lock is not held."""
        return self._descriptors.get(name)

    def release(self, name: str) -> None:
        """Release a lock; it becomes free once every process that received the descriptor has closed it, too."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _unusable(path: str, why: str) -> OptionError:
    return OptionError(
        f"{path}, which keeps sweeps from using the same device, cannot be used: {why}. Fix it, or do without by "
        "hydra.launcher.lock_devices=false."
    )
