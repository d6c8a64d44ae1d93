"""Queue of waiting jobs: composed and planned ahead of time, and given devices when their turn comes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

from ..common.errors import OptionError
from ..common.processes import start_environment, terminal_size, usable_cores
from ..common.text import pluralize
from ..display.tables import override_line
from ..job.environment import scrub, with_omp_threads, with_terminal_size
from ..job.frozen_config import SIZE_OPTIONS, CachedConfig, asked_size
from ..job.plan import JobPlanner, PlannedJob
from ..job.settings import SweepContext, read_size
from ..resources.devices import DeviceAllocator
from ..resources.schedule import DevicePool, JobSize, Schedule

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedJob:
    """A job that has been planned or has failed to compose.

    Attributes:
        number: Number of the job.
        plan: The job, which waits for its turn, or None if it has left the queue.
        error: Why it cannot start, or None if it can.
    """

    number: int
    plan: PlannedJob | None
    error: Exception | None = None


class JobQueue:
    """Hold the jobs of one batch until they start, and their devices until they end.

    Args:
        planner: Composes and plans the jobs.
        pool: The devices that the jobs share.
        overrides: Override strings of each job, by its number, in order.

    Raises:
        OptionError: if a job is known not to fit on the devices.
    """

    def __init__(
        self,
        context: SweepContext,
        planner: JobPlanner,
        pool: DevicePool,
        allocator: DeviceAllocator,
        overrides: Mapping[int, Sequence[str]],
    ) -> None:
        self._context = context
        self._planner = planner
        self._pool = pool
        self._allocator = allocator
        self._overrides = overrides
        self._schedule = Schedule(pool)
        self._cached = {number: planner.take_cached(one) for number, one in overrides.items()}
        self._to_compose = [number for number, cached in self._cached.items() if cached is None]
        self._planned: dict[int, PlannedJob] = {}
        # A job whose turn came before it was planned.
        self._unready: int | None = None
        self._blocked_by: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        self._inherited = with_terminal_size(
            scrub(os.environ, start_environment()), None if context.settings.debug else terminal_size()
        )
        # Of the jobs whose sizes are known.
        self._sizes: list[JobSize] = []
        for number, cached in self._cached.items():
            size = self._known_size(number, cached)
            self._schedule.add(number, None if size is None else size.devices)
            if size is not None:
                self._sizes.append(size)

    def _known_size(self, number: int, cached: CachedConfig | None) -> JobSize | None:
        launcher = self._context.config.hydra.launcher
        if cached is not None:
            values = cached.size
        elif any(OmegaConf.is_interpolation(launcher, name) for name in SIZE_OPTIONS):
            return None
        else:
            values = asked_size(self._context.config)
        if values is None:
            return None  # Only this job fails, when its turn comes.
        try:
            asked = read_size(*values)
        except OptionError:
            return None  # As above.
        try:
            return self._pool.size(*asked)
        except OptionError as error:
            raise OptionError(f"Job {number} ({override_line(self._overrides[number])}): {error}") from None

    # Estimates

    @property
    def most_jobs(self) -> int:
        """Maximum number of these jobs that can run at a time, as far as their sizes are known."""
        least = min((size.devices for size in self._sizes), default=1)
        return min(len(self._overrides), self._pool.most_jobs(least))

    @property
    def most_ranks(self) -> int:
        """Maximum number of ranks that can run at a time, as far as the jobs' sizes are known."""
        pool = self._pool
        unknown = len(self._overrides) - len(self._sizes)
        if len(set(self._sizes)) == 1 and not unknown:
            return self.most_jobs * self._sizes[0].nproc
        known = [size.nproc for size in self._sizes]
        nprocs = known + [max(1, *known, len(pool.devices))] * unknown
        # Sum of the largest jobs that may run at the same time.
        together = sum(sorted(nprocs)[-int(min(len(nprocs), pool.limit)) :])
        per_rank = 1 if unknown else min((size.devices_per_rank for size in self._sizes), default=1)
        room = len(pool.devices) * pool.jobs_per_device // per_rank
        return max(1, min(together, room) if pool.devices else together)

    @property
    def summary(self) -> str:
        """How many jobs there are, how many run at a time, with how many ranks, on which devices."""
        count = len(self._overrides)
        each = f"{self._said_sizes} each" if self._sizes else "ranks as each job asks"
        pool, nnodes = self._pool, self._context.settings.nnodes
        if nnodes > 1:
            each += f" on each of {pluralize(nnodes, 'node')}"
        said = f"{pluralize(count, 'job')}, {self.most_jobs} at a time, {each}"
        if not pool.devices:
            return said
        if len(set(self._sizes)) != 1 or pool.jobs_per_device > 1:
            return f"{said}, devices {' '.join(pool.devices)}"
        width = self._sizes[0].devices
        sets = [pool.devices[place : place + width] for place in range(0, self.most_jobs * width, width)]
        return f"{said}, devices {' '.join(f'[{chr(44).join(one)}]' for one in sets)}"

    @property
    def _said_sizes(self) -> str:
        """How many ranks the jobs have, and on how many devices if that number differs."""
        least, most = (pick(self._sizes, key=lambda size: size.nproc) for pick in (min, max))
        ranks = pluralize("-".join(map(str, dict.fromkeys((least.nproc, most.nproc)))), "rank")
        if not self._pool.devices or all(size.devices_per_rank == 1 for size in self._sizes):
            return ranks
        fewest, widest = (pick(size.devices for size in self._sizes) for pick in (min, max))
        return f"{ranks} on {pluralize('-'.join(map(str, dict.fromkeys((fewest, widest)))), 'device')}"

    def base_environment(self) -> dict[str, str]:
        """Return the environment that all ranks of these jobs start from.

        Raises:
            OptionError: if jobs that run at the same time would share one port.
        """
        settings = self._context.settings
        if settings.master_port is not None and self.most_jobs > 1:
            raise OptionError(
                f"hydra.launcher.master_port={settings.master_port} is one port, but "
                f"{pluralize(self.most_jobs, 'job')} run at once. Leave it null, or set "
                "hydra.launcher.max_parallel_jobs=1."
            )
        self._compose_first()
        return self._with_threads(self.most_ranks)

    def _compose_first(self) -> None:
        """Compose the first job if no size is known yet, as the shared environment depends on it."""
        if self._sizes or not self._to_compose:
            return
        number = self._to_compose[0]
        try:
            size = self._store_config(number)
        except Exception:  # noqa: BLE001  (a config may raise anything; the job fails with it in its turn)
            return
        self._to_compose.remove(number)
        if size is not None:
            self._schedule.resize(number, size.devices)
            self._sizes.append(size)

    def environment_of(self, plan: PlannedJob) -> dict[str, str]:
        """Return the environment of a job's ranks, with fewer threads if the job is larger than assumed at first."""
        at_once = plan.size.nproc * min(len(self._overrides), self._pool.most_jobs(plan.size.devices))
        return self._with_threads(max(at_once, self.most_ranks))

    def _with_threads(self, ranks_at_once: int) -> dict[str, str]:
        return with_omp_threads(self._inherited, self._context.settings.omp_num_threads, usable_cores(), ranks_at_once)

    # Before a job's turn

    @property
    def waiting(self) -> bool:
        """Whether jobs are queued."""
        return bool(self._schedule.waiting)

    @property
    def can_prepare(self) -> bool:
        """Whether a job can be composed or planned ahead of its turn."""
        return self._to_plan() is not None or bool(self._to_compose)

    def prepare_next(self) -> PreparedJob | None:
        """Plan the next job, or compose another one. Return None if nothing is decided about it yet.

        Composing early reports errors and sizes early, and shields waiting jobs from config files that are edited
        while others run.
        """
        number = self._to_plan()
        if number is not None:
            return self._plan(number)
        if self._to_compose:
            return self._compose(self._to_compose.pop(0))
        return None

    def _to_plan(self) -> int | None:
        """Return the current or next job, or None if it is planned already."""
        number = self._unready if self._unready is not None else next(iter(self._schedule.waiting), None)
        return None if number in self._planned else number

    def _compose(self, number: int) -> PreparedJob | None:
        try:
            size = self._store_config(number)
        except Exception as error:  # noqa: BLE001  (a config may raise anything; only this job fails)
            self.discard(number)
            return PreparedJob(number, None, error)
        if size is not None:
            self._schedule.resize(number, size.devices)
        return None

    def _store_config(self, number: int) -> JobSize | None:
        """Compose a job, and return its size, or None if that is not known before its turn."""
        cached = CachedConfig.store(self._planner.compose(self._overrides[number]))
        self._cached[number] = cached
        # If the size cannot be resolved, planning the job reports that.
        return None if cached is None or cached.size is None else self._pool.size(*read_size(*cached.size))

    def _plan(self, number: int) -> PreparedJob:
        self._unready = None
        cached = self._cached.pop(number, None)
        if number in self._to_compose:
            self._to_compose.remove(number)
        overrides = self._overrides[number]
        try:
            config = cached.load() if cached is not None else self._planner.compose(overrides)
            plan = self._planner.plan(number, overrides, config)
        except Exception as error:  # noqa: BLE001  (as above)
            self.discard(number)
            return PreparedJob(number, None, error)
        self._planned[number] = plan
        self._schedule.resize(number, plan.size.devices)
        return PreparedJob(number, plan)

    def discard(self, number: int) -> None:
        """Remove a waiting job from the queue."""
        self._planned.pop(number, None)
        self._schedule.drop(number)

    def discard_ready(self) -> list[int]:
        """Remove the jobs that are ready to start from the queue, and return their numbers."""
        ready = list(self._planned)
        for number in ready:
            self._schedule.drop(number)
        self._planned.clear()
        return ready

    def clear(self) -> list[int]:
        """Remove all jobs from the queue, and return their numbers."""
        waiting = list(self._schedule.waiting)
        for number in waiting:
            self._schedule.drop(number)
        self._to_compose.clear()
        self._planned.clear()
        self._unready = None
        return waiting

    # Its turn

    @property
    def blocked(self) -> bool:
        """Whether the next job waits for devices that this sweep does not hold."""
        return bool(self._blocked_by)

    def take_next(self) -> tuple[PlannedJob, tuple[str, ...]] | None:
        """Return the next job and its devices, or None if no job can start or it is not planned yet."""
        placement = self._schedule.choose(self._allocator.acquire)
        plan = None if placement is None else self._planned.pop(placement.job, None)
        if placement is not None and plan is not None:
            self._schedule.start(placement)
        self._allocator.release_unused(self._schedule.devices_in_use)
        blocked_by = self._allocator.blocked_by()
        self._report_blocked(blocked_by if placement is None else {})
        if placement is None or plan is None:
            # Planning takes a while, and may show that the job cannot start or has another size.
            self._unready = None if placement is None else placement.job
            return None
        return plan, placement.devices

    def _report_blocked(self, blocked_by: dict[str, str]) -> None:
        self._blocked_by = blocked_by
        for device, why in blocked_by.items():
            if self._reported.get(device) != why:
                self._reported[device] = why
                _log.info("Waiting for device %s: it %s", device, why)

    def job_ended(self, number: int) -> None:
        """Release the devices of a job that was started."""
        self.pause(number)
        self._schedule.end(number)
        self._allocator.release_unused(self._schedule.devices_in_use)

    def pause(self, number: int) -> None:
        """Record that one start of a job has ended; another may follow on the same devices."""
        self._allocator.job_ended(self._schedule.alone_on(number))
