"""Which waiting job starts next, and on which devices: pure rules, free of processes, files and clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..common.errors import OptionError
from ..common.text import pluralize

# Times that later jobs may start before a waiting one. From then on the devices that come back are kept for it.
MAX_OVERTAKEN = 8


@dataclass(frozen=True)
class JobSize:
    """How large a job is on each of its nodes.

    Attributes:
        nproc: Number of ranks.
        devices_per_rank: Devices that each of them uses.
    """

    nproc: int
    devices_per_rank: int = 1

    @property
    def devices(self) -> int:
        """Devices that it takes, where there are devices."""
        return self.nproc * self.devices_per_rank

    def __str__(self) -> str:
        ranks = pluralize(self.nproc, "rank")
        return ranks if self.devices_per_rank == 1 else f"{ranks} on {self.devices_per_rank} devices each"


def asked_options(nproc: int | None, devices_per_rank: int) -> str:
    """Return the options by which a job asks for a size that is not the default one."""
    asked = {"nproc_per_node": nproc or "auto", "devices_per_rank": devices_per_rank}
    usual = {"nproc_per_node": "auto", "devices_per_rank": 1}
    return " with ".join(f"hydra.launcher.{name}={value}" for name, value in asked.items() if value != usual[name])


@dataclass(frozen=True)
class DevicePool:
    """What jobs share.

    Attributes:
        devices: Ids of the devices, in the order in which they are given out; empty: jobs need none.
        jobs_per_device: Most jobs that have one device at a time.
        max_jobs: Most jobs at a time; None: as many as the devices allow, 1 without devices.
        in_order: Whether no job overtakes another one.
    """

    devices: tuple[str, ...] = ()
    jobs_per_device: int = 1
    max_jobs: int | None = None
    in_order: bool = False

    def size(self, nproc: int | None, devices_per_rank: int = 1) -> JobSize:
        """Return the size of a job.

        Args:
            nproc: Ranks that it asks for; None: as many as the devices do for, 1 without devices.
            devices_per_rank: Devices for each of them.

        Raises:
            OptionError: when the job does not fit, however long it waits.
        """
        count = len(self.devices)
        size = JobSize(nproc or max(1, count // devices_per_rank), devices_per_rank)
        if self.devices and size.devices > count:
            asked = asked_options(nproc, devices_per_rank)
            takes = "" if devices_per_rank == 1 else f" takes {size.devices} devices"
            raise OptionError(
                f"A job of {size} does not fit: {asked}{takes}, but there {'is' if count == 1 else 'are'} only "
                f"{pluralize(count, 'device')} ({', '.join(self.devices)}). Ask for fewer, or set "
                "hydra.launcher.devices=[] to run without devices."
            )
        return size

    @property
    def limit(self) -> float:
        """Most jobs at a time, whatever their devices."""
        return self.max_jobs or (math.inf if self.devices else 1)

    def most_jobs(self, width: int) -> int:
        """Return how many jobs that take `width` devices each can run at a time."""
        by_devices = len(self.devices) * self.jobs_per_device // width if self.devices else math.inf
        return max(1, int(min(by_devices, self.limit)))


@dataclass(frozen=True)
class Placement:
    """A job that may start.

    Attributes:
        job: Number of the job.
        devices: Ids of its devices, in the pool's order; empty: without devices.
        overtakes: Jobs before it in line that lack devices which jobs of this line have.
    """

    job: int
    devices: tuple[str, ...]
    overtakes: tuple[int, ...] = ()


@dataclass
class _Waiting:
    width: int | None
    overtaken: int = 0


@dataclass
class Schedule:
    """Jobs in line, and jobs on devices.

    The first job in line that fits starts. One that does not is overtaken by later, smaller ones, `MOST_OVERTAKEN`
    times at most. With jobs of one size that is the greedy list schedule.

    Attributes:
        pool: What jobs share.
        running: Devices of each running job, by its number.
    """

    pool: DevicePool
    running: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _line: dict[int, _Waiting] = field(default_factory=dict)

    def add(self, job: int, width: int | None) -> None:
        """Put a job at the end of the line.

        Args:
            width: Devices that it takes, if there are any; None: not known yet, and it cannot start before it is.
        """
        self._line[job] = _Waiting(width)

    def resize(self, job: int, width: int) -> None:
        """Take note of how many devices a waiting job takes."""
        self._line[job].width = width

    def drop(self, job: int) -> None:
        """Take a waiting job out of the line."""
        del self._line[job]

    @property
    def waiting(self) -> list[int]:
        """Jobs in line, in order."""
        return list(self._line)

    @property
    def devices_in_use(self) -> set[str]:
        """Devices that a running job has."""
        return {device for devices in self.running.values() for device in devices}

    def choose(self, obtain: Callable[[str], bool] = lambda _device: True) -> Placement | None:
        """Return whose turn it is; None when no job can start.

        Args:
            obtain: Tries to get hold of a device, which others than these jobs may have, and returns whether it did.
                What was obtained may then be more than what is used.
        """
        if len(self.running) >= self.pool.limit:
            return None
        free = self._free_devices()
        too_many = math.inf
        overtakes: list[int] = []
        for place, (job, waiting) in enumerate(self._line.items()):
            if waiting.width is None and place == 0:
                return None
            if waiting.width is not None and waiting.width < too_many:
                devices = self._take(waiting.width, free, obtain)
                if devices is not None:
                    return Placement(job, devices, tuple(overtakes))
                too_many = waiting.width
            if self.pool.in_order:
                return None
            # Where others have the devices that it lacks, to keep ours idle would not help it.
            if waiting.width is None or len(free) < waiting.width or not self.pool.devices:
                if waiting.overtaken >= MAX_OVERTAKEN:
                    return None
                overtakes.append(job)
        return None

    def start(self, turn: Placement) -> None:
        """Put the job whose turn it is on its devices."""
        for job in turn.overtakes:
            self._line[job].overtaken += 1
        del self._line[turn.job]
        self.running[turn.job] = turn.devices

    def _free_devices(self) -> list[str]:
        """Return the devices that have room for another job, those with the fewest jobs first."""
        jobs_on = dict.fromkeys(self.pool.devices, 0)
        for devices in self.running.values():
            for device in devices:
                jobs_on[device] += 1
        free = [device for device in self.pool.devices if jobs_on[device] < self.pool.jobs_per_device]
        return sorted(free, key=jobs_on.__getitem__)

    def _take(self, width: int, free: Sequence[str], obtain: Callable[[str], bool]) -> tuple[str, ...] | None:
        if not self.pool.devices:
            return ()
        if len(free) < width:
            return None
        taken: list[str] = []
        for device in free:
            if len(taken) < width and obtain(device):
                taken.append(device)
        return self._in_order(taken) if len(taken) == width else None

    def _in_order(self, devices: Iterable[str]) -> tuple[str, ...]:
        chosen = set(devices)
        return tuple(device for device in self.pool.devices if device in chosen)

    def alone_on(self, job: int) -> list[str]:
        """Return the devices of a running job that no other job has."""
        others = {device for other, devices in self.running.items() if other != job for device in devices}
        return [device for device in self.running[job] if device not in others]

    def end(self, job: int) -> None:
        """Take a running job off its devices."""
        del self.running[job]
