"""One node's groups of a job, one after the other."""

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

from ..common import processes, protocol, signals
from ..common.errors import JobFailedError, LauncherError, StartError
from ..common.signals import leave
from ..common.text import encodable
from ..display.tables import override_line
from ..job import environment, results
from ..job.plan import Allocation, Attempt, JobStart, group_spec
from ..job.program import rank_command
from ..job.results import JobResult, make_job_return
from ..job.settings import Sweep
from ..resources.port import ReservedPort, check_other_node
from ..supervisor.heartbeat import refresh_names
from .rendezvous import JobEnd, JobFolder, NodeRendezvous, tell_for_keeper
from .running_job import LEFT, JobMonitor, RunningJob, who_is_left

_log = logging.getLogger(__name__)
# Seconds between two looks at files of the first node, and at a keeper that may have stopped answering.
_FILES_INTERVAL_S = 0.2
_INSIST_INTERVAL_S = 1.0
_ORPHANED = "the cluster's process that had started it here is gone"


class NodeRunner:
    """Run groups in the main thread, and obey signals.

    Args:
        number: Of this node.
        gathering: The processes like this one on the job's other nodes; None: there are none.
        preempted_by: Signal by which a cluster tells that the job will be interrupted and started again; None: none.
        parent: Process without which nobody could end this one any more; None: there is none.

    Attributes:
        stopped_by: Signal that has stopped this node; None: none has.
        preempted: Whether `preempted_by` has come.
        orphaned: Whether the parent is gone.
    """

    def __init__(
        self, number: int, gathering: NodeRendezvous | None, preempted_by: int | None = None, parent: int | None = None
    ) -> None:
        self.number = number
        self._parent = parent
        self.orphaned = False
        self._gathering = gathering
        self._preempted_by = preempted_by
        self.stopped_by: int | None = None
        self._stopped_at = 0.0
        self.preempted = False
        self._job: RunningJob | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to signals while the block runs."""
        heard = (*signals.STOP_SIGNALS, *signals.FORWARDED_SIGNALS)
        with signals.recorded_signals(heard) as self._arrived, selectors.DefaultSelector() as selector:
            self._hub = JobMonitor(selector)
            selector.register(self._arrived.wakeup, selectors.EVENT_READ)
            try:
                yield
            finally:
                self._hub.close()
            self._obey()

    @property
    def stopping(self) -> bool:
        """Whether no group shall be started any more."""
        return self.stopped_by is not None or self.preempted or self.orphaned

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Wait for what other processes write; return False where a signal came first.

        Raises:
            StartError: when another node takes no further part.
        """
        while not self.stopping:
            gone = self._gone()
            # What another node wrote before it went counts.
            if ready():
                return True
            if gone:
                raise StartError(f"Node {self.number} cannot go on: {gone}.")
            self.pause()
        return False

    def is_stopped_within(self, seconds: float) -> bool:
        """Wait for so long for a signal that stops this node, and return whether there is one."""
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            self.pause()
        return self.stopping

    def pause(self) -> None:
        """Wait for a moment, or for a signal."""
        self._hub.wait(_FILES_INTERVAL_S)
        self._obey()

    def leave(self, why: str = "") -> None:
        """Tell the other nodes that this one takes no further part.

        Args:
            why: One line.
        """
        if self._gathering is not None:
            self._gathering.leave(why)

    def _gone(self) -> str:
        return "" if self._gathering is None else self._gathering.look()

    def run_group(
        self, start: JobStart, base: Mapping[str, str], place: Allocation, attempt: Attempt, held: Sequence[int] = ()
    ) -> RunningJob:
        """Run this node's group of one start until nothing of it is left, and return what became of it.

        Args:
            start: The start.
            base: What ranks on this node start from.
            place: What it holds here.
            attempt: Which start of the job it is.
            held: Descriptors that its keeper holds until it is over.

        Raises:
            OSError: when there can be no keeper.
            StartError: when the job's environment contradicts its devices.
        """
        spec = group_spec(start, base, self.number)
        refresh_names(start.paths.folder)
        link, channel = self._hub.ask_for_keeper(start.number, held)
        channel.send(spec)
        self._job = job = RunningJob(start, place, attempt, link, channel, [], self.number)
        self._hub.add(job)
        if self.stopped_by is not None:
            job.stop(signal.Signals(self.stopped_by).name)
        elif self.preempted and self._preempted_by is not None:
            channel.send(protocol.Preempt(self._preempted_by))
        elif self.orphaned:
            job.stop(_ORPHANED)
        while not job.over:
            self._hub.wait(_INSIST_INTERVAL_S)
            self._obey()
            if job.end_by is None and (gone := self._gone()):
                job.stop(gone)
            job.check_stuck(time.monotonic())
        left = job.end_leftovers()
        if job.left:
            _log.warning(LEFT, start.number, who_is_left(left))
        self._hub.remove(job)
        self._job = None
        tell_for_keeper(start, self.number, job.report)
        if self._gathering is not None:
            self._gathering.learn(job.report)
        return job

    def _obey(self) -> None:
        if self._parent is not None and os.getppid() != self._parent and not self.orphaned:
            self.orphaned = True
            if self._job is not None:
                self._job.stop(_ORPHANED)
        for number in self._arrived.take():
            if number == self._preempted_by:
                self.preempted = True
                self._send(protocol.Preempt(number))
            elif number in signals.FORWARDED_SIGNALS:
                self._send(protocol.Forward(number))
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        again = self.stopped_by is not None
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, now
        elif now - self._stopped_at < signals.ONE_ORDER_S:
            return
        if self._job is not None:
            name = signal.Signals(number).name
            how = "killing" if again else "stopping"
            _log.warning("%s: %s the running job%s", name, how, "" if again else " (once more: kill at once)")
            self._job.stop(name, at_once=again)

    def _send(self, message: object) -> None:
        if self._job is not None:
            self._job.channel.send(message)


class Follower:
    """Run this node's part of the jobs of one `launch()` call, as the first node starts them.

    Args:
        sweep: What is the same for all of them.
        job_overrides: One list of override strings a job.
        first: Number of the first job.
    """

    def __init__(self, sweep: Sweep, job_overrides: list[list[str]], first: int) -> None:
        assert sweep.gathering is not None
        self._sweep = sweep
        self._gathering: NodeRendezvous = sweep.gathering
        self._overrides = dict(enumerate(job_overrides, start=first))
        self._node = NodeRunner(sweep.settings.node_rank, sweep.gathering)
        self._base = environment.scrub(os.environ, processes.start_environment())

    def run(self) -> list[JobReturn]:
        """Take part in all jobs and return one JobReturn a job, in order. Values are the first node's alone.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when every rank of this node is gone.
            SystemExit: after SIGTERM or SIGHUP, likewise; or when the first node has left the sweep.
        """
        settings = self._sweep.settings
        _log.info("Node %d of %d: following node 0", settings.node_rank, settings.nnodes)
        returns = []
        try:
            with self._node.listening():
                for number, overrides in self._overrides.items():
                    verdict = self._follow(number, tuple(overrides))
                    if self._node.stopping:
                        break
                    returns.append(make_job_return(overrides, None, "", verdict))
        finally:
            self._sweep.gate.close()
        if self._node.stopped_by is not None:
            leave(self._node.stopped_by)
        return returns

    def _follow(self, number: int, overrides: tuple[str, ...]) -> JobResult:
        folder = JobFolder(self._gathering.job_folder(number))
        # Else that it is missing may be remembered for half a minute (NFS).
        with contextlib.suppress(OSError):
            os.makedirs(folder.path, exist_ok=True)
        _log.info("\t#%d : %s", number, encodable(override_line(overrides)))
        for nth in range(1 << 30):
            start = self._wait_for_start(folder, str(nth))
            if start is None:
                break
            if start.overrides != overrides:
                raise StartError(
                    f"Job {number} of node 0 has the overrides {override_line(start.overrides)}, here it has "
                    f"{override_line(overrides)}. Start all nodes with the same command but for "
                    "hydra.launcher.node_rank."
                )
            try:
                self._run_group(start)
            except (LauncherError, OSError) as error:
                # Its keeper would have told the other nodes.
                raise StartError(f"Job {number} cannot be started on this node: {error}") from None
        return self._verdict(number, folder.read_end())

    def _wait_for_start(self, folder: JobFolder, key: str) -> JobStart | None:
        """Wait until node 0 starts the job, or starts it again; None: it is over, or this process has been stopped."""
        found: JobStart | None = None

        def is_told() -> bool:
            nonlocal found
            folder.refresh()
            # The end comes first: of a job that is over nothing is to be started.
            over = folder.read_end() is not None
            found = None if over else folder.read_start(key)
            return over or found is not None

        self._node.wait_until(is_told)
        return found

    def _run_group(self, start: JobStart) -> None:
        sweep = self._sweep
        pool = sweep.pool
        devices = self._obtain_devices(pool.size(start.group.nproc, start.devices_per_rank).devices)
        if devices is None:
            return
        argv, cwd = rank_command(sweep.entry, sweep.settings.wrapper, start.run_dir, start.overrides)
        group = replace(start.group, devices=devices or None, locked=sweep.gate.lock_names(devices))
        own = replace(start, argv=argv, cwd=cwd, group=group)
        base = environment.with_omp_threads(
            self._base, sweep.settings.omp_num_threads, processes.usable_cores(), group.nproc
        )
        port = ReservedPort(group.master_addr, group.master_port, None)
        check_other_node(group.master_addr, self._gathering.first_host)
        try:
            self._node.run_group(own, base, Allocation(devices, port), Attempt(), sweep.gate.descriptors(devices))
        finally:
            sweep.gate.job_ended(devices)
            sweep.gate.release_unused(())

    def _obtain_devices(self, count: int) -> tuple[str, ...] | None:
        """Wait for so many devices; None: this process has been stopped."""
        pool, gate = self._sweep.pool, self._sweep.gate
        obtained: tuple[str, ...] = ()
        said: dict[str, str] = {}

        def are_obtained() -> bool:
            nonlocal obtained
            obtained = tuple(device for device in pool.devices if gate.obtain(device))[:count]
            gate.release_unused(obtained)
            refused = gate.blocked_by()
            for device, why in refused.items() if len(obtained) < count else ():
                if said.get(device) != why:
                    said[device] = why
                    _log.info("Waiting for device %s: it %s", device, why)
            return len(obtained) == count

        if not pool.devices:
            return ()
        return obtained if self._node.wait_until(are_obtained) else None

    def _verdict(self, number: int, end: JobEnd | None) -> JobResult:
        if end is None:
            return results.skipped("this process was stopped")
        if end.completed:
            _log.info("\t#%d : completed", number)
            return JobResult(completed=True, value=None)
        _log.error("#%d : FAILED: %s", number, encodable(end.cause))
        return results.failed_before_start(JobFailedError(end.cause))
