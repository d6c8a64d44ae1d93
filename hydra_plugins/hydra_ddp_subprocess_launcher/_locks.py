"""Locks on devices between the sweeps of one user on one machine.

A lock is an open file. The launching process takes it, and hands it to the keeper of the job that uses the device:
the kernel lets go of it when the last process that holds it is gone, whoever was killed before.
"""

from __future__ import annotations

import json
import os
import stat
import time
from urllib.parse import quote

from ._errors import OptionError

# Not $XDG_RUNTIME_DIR or $TMPDIR: a sweep in a login session and one from cron have others, and would not meet; and
# the first is deleted when the last session ends, while a sweep goes on.
FOLDER = f"/tmp/hydra-ddp-{os.getuid() if hasattr(os, 'getuid') else 0}"


class DeviceLocks:
    """The locks of one sweep.

    Args:
        owner: The sweep, for others who wait for it.
        folder: Where the lock files are; made if it is not there.

    Raises:
        OptionError: when the folder cannot be used.
    """

    def __init__(self, owner: str, folder: str = FOLDER) -> None:
        self._owner = owner
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            found = os.lstat(folder)
        except OSError as error:
            raise _unusable(folder, error.strerror or str(error)) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise _unusable(folder, "it is no directory of yours")

    def obtain(self, name: str) -> bool:
        """Take a device's lock if nobody else has it; return whether it is ours.

        Args:
            name: Of the device, alike in all sweeps.

        Raises:
            OptionError: when the lock file cannot be used.
        """
        import fcntl  # Windows has none; there this module can still be imported.

        if name in self._descriptors:
            return True
        try:
            descriptor = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(self._path(name), error.strerror or str(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            facts = {"pid": os.getpid(), "sweep": self._owner, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.write(descriptor, json.dumps(facts).encode())
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise _unusable(self._path(name), error.strerror or str(error)) from error
        self._descriptors[name] = descriptor
        return True

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, quote(name, safe=""))

    def holder(self, name: str) -> str:
        """Say who has a device that could not be had."""
        try:
            with open(self._path(name), encoding="utf-8") as file:
                facts = json.load(file)
            return f"process {facts['pid']}, sweep {facts['sweep']}, since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            # It has just been taken, and nothing is written yet.
            return "another sweep of yours"

    def descriptor(self, name: str) -> int:
        """Return the open file that is the lock, to be handed on."""
        return self._descriptors[name]

    def release(self, name: str) -> None:
        """Let go of a lock; it is free when every process that it was handed to has, too."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)


def _unusable(path: str, why: str) -> OptionError:
    return OptionError(
        f"{path}, which keeps sweeps from using the same device, cannot be used: {why}. Mend it, or do without by "
        "hydra.launcher.lock_devices=false."
    )
