"""The devices that jobs may use, and who uses which."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping

from ._errors import OptionError

_log = logging.getLogger(__name__)


def find_devices(chosen: tuple[str, ...] | None, variable: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the devices that jobs may use; empty: no devices.

    Args:
        chosen: The option `devices`; None: what this process may see.
        variable: Name of the visible-devices variable.
        environ: This process's environment.

    Raises:
        OptionError: when the option names a device that this process may not see.
    """
    visible = _visible_ids(environ[variable]) if variable in environ else None
    if chosen is None:
        return visible if visible is not None else _ask_nvml()
    outside = [device for device in chosen if visible is not None and device not in visible]
    if outside:
        raise OptionError(
            f"hydra.launcher.devices={list(chosen)} has {outside[0]!r}, which {variable}={environ[variable]} does not "
            "allow. Choose among those, or change the variable."
        )
    return chosen


def _visible_ids(value: str) -> tuple[str, ...]:
    # CUDA reads the list up to the first id that is none; -1 and NoDevFiles are how people say "no devices".
    ids = (part.strip() for part in value.split(","))
    return tuple(itertools.takewhile(lambda one: one and not one.startswith("-") and one != "NoDevFiles", ids))


def _ask_nvml() -> tuple[str, ...]:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return tuple(str(index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # noqa: BLE001  (no driver, an old driver, no module: all mean no devices)
        _log.debug("NVML names no devices: %s", error)
        return ()


class DevicePool:
    """Devices in order, given out in whole sets.

    Args:
        ids: All devices; empty: jobs run without devices and need none.
    """

    def __init__(self, ids: tuple[str, ...]) -> None:
        self.ids = ids
        self._taken: Counter[str] = Counter()

    def nproc(self, asked: int | None) -> int:
        """Return the ranks of a job that asks for so many.

        Args:
            asked: None: one a device of the pool, 1 without devices.

        Raises:
            OptionError: when the pool is too small for ever.
        """
        if asked is None:
            return max(1, len(self.ids))
        if self.ids and asked > len(self.ids):
            raise OptionError(
                f"A job of {asked} ranks does not fit: hydra.launcher.nproc_per_node={asked}, but there are only "
                f"{len(self.ids)} devices ({', '.join(self.ids)}). Ask for fewer ranks, or set "
                "hydra.launcher.devices=[] to run without devices."
            )
        return asked

    def most_jobs(self, nproc: int, max_parallel_jobs: int | None) -> int:
        """Return how many jobs of `nproc` ranks can run at once."""
        by_devices = len(self.ids) // nproc if self.ids else (max_parallel_jobs or 1)
        return max(1, min(by_devices, max_parallel_jobs or by_devices))

    def lease(self, nproc: int) -> tuple[str, ...] | None:
        """Take the first `nproc` free devices; None when there are not enough. Without devices: always empty."""
        if not self.ids:
            return ()
        free = [device for device in self.ids if not self._taken[device]]
        if len(free) < nproc:
            return None
        lease = tuple(free[:nproc])
        self._taken.update(lease)
        return lease

    def give_back(self, lease: tuple[str, ...]) -> None:
        """Return devices that `lease` gave."""
        self._taken.subtract(lease)
