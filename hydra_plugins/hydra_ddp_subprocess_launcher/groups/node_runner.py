"""Run one node's groups of a job, one after the other."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from hydra.core.utils import JobReturn

from ..common.errors import JobFailedError, LauncherError, StartError
from ..common.files import JobPaths
from ..common.processes import start_environment, usable_cores
from ..common.protocol import Forward, GroupSpec, JobEnd, LaunchSpec, Preempt
from ..common.signals import FORWARDED_SIGNALS, STOP_SIGNALS, Shutdown, ShutdownController, recorded_signals
from ..common.text import encodable
from ..display.tables import override_line
from ..job.environment import scrub, with_omp_threads
from ..job.plan import Allocation, Attempt, build_group_spec
from ..job.program import rank_command
from ..job.results import JobResult, failed_before_start, make_job_return, skipped
from ..job.settings import SweepContext
from ..resources.devices import DeviceAllocator
from ..resources.port import ReservedPort, check_other_node
from ..resources.schedule import DevicePool
from ..supervisor.heartbeat import refresh_names
from .rendezvous import JobFolder, NodeRendezvous, Rendezvous, report_for_keeper
from .running_job import LEFTOVERS_MESSAGE, JobMonitor, RunningJob, name_leftovers

_log = logging.getLogger(__name__)
# Seconds between two reads of the first node's files, and between two checks for a keeper that no longer answers.
_FILES_INTERVAL_S = 0.2
_INSIST_INTERVAL_S = 1.0
_ORPHANED = "the cluster's process that had started it here is gone"


class NodeRunner:
    """Run groups in the main thread, and act on signals.

    Args:
        rendezvous: The matching processes on the job's other nodes.
        preempted_by: Signal with which a cluster announces that it will interrupt and requeue the job, or None.
        parent: Pid of the only process that can end this one, or None if there is no such process.

    Attributes:
        shutdown: The shutdown state that signals have requested.
        preempted: Whether `preempted_by` has arrived.
        orphaned: Whether the parent is gone.
    """

    def __init__(
        self, number: int, rendezvous: Rendezvous, preempted_by: int | None = None, parent: int | None = None
    ) -> None:
        self.number = number
        self._parent = parent
        self.orphaned = False
        self._rendezvous = rendezvous
        self._preempted_by = preempted_by
        self.shutdown = ShutdownController()
        self.preempted = False
        self._job: RunningJob | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals for the duration of the block."""
        heard = (*STOP_SIGNALS, *FORWARDED_SIGNALS)
        with recorded_signals(heard) as self._arrived, selectors.DefaultSelector() as selector:
            self._monitor = JobMonitor(selector)
            selector.register(self._arrived.wakeup, selectors.EVENT_READ)
            try:
                yield
            finally:
                self._monitor.close()
            self._obey()

    @property
    def stopping(self) -> bool:
        """Whether no more groups are started."""
        return self.shutdown.stopped or self.preempted or self.orphaned

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Wait until `ready` returns True, and return False if this process is stopped first.

        Raises:
            StartError: if another node has left.
        """
        while not self.stopping:
            departed = self._rendezvous.check()
            # Check this first, as another node may have written before it left.
            if ready():
                return True
            if departed:
                raise StartError(f"Node {self.number} cannot go on: {departed}.")
            self.pause()
        return False

    def is_stopped_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for a signal that stops this node, and return whether the node is stopped."""
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            self.pause()
        return self.stopping

    def pause(self) -> None:
        """Wait briefly, or until a signal arrives."""
        self._monitor.wait(_FILES_INTERVAL_S)
        self._obey()

    def leave(self, why: str = "") -> None:
        """Report to the other nodes that this one leaves."""
        self._rendezvous.leave(why)

    def run_group(
        self,
        spec: LaunchSpec,
        group: GroupSpec,
        allocation: Allocation,
        attempt: Attempt,
        held: Sequence[int] = (),
    ) -> RunningJob:
        """Run this node's group of one start until all of its processes have exited, and return the job.

        Args:
            group: Spec for this node's keeper.
            attempt: Which start of the job this is.
            held: Descriptors that its keeper holds until the group is over.

        Raises:
            OSError: if no keeper can be started.
            StartError: if the job's environment contradicts its devices.
        """
        refresh_names(JobPaths(spec.run_dir).folder)
        self._job = job = self._monitor.start(spec, group, allocation, attempt, held)
        if self.shutdown.stopped:
            job.stop(self.shutdown.name)
        elif self.preempted and self._preempted_by is not None:
            job.channel.send(Preempt(self._preempted_by))
        elif self.orphaned:
            job.stop(_ORPHANED)
        while not job.finished:
            self._monitor.wait(_INSIST_INTERVAL_S)
            self._obey()
            if job.end_by is None and (departed := self._rendezvous.check()):
                job.stop(departed)
            job.check_stuck(time.monotonic())
        left = job.end_leftovers()
        if job.has_leftovers:
            _log.warning(LEFTOVERS_MESSAGE, spec.number, name_leftovers(left))
        self._monitor.remove(job)
        self._job = None
        report_for_keeper(spec, self.number, job.report)
        self._rendezvous.observe(job.report)
        return job

    def _obey(self) -> None:
        if self._parent is not None and os.getppid() != self._parent and not self.orphaned:
            self.orphaned = True
            if self._job is not None:
                self._job.stop(_ORPHANED)
        for number in self._arrived.take():
            if number == self._preempted_by:
                self.preempted = True
                self._send(Preempt(number))
            elif number in FORWARDED_SIGNALS:
                self._send(Forward(number))
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        order = self.shutdown.receive(number, time.monotonic())
        if order is not Shutdown.IGNORE and self._job is not None:
            kill = order is Shutdown.KILL
            how, hint = ("killing", "") if kill else ("stopping", " (once more: kill at once)")
            _log.warning("%s: %s the running job%s", signal.Signals(number).name, how, hint)
            self._job.stop(signal.Signals(number).name, at_once=kill)

    def _send(self, message: object) -> None:
        if self._job is not None:
            self._job.channel.send(message)


class Follower:
    """Run this node's part of the jobs of one `launch()` call, each when the first node starts it.

    Args:
        overrides: Override strings of each job, by its number, in order.
        pool: Devices of this node.
    """

    def __init__(
        self,
        context: SweepContext,
        overrides: Mapping[int, Sequence[str]],
        rendezvous: NodeRendezvous,
        pool: DevicePool,
        allocator: DeviceAllocator,
    ) -> None:
        self._context = context
        self._rendezvous = rendezvous
        self._overrides = overrides
        self._pool = pool
        self._allocator = allocator
        self._node = NodeRunner(context.settings.node_rank, rendezvous)
        self._base = scrub(os.environ, start_environment())

    def run(self) -> list[JobReturn]:
        """Take part in all jobs and return one JobReturn per job, in order. Only the first node gets values.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after every rank of this node has exited.
            SystemExit: likewise on SIGTERM or SIGHUP.
            StartError: if another node has left the sweep, or a job cannot be started on this node.
        """
        settings = self._context.settings
        _log.info("Node %d of %d: following node 0", settings.node_rank, settings.nnodes)
        returns = []
        try:
            with self._node.listening():
                for number, overrides in self._overrides.items():
                    result = self._follow(number, tuple(overrides))
                    if self._node.stopping:
                        break
                    returns.append(make_job_return(overrides, None, "", result))
        finally:
            self._allocator.close()
        self._node.shutdown.leave_if_stopped()
        return returns

    def _follow(self, number: int, overrides: tuple[str, ...]) -> JobResult:
        folder = JobFolder(self._rendezvous.job_dir(number))
        # Otherwise, NFS may cache for half a minute that it does not exist.
        with contextlib.suppress(OSError):
            os.makedirs(folder.path, exist_ok=True)
        _log.info("\t#%d : %s", number, encodable(override_line(overrides)))
        for nth in range(1 << 30):
            spec = self._wait_for_start(folder, str(nth))
            if spec is None:
                break
            if spec.overrides != overrides:
                raise StartError(
                    f"Job {number} of node 0 has the overrides {override_line(spec.overrides)}, here it has "
                    f"{override_line(overrides)}. Start all nodes with the same command but for "
                    "hydra.launcher.node_rank."
                )
            try:
                self._run_group(spec)
            except (LauncherError, OSError) as error:
                # No keeper is left to report this to the other nodes.
                raise StartError(f"Job {number} cannot be started on this node: {error}") from None
        return self._result(number, folder.read_end())

    def _wait_for_start(self, folder: JobFolder, key: str) -> LaunchSpec | None:
        """Wait for the next start of the job by node 0. Return None if the job is over or this process is stopped."""
        found: LaunchSpec | None = None

        def is_published() -> bool:
            nonlocal found
            folder.refresh()
            # Check for the end first, as nothing of a finished job must be started.
            over = folder.read_end() is not None
            found = None if over else folder.read_start(key)
            return over or found is not None

        self._node.wait_until(is_published)
        return found

    def _run_group(self, published: LaunchSpec) -> None:
        settings = self._context.settings
        devices = self._acquire_devices(self._pool.size(published.nproc, published.devices_per_rank).devices)
        if devices is None:
            return
        # This node may have the program in another place, and has its own devices.
        argv, cwd = rank_command(self._context.entry, settings.wrapper, published.run_dir, published.overrides)
        locked = self._allocator.lock_names(devices)
        spec = replace(published, argv=argv, cwd=cwd, devices=devices or None, locked=locked)
        base = with_omp_threads(self._base, settings.omp_num_threads, usable_cores(), spec.nproc)
        group = build_group_spec(spec, base, settings.node_rank)
        check_other_node(spec.master_addr, self._rendezvous.first_host)
        allocation = Allocation(devices, ReservedPort(spec.master_addr, spec.master_port, None), locked)
        try:
            self._node.run_group(spec, group, allocation, Attempt(), self._allocator.descriptors(devices))
        finally:
            self._allocator.job_ended(devices)
            self._allocator.release_unused(())

    def _acquire_devices(self, count: int) -> tuple[str, ...] | None:
        """Wait for a number of devices. Return None if this process is stopped."""
        pool, allocator = self._pool, self._allocator
        acquired: tuple[str, ...] = ()
        reported: dict[str, str] = {}

        def are_acquired() -> bool:
            nonlocal acquired
            acquired = tuple(device for device in pool.devices if allocator.acquire(device))[:count]
            allocator.release_unused(acquired)
            refused = allocator.blocked_by()
            for device, why in refused.items() if len(acquired) < count else ():
                if reported.get(device) != why:
                    reported[device] = why
                    _log.info("Waiting for device %s: it %s", device, why)
            return len(acquired) == count

        if not pool.devices:
            return ()
        return acquired if self._node.wait_until(are_acquired) else None

    def _result(self, number: int, end: JobEnd | None) -> JobResult:
        if end is None:
            return skipped("this process was stopped")
        if end.completed:
            _log.info("\t#%d : completed", number)
            return JobResult(completed=True, value=None)
        _log.error("#%d : FAILED: %s", number, encodable(end.cause))
        return failed_before_start(JobFailedError(end.cause))
