"""Which waiting job starts next, and on which devices: pure rules, free of processes, files and clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ._errors import OptionError
from ._words import counted

# Times that later jobs may start before a waiting one. From then on the devices that come back are kept for it.
MOST_OVERTAKEN = 8


@dataclass(frozen=True)
class Pool:
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

    def nproc(self, asked: int | None) -> int:
        """Return the number of ranks of a job that asks for so many.

        Args:
            asked: None: one a device, 1 without devices.

        Raises:
            OptionError: when the job does not fit, however long it waits.
        """
        if asked is None:
            return max(1, len(self.devices))
        if self.devices and asked > len(self.devices):
            are = "is" if len(self.devices) == 1 else "are"
            raise OptionError(
                f"A job of {counted(asked, 'rank')} does not fit: hydra.launcher.nproc_per_node={asked}, but there "
                f"{are} only {counted(len(self.devices), 'device')} ({', '.join(self.devices)}). Ask for fewer ranks, "
                "or set hydra.launcher.devices=[] to run without devices."
            )
        return asked

    @property
    def limit(self) -> float:
        """Most jobs at a time, whatever their devices."""
        return self.max_jobs or (math.inf if self.devices else 1)

    def most_jobs(self, nproc: int) -> int:
        """Return how many jobs of `nproc` ranks can run at a time."""
        by_devices = len(self.devices) * self.jobs_per_device // nproc if self.devices else math.inf
        return max(1, int(min(by_devices, self.limit)))


@dataclass(frozen=True)
class Turn:
    """A job that may start.

    Attributes:
        job: Number of the job.
        nproc: Its number of ranks.
        devices: Ids of its devices, in the pool's order; empty: without devices.
        overtakes: Jobs before it in line that lack devices which jobs of this line have.
    """

    job: int
    nproc: int
    devices: tuple[str, ...]
    overtakes: tuple[int, ...] = ()


@dataclass
class _Waiting:
    nproc: int | None
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

    pool: Pool
    running: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _line: dict[int, _Waiting] = field(default_factory=dict)

    def add(self, job: int, nproc: int | None) -> None:
        """Put a job at the end of the line.

        Args:
            job: Its number.
            nproc: Its number of ranks; None: not known yet, and it cannot start before it is.
        """
        self._line[job] = _Waiting(nproc)

    def resize(self, job: int, nproc: int) -> None:
        """Take note of a waiting job's number of ranks."""
        self._line[job].nproc = nproc

    def nproc(self, job: int) -> int | None:
        """Return the number of ranks of a waiting job; None: not known yet."""
        return self._line[job].nproc

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

    def choose(self, obtain: Callable[[str], bool] = lambda _device: True) -> Turn | None:
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
            if waiting.nproc is None and place == 0:
                return None
            if waiting.nproc is not None and waiting.nproc < too_many:
                devices = self._take(waiting.nproc, free, obtain)
                if devices is not None:
                    return Turn(job, waiting.nproc, devices, tuple(overtakes))
                too_many = waiting.nproc
            if self.pool.in_order:
                return None
            # Where others have the devices that it lacks, to keep ours idle would not help it.
            if waiting.nproc is None or len(free) < waiting.nproc or not self.pool.devices:
                if waiting.overtaken >= MOST_OVERTAKEN:
                    return None
                overtakes.append(job)
        return None

    def start(self, turn: Turn) -> None:
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

    def _take(self, nproc: int, free: Sequence[str], obtain: Callable[[str], bool]) -> tuple[str, ...] | None:
        if not self.pool.devices:
            return ()
        if len(free) < nproc:
            return None
        taken: list[str] = []
        for device in free:
            if len(taken) < nproc and obtain(device):
                taken.append(device)
        return self._in_order(taken) if len(taken) == nproc else None

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
