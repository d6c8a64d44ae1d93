"""Decide which waiting job starts next, and on which devices: pure rules, without processes, files and clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..common.errors import OptionError
from ..common.text import pluralize

# How often later jobs may overtake a waiting one. From then on, devices that become free are kept for it.
MAX_OVERTAKEN = 8


@dataclass(frozen=True)
class JobSize:
    """Size of a job on each of its nodes.

    Attributes:
        nproc: Number of ranks.
        devices_per_rank: Number of devices per rank.
    """

    nproc: int
    devices_per_rank: int = 1

    @property
    def devices(self) -> int:
        """Number of devices that the job takes, if there are any."""
        return self.nproc * self.devices_per_rank

    def __str__(self) -> str:
        ranks = pluralize(self.nproc, "rank")
        return ranks if self.devices_per_rank == 1 else f"{ranks} on {self.devices_per_rank} devices each"


def asked_options(nproc: int | None, devices_per_rank: int) -> str:
    """Return the options by which a job requests a size other than the default."""
    asked = {"nproc_per_node": nproc or "auto", "devices_per_rank": devices_per_rank}
    usual = {"nproc_per_node": "auto", "devices_per_rank": 1}
    return " with ".join(f"hydra.launcher.{name}={value}" for name, value in asked.items() if value != usual[name])


@dataclass(frozen=True)
class DevicePool:
    """Devices that jobs share, and limits on concurrent jobs.

    Attributes:
        devices: Ids of the devices, in the order in which they are assigned; empty if jobs need none.
        jobs_per_device: Maximum number of concurrent jobs on a device.
        max_jobs: Maximum number of concurrent jobs; None for as many as the devices allow, or 1 without devices.
        in_order: Whether jobs must not overtake each other.
    """

    devices: tuple[str, ...] = ()
    jobs_per_device: int = 1
    max_jobs: int | None = None
    in_order: bool = False

    def size(self, nproc: int | None, devices_per_rank: int = 1) -> JobSize:
        """Return the size of a job.

        Args:
            nproc: Number of ranks that it requests; None for as many as the devices allow, or 1 without devices.
            devices_per_rank: Number of devices per rank.

        Raises:
            OptionError: if the job can never fit.
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
        """Maximum number of concurrent jobs, regardless of their devices."""
        return self.max_jobs or (math.inf if self.devices else 1)

    def most_jobs(self, width: int) -> int:
        """Return how many jobs of `width` devices each can run concurrently."""
        by_devices = len(self.devices) * self.jobs_per_device // width if self.devices else math.inf
        return max(1, int(min(by_devices, self.limit)))


@dataclass(frozen=True)
class Placement:
    """A job that may start.

    Attributes:
        job: Number of the job.
        devices: Ids of its devices, in the pool's order; empty without devices.
        overtakes: Jobs before it in the queue that wait for devices of this sweep's own jobs.
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
    """The queue of waiting jobs, and the devices of running ones.

    The first job in the queue that fits starts. Later, smaller jobs overtake one that does not fit, at most
    `MAX_OVERTAKEN` times. If all jobs have the same size, this is greedy list scheduling.

    Attributes:
        pool: Devices and limits that jobs share.
        running: Devices of each running job, by job number.
    """

    pool: DevicePool
    running: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _line: dict[int, _Waiting] = field(default_factory=dict)

    def add(self, job: int, width: int | None) -> None:
        """Append a job to the queue.

        Args:
            job: Number of the job.
            width: Number of devices that it takes, if there are any; None if not known yet, so that it cannot start.
        """
        self._line[job] = _Waiting(width)

    def resize(self, job: int, width: int) -> None:
        """Set the number of devices that a waiting job takes."""
        self._line[job].width = width

    def drop(self, job: int) -> None:
        """Remove a waiting job from the queue."""
        del self._line[job]

    @property
    def waiting(self) -> list[int]:
        """Waiting jobs, in order."""
        return list(self._line)

    @property
    def devices_in_use(self) -> set[str]:
        """Devices of running jobs."""
        return {device for devices in self.running.values() for device in devices}

    def choose(self, obtain: Callable[[str], bool] = lambda _device: True) -> Placement | None:
        """Return the next job to start, or None if no job can start.

        Args:
            obtain: Tries to acquire a device, which may be in use outside this schedule, and returns whether it
                succeeded. More devices may be acquired than are used.
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
            # If the devices it lacks are in use outside this schedule, keeping ours idle would not help it.
            if waiting.width is None or len(free) < waiting.width or not self.pool.devices:
                if waiting.overtaken >= MAX_OVERTAKEN:
                    return None
                overtakes.append(job)
        return None

    def start(self, turn: Placement) -> None:
        """Move the chosen job from the queue to its devices."""
        for job in turn.overtakes:
            self._line[job].overtaken += 1
        del self._line[turn.job]
        self.running[turn.job] = turn.devices

    def _free_devices(self) -> list[str]:
        """Return the devices that have room for another job, ordered by their number of jobs."""
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
        """Return the devices of a running job that no other job uses."""
        others = {device for other, devices in self.running.items() if other != job for device in devices}
        return [device for device in self.running[job] if device not in others]

    def end(self, job: int) -> None:
        """Remove a running job and free its devices."""
        del self.running[job]
