"""Locks on devices between the sweeps of one user on one machine.

A lock is an open file. The launching process takes it, and hands it to the keeper of the job that uses the device, and
that to the ranks: the kernel lets go of it when the last process that has it is gone, whoever was killed before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Collection
from urllib.parse import quote

from ._errors import OptionError

# Not $XDG_RUNTIME_DIR or $TMPDIR: a sweep in a login session and one from cron have others, and would not meet; and
# the first is deleted when the last session ends, while a sweep goes on.
FOLDER = f"/tmp/hydra-ddp-{os.getuid() if hasattr(os, 'getuid') else 0}"


# Seconds between two touches of the files of held locks, so that no cleaner of old files takes them.
_TOUCH_INTERVAL_S = 3600.0
# A file name has at most 255 bytes.
_LONGEST_NAME = 150


class DeviceLocks:
    """The locks of one sweep.

    Args:
        owner: The sweep, for others who wait for it.
        inherited: Names of devices that a sweep of which this process is a rank has locked for it.
        folder: Where the lock files are; made if it is not there.

    Raises:
        OptionError: when the folder cannot be used.
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
        """See whether a device can be locked at all, by whomever.

        Raises:
            OptionError: when it cannot.
        """
        if self.obtain(name):
            self.release(name)

    def obtain(self, name: str) -> bool:
        """Take a device's lock if nobody else has it; return whether it is ours.

        Args:
            name: Of the device, alike in all sweeps.

        Raises:
            OptionError: when the lock file cannot be used.
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
        # For people; the lock does not depend on it.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "sweep": self._owner}).encode())
        self._descriptors[name] = descriptor
        return True

    @staticmethod
    def _locked_file(path: str) -> int | None:
        import fcntl  # Windows has none; there this module can still be imported.

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
            # Somebody deleted it between the two steps: others would lock another file of that name.
            os.close(descriptor)

    def _path(self, name: str) -> str:
        quoted = quote(name, safe="")
        if len(quoted) > _LONGEST_NAME:
            quoted = f"{quoted[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        return os.path.join(self._folder, quoted)

    def touch(self) -> None:
        """Now and then show that the locks are in use."""
        if time.monotonic() - self._touched_at > _TOUCH_INTERVAL_S:
            self._touched_at = time.monotonic()
            for descriptor in self._descriptors.values():
                with contextlib.suppress(OSError):
                    os.utime(descriptor)

    def holder(self, name: str) -> str:
        """Say who has a device that could not be had."""
        try:
            with open(self._path(name), encoding="utf-8") as file:
                facts = json.load(file)
            return f"process {facts['pid']}, sweep {facts['sweep']}"
        except (OSError, ValueError, KeyError, TypeError):
            # It has just been taken, and nothing is written yet.
            return "another sweep of yours"

    def descriptor(self, name: str) -> int | None:
        """Return the open file that is the lock, to be handed on; None: it is not held."""
        return self._descriptors.get(name)

    def release(self, name: str) -> None:
        """Let go of a lock; it is free when every process that it was handed to has, too."""
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
        f"{path}, which keeps sweeps from using the same device, cannot be used: {why}. Mend it, or do without by "
        "hydra.launcher.lock_devices=false."
    )
