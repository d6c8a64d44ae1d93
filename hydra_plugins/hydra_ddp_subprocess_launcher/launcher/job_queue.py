"""Jobs that wait for their turn: composed and frozen ahead of it, and given devices when it comes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from omegaconf import OmegaConf

from ..common import processes
from ..common.errors import OptionError
from ..common.text import pluralize
from ..display.tables import override_line
from ..job import environment
from ..job.frozen_config import SIZE_OPTIONS, CachedConfig, asked_size
from ..job.plan import PlannedJob, compose_job, plan_job
from ..job.settings import Sweep, read_size
from ..resources.schedule import JobSize, Schedule
from .resume import ResumeDecision

_log = logging.getLogger(__name__)


class JobQueue:
    """The jobs of one batch until they start, and their devices until they end.

    Args:
        sweep: What is the same for all of them.
        overrides: Override strings of each job, by its number, in order.
        fail: Is told of jobs that cannot start, which leave the line.
        settle: Is told of jobs that are ready what earlier runs have left to do of them (None: nothing is resumed), and
            says whether a job is over without being run; it then leaves the line.

    Raises:
        OptionError: when a job is known to fit never.
    """

    def __init__(
        self,
        sweep: Sweep,
        overrides: Mapping[int, Sequence[str]],
        fail: Callable[[int, Exception], None],
        settle: Callable[[PlannedJob, ResumeDecision | None], bool],
    ) -> None:
        self._sweep = sweep
        self._overrides = overrides
        self._fail = fail
        self._settle = settle
        self._schedule = Schedule(sweep.pool)
        self._kept = {number: sweep.spool.take(one) for number, one in overrides.items()}
        self._to_compose = [number for number, kept in self._kept.items() if kept is None]
        self._planned: dict[int, PlannedJob] = {}
        # A job whose turn came before it was ready.
        self._unready: int | None = None
        self._refused: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._inherited = environment.with_terminal_size(
            environment.scrub(os.environ, processes.start_environment()),
            None if sweep.settings.debug else processes.terminal_size(),
        )
        # As far as they are known.
        self._sizes: list[JobSize] = []
        for number, kept in self._kept.items():
            size = self._known_size(number, kept)
            self._schedule.add(number, None if size is None else size.devices)
            if size is not None:
                self._sizes.append(size)

    def _look_at_first(self) -> None:
        """Compose the first job if no size is known yet: what all jobs share depends on it."""
        if self._sizes or not self._to_compose:
            return
        number = self._to_compose[0]
        try:
            size = self._put_by(number)
        except Exception:  # noqa: BLE001  (a config may raise anything; it will again when its turn comes)
            return
        self._to_compose.remove(number)
        if size is not None:
            self._schedule.resize(number, size.devices)
            self._sizes.append(size)

    def _put_by(self, number: int) -> JobSize | None:
        """Compose a job, and return its size; None: it is not known before its turn."""
        kept = CachedConfig.store(compose_job(self._sweep, self._overrides[number]))
        self._kept[number] = kept
        # What cannot be resolved is named when it is planned.
        return None if kept is None or kept.size is None else self._sweep.pool.size(*read_size(*kept.size))

    def _known_size(self, number: int, kept: CachedConfig | None) -> JobSize | None:
        launcher = self._sweep.config.hydra.launcher
        if kept is not None:
            values = kept.size
        elif any(OmegaConf.is_interpolation(launcher, name) for name in SIZE_OPTIONS):
            return None
        else:
            values = asked_size(self._sweep.config)
        if values is None:
            return None  # When its turn comes, the job fails of it alone.
        try:
            asked = read_size(*values)
        except OptionError:
            return None  # As above.
        try:
            return self._sweep.pool.size(*asked)
        except OptionError as error:
            raise OptionError(f"Job {number} ({override_line(self._overrides[number])}): {error}") from None

    # What is to be expected

    @property
    def most_jobs(self) -> int:
        """Most of these jobs that can run at a time, as far as their sizes are known."""
        least = min((size.devices for size in self._sizes), default=1)
        return min(len(self._overrides), self._sweep.pool.most_jobs(least))

    @property
    def most_ranks(self) -> int:
        """Most ranks that can run at a time, as far as the jobs' sizes are known."""
        pool = self._sweep.pool
        unknown = len(self._overrides) - len(self._sizes)
        if len(set(self._sizes)) == 1 and not unknown:
            return self.most_jobs * self._sizes[0].nproc
        known = [size.nproc for size in self._sizes]
        nprocs = known + [max(1, *known, len(pool.devices))] * unknown
        # The largest ones together, as far as there is room for them.
        together = sum(sorted(nprocs)[-int(min(len(nprocs), pool.limit)) :])
        per_rank = 1 if unknown else min((size.devices_per_rank for size in self._sizes), default=1)
        room = len(pool.devices) * pool.jobs_per_device // per_rank
        return max(1, min(together, room) if pool.devices else together)

    @property
    def summary(self) -> str:
        """Say how many jobs there are, how many run at a time, with how many ranks, on which devices."""
        count = len(self._overrides)
        each = f"{self._said_sizes} each" if self._sizes else "ranks as each job asks"
        pool, nnodes = self._sweep.pool, self._sweep.settings.nnodes
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
        """Say how many ranks the jobs have, and on how many devices where that is another number."""
        least, most = (pick(self._sizes, key=lambda size: size.nproc) for pick in (min, max))
        ranks = pluralize("-".join(map(str, dict.fromkeys((least.nproc, most.nproc)))), "rank")
        if not self._sweep.pool.devices or all(size.devices_per_rank == 1 for size in self._sizes):
            return ranks
        fewest, widest = (pick(size.devices for size in self._sizes) for pick in (min, max))
        return f"{ranks} on {pluralize('-'.join(map(str, dict.fromkeys((fewest, widest)))), 'device')}"

    def base_environment(self) -> dict[str, str]:
        """Return the environment that all ranks of these jobs start from.

        Raises:
            OptionError: when jobs that run at once would have one port.
        """
        settings = self._sweep.settings
        if settings.master_port is not None and self.most_jobs > 1:
            raise OptionError(
                f"hydra.launcher.master_port={settings.master_port} is one port, but "
                f"{pluralize(self.most_jobs, 'job')} run at once. Leave it null, or set "
                "hydra.launcher.max_parallel_jobs=1."
            )
        self._look_at_first()
        return self._with_threads(self.most_ranks)

    def environment_of(self, plan: PlannedJob) -> dict[str, str]:
        """Return what the ranks of a job start from: fewer threads if it is larger than what was known at first."""
        at_once = plan.size.nproc * min(len(self._overrides), self._sweep.pool.most_jobs(plan.size.devices))
        return self._with_threads(max(at_once, self.most_ranks))

    def _with_threads(self, ranks_at_once: int) -> dict[str, str]:
        return environment.with_omp_threads(
            self._inherited, self._sweep.settings.omp_num_threads, processes.usable_cores(), ranks_at_once
        )

    # Before a job's turn

    @property
    def waiting(self) -> bool:
        """Whether jobs are in line."""
        return bool(self._schedule.waiting)

    @property
    def has_work(self) -> bool:
        """Whether something can be done ahead."""
        return self._to_plan() is not None or bool(self._to_compose)

    def work(self) -> None:
        """Do the next piece of it: freeze the job that is first in line, or compose another one.

        Composing early shows early what does not compose, and how many ranks a job has; and a config file that is
        edited while jobs run changes none of those that wait.
        """
        number = self._to_plan()
        if number is not None:
            self._plan(number)
        elif self._to_compose:
            self._compose(self._to_compose.pop(0))

    def _to_plan(self) -> int | None:
        """Return the job whose turn it is or will be next, unless it is ready."""
        number = self._unready if self._unready is not None else next(iter(self._schedule.waiting), None)
        return None if number in self._planned else number

    def _compose(self, number: int) -> None:
        try:
            size = self._put_by(number)
        except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
            self._drop(number, error)
        else:
            if size is not None:
                self._schedule.resize(number, size.devices)

    def _plan(self, number: int) -> None:
        self._unready = None
        kept = self._kept.pop(number, None)
        if number in self._to_compose:
            self._to_compose.remove(number)
        overrides = self._overrides[number]
        try:
            config = kept.load() if kept is not None else compose_job(self._sweep, overrides)
            plan = plan_job(self._sweep, number, overrides, config)
        except Exception as error:  # noqa: BLE001  (as above)
            self._drop(number, error)
            return
        earlier = self._sweep.earlier
        decision = None if earlier is None else earlier.decide(plan.known, plan.config_yaml, plan.config_hash)
        if self._settle(plan, decision):
            self._schedule.drop(number)
            return
        self._planned[number] = plan
        self._schedule.resize(number, plan.size.devices)

    def _drop(self, number: int, error: Exception) -> None:
        self._schedule.drop(number)
        self._fail(number, error)

    def discard_ready(self) -> list[int]:
        """Send those away that are ready to start, and return who that was."""
        ready = list(self._planned)
        for number in ready:
            self._schedule.drop(number)
        self._planned.clear()
        return ready

    def clear(self) -> list[int]:
        """Send everybody away, and return who was there."""
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
        """Whether the next job waits for devices that are not this sweep's."""
        return bool(self._refused)

    def take_next(self) -> tuple[PlannedJob, tuple[str, ...]] | None:
        """Return the job whose turn it is, and its devices; None when it is nobody's, or the job is not ready."""
        gate = self._sweep.gate
        turn = self._schedule.choose(gate.obtain)
        plan = None if turn is None else self._planned.pop(turn.job, None)
        if turn is not None and plan is not None:
            self._schedule.start(turn)
        gate.release_unused(self._schedule.devices_in_use)
        refused = gate.blocked_by()
        self._say_refused(refused if turn is None else {})
        if turn is None or plan is None:
            # To freeze it takes a while, and may show that it cannot start, or that it has another size.
            self._unready = None if turn is None else turn.job
            return None
        return plan, turn.devices

    def _say_refused(self, refused: dict[str, str]) -> None:
        self._refused = refused
        for device, why in refused.items():
            if self._said.get(device) != why:
                self._said[device] = why
                _log.info("Waiting for device %s: it %s", device, why)

    def job_ended(self, number: int) -> None:
        """Take a job that was started off its devices."""
        self.pause(number)
        self._schedule.end(number)
        self._sweep.gate.release_unused(self._schedule.devices_in_use)

    def pause(self, number: int) -> None:
        """Take note that one start of a job has ended, and that another one may follow on the same devices."""
        self._sweep.gate.job_ended(self._schedule.alone_on(number))
