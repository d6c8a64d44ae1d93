"""A launching process that follows another node's: its part of each job of a sweep started by hand on several nodes."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace

from hydra.core.utils import JobReturn

from . import _environment, _machine, _results
from ._ending import leave
from ._entry import rank_command
from ._errors import JobFailedError, LauncherError, StartError
from ._gathering import Gathering
from ._job_return import make_job_return
from ._node import Node
from ._nodes import JobEnd, JobFolder
from ._port import ReservedPort, check_other_node
from ._report import override_line, shown
from ._results import Verdict
from ._setup import Sweep
from ._start import Attempt, JobStart, Place

_log = logging.getLogger(__name__)


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
        self._gathering: Gathering = sweep.gathering
        self._overrides = dict(enumerate(job_overrides, start=first))
        self._node = Node(sweep.settings.node_rank, sweep.gathering)
        self._base = _environment.scrub(os.environ, _machine.start_environment())

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

    def _follow(self, number: int, overrides: tuple[str, ...]) -> Verdict:
        folder = JobFolder(self._gathering.job_folder(number))
        # Else that it is missing may be remembered for half a minute (NFS).
        with contextlib.suppress(OSError):
            os.makedirs(folder.path, exist_ok=True)
        _log.info("\t#%d : %s", number, shown(override_line(overrides)))
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
        base = _environment.with_omp_threads(
            self._base, sweep.settings.omp_num_threads, _machine.usable_cores(), group.nproc
        )
        port = ReservedPort(group.master_addr, group.master_port, None)
        check_other_node(group.master_addr, self._gathering.first_host)
        try:
            self._node.run_group(own, base, Place(devices, port), Attempt(), sweep.gate.descriptors(devices))
        finally:
            sweep.gate.job_ended(devices)
            sweep.gate.keep_only(())

    def _obtain_devices(self, count: int) -> tuple[str, ...] | None:
        """Wait for so many devices; None: this process has been stopped."""
        pool, gate = self._sweep.pool, self._sweep.gate
        obtained: tuple[str, ...] = ()
        said: dict[str, str] = {}

        def are_obtained() -> bool:
            nonlocal obtained
            obtained = tuple(device for device in pool.devices if gate.obtain(device))[:count]
            gate.keep_only(obtained)
            refused = gate.take_refused()
            for device, why in refused.items() if len(obtained) < count else ():
                if said.get(device) != why:
                    said[device] = why
                    _log.info("Waiting for device %s: it %s", device, why)
            return len(obtained) == count

        if not pool.devices:
            return ()
        return obtained if self._node.wait_until(are_obtained) else None

    def _verdict(self, number: int, end: JobEnd | None) -> Verdict:
        if end is None:
            return _results.skipped("this process was stopped")
        if end.completed:
            _log.info("\t#%d : completed", number)
            return Verdict(completed=True, value=None)
        _log.error("#%d : FAILED: %s", number, shown(end.cause))
        return _results.failed_before_start(JobFailedError(end.cause))
