"""What submitit runs on each node of a job: that node's part of it. The first node decides, the others follow."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..common.errors import JobFailedError, LauncherError, StartError
from ..common.files import dump
from ..common.processes import usable_cores
from ..common.protocol import JOB_ID_TOKEN, GroupReport, JobEnd, LaunchSpec, Payload, StopReason
from ..common.signals import STOP_SIGNALS
from ..common.text import pluralize
from ..groups.node_runner import NodeRunner
from ..groups.rendezvous import JobFolder, NodeRendezvous, Rendezvous
from ..job.environment import scrub, with_omp_threads
from ..job.plan import Allocation, Attempt, build_group_spec, write_job_files
from ..job.results import has_completed, read_outcomes
from ..resources.port import ReservedPort, check_other_node, reserve_port, reserve_port_for_nodes
from . import submitit_api

_log = logging.getLogger(__name__)
# Seconds for which a part that was told to stop waits for the cluster to kill it, or to tell what comes next. One that
# left earlier would look as if it had ended by itself, and would not be queued again.
_AFTERMATH_S = 3600.0
# Likewise where no cluster follows up: submitit's local executor.
_AFTERMATH_LOCAL_S = 2.0
# Seconds between a signal to the processes on one node and the same one to those on another, at most.
_SKEW_S = 5.0
# Seconds for the cluster to end a job that it does not queue again when it is asked to.
_REFUSED_S = 60.0
# Seconds for the processes of all nodes to come: they are started together, but an environment may be slow to load.
_ARRIVE_S = 600.0
# How often, and every how many seconds, to try to tell of the end of the job.
_PUBLISH_TRIES = 10
_PUBLISH_INTERVAL_S = 6.0
# Seconds for the first node to tell of the end of a job that another one cannot go on with.
_LAST_WORD_S = 30.0


class NodeTask:
    """Run this node's part of a job.

    Args:
        requeued: How often submitit has queued the job again.
    """

    def __init__(self, requeued: int = 0) -> None:
        self._requeued = requeued

    def __call__(self, job: SubmittedJob) -> str:
        """Run until no process of the job is left on this node.

        Returns:
            How it ended, for submitit's log.

        Raises:
            JobFailedError: when the job failed.
            SystemExit: when it was stopped from outside.
        """
        import submitit

        _log_to_stderr()
        environment = submitit.JobEnvironment()
        hosts = list(environment.hostnames)
        nnodes = job.spec.nnodes
        if nnodes > 1 and (len(hosts) != nnodes or environment.num_nodes != nnodes):
            raise StartError(
                f"This job is for {pluralize(nnodes, 'node')}, but the cluster names {len(hosts)} ({', '.join(hosts)}; "
                f"SLURM_JOB_NODELIST={os.environ.get('SLURM_JOB_NODELIST')!r}). Its ranks could not find each other. "
                "See what it was given: scontrol show job."
            )
        # Alike on all nodes, and another one whenever the job is started again.
        generation = f"{self._requeued}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        end = JobFolder(job.folder).read_end()
        if end is not None:
            # Nobody waits for this run of it, and another one may have its run directory by now.
            _log.info("The job is over already: %s. It is not run again", end.cause or "it completed")
            return _as_told(end)
        return _NodeRun(job.with_job_id(environment.job_id), environment, hosts, generation).run()

    def checkpoint(self, job: SubmittedJob) -> Any:
        """Return what submitit is to run when it queues the job again."""
        import submitit

        return submitit.helpers.DelayedSubmission(NodeTask(self._requeued + 1), job)


def _as_told(end: JobEnd) -> str:
    if not end.completed:
        raise JobFailedError(f"The job failed ({end.cause or 'see the logs of its ranks'}).")
    return "completed"


def _log_to_stderr() -> None:
    """Let this package's log lines go into submitit's log. Not those of all, as submitit's own are there already."""
    logger = logging.getLogger(__name__.rsplit(".", 2)[0])
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class _NodeRun:
    """One node's part of a job, from its start on this node until the cluster takes the node away."""

    def __init__(self, job: SubmittedJob, environment: Any, hosts: Sequence[str], generation: str) -> None:
        self._job = job
        self._environment = environment
        self._hosts = tuple(hosts)
        self._generation = generation
        self._folder = JobFolder(job.folder)
        self._preempted_by = int(environment._usr_sig())
        self._aftermath_s = _AFTERMATH_S if environment.name() == "slurm" else _AFTERMATH_LOCAL_S
        number, nnodes = environment.node, job.spec.nnodes
        rendezvous = Rendezvous()
        if nnodes > 1:
            parts = os.path.join(job.folder, f"parts_{generation}")
            rendezvous = NodeRendezvous(parts, number, nnodes, _ARRIVE_S)
        self._node = NodeRunner(number, rendezvous, self._preempted_by, os.getppid())
        at_start = {} if job.seed is None else {"PL_GLOBAL_SEED": job.seed}
        self._base = with_omp_threads(
            scrub(os.environ, at_start),
            job.omp_num_threads,
            usable_cores(),
            job.spec.nproc,
        )

    def run(self) -> str:
        """Take part in the job to its end."""
        try:
            with self._node.listening():
                end = (self._lead if self._node.number == 0 else self._follow)()
        except (LauncherError, OSError, ValueError) as error:
            if self._node.number == 0:
                self._publish(JobEnd(False, f"it could not be started: {error}"))
            self._node.leave(str(error))
            raise
        if end is not None and self._node.number == 0:
            self._publish(end)
        if self._node.orphaned:
            self._give_back()
        if end is None:
            self._leave()
        assert end is not None
        return _as_told(end)

    def _lead(self) -> JobEnd | None:
        """Start the job, again if it may be, and return how it ended; None: it was stopped from outside."""
        job = self._job
        attempt = Attempt(number=job.first_attempt + self._folder.starts)
        nth = 0
        while True:
            port = self._reserve_port()
            spec = self._launch_spec(attempt, port)
            group = build_group_spec(spec, self._base)
            write_job_files(spec, group, job.payload, job.config_yaml)
            self._folder.publish_start(f"{self._generation}.{nth}", spec)
            running = self._node.run_group(spec, group, Allocation((), port), attempt)
            outcomes = read_outcomes(spec)
            completed = running.report is not None and has_completed(running.report, outcomes)
            orphaned = self._node.orphaned
            if not completed and not orphaned and (self._node.stopping or self._is_being_stopped(running.report)):
                return None
            again = None if orphaned else running.next_attempt(completed, own_port=job.master_port is None)
            if again is None:
                return JobEnd(completed, "" if completed else "see the logs of its ranks", spec, running.report)
            _log.info("%s", again.why)
            attempt, nth = again, nth + 1

    def _publish(self, end: JobEnd) -> None:
        """Tell of the end of the job, again where that fails, as on a disk that is full for a while.

        Raises:
            OSError: when it cannot be told.
        """
        for _ in range(_PUBLISH_TRIES):
            try:
                return self._folder.publish_end(end)
            except OSError as error:
                _log.warning(
                    "The end of the job cannot be told: %s: %s. It is tried again", error.strerror, error.filename
                )
                time.sleep(_PUBLISH_INTERVAL_S)
        self._folder.publish_end(end)
        return None

    def _is_being_stopped(self, report: GroupReport | None) -> bool:
        """Return whether a signal that has ended ranks elsewhere comes to this process, too."""
        if report is None:
            return False
        by_signal = report.reason in (StopReason.SIGNALLED, StopReason.PREEMPTED)
        fatal = [-number for number in (*STOP_SIGNALS, self._preempted_by)]
        by_signal |= any(ended.code in fatal and not ended.stopped for ended in report.exits)
        return by_signal and self._node.is_stopped_within(_SKEW_S)

    def _reserve_port(self) -> ReservedPort:
        job = self._job
        if job.spec.nnodes == 1:
            return reserve_port(job.master_addr, job.master_port)
        return reserve_port_for_nodes(job.master_addr or self._hosts[0], job.master_port)

    def _launch_spec(self, attempt: Attempt, port: ReservedPort) -> LaunchSpec:
        """Return a start of the job: what was submitted, and what only its first node knows."""
        job = self._job
        run_id = f"{job.spec.run_id}-{self._generation}-{attempt.number}"
        return replace(
            job.spec,
            run_id=run_id,
            attempt=attempt.number,
            restart_count=attempt.restarts,
            master_addr=port.address,
            master_port=port.number,
            payload_digest=hashlib.sha256(dump(job.payload)).hexdigest(),
            rank_options=replace(job.spec.rank_options, ignored_signals=(self._preempted_by,)),
            rendezvous_dir=os.path.join(job.folder, run_id) if job.spec.nnodes > 1 else "",
            hosts=self._hosts,
        )

    def _follow(self) -> JobEnd | None:
        """Run this node's group of each start; return how the job ended, or None: it was stopped from outside."""
        nth = 0
        while True:
            found: Mapping[str, LaunchSpec] = {}

            def is_told(key: str = f"{self._generation}.{nth}") -> bool:
                nonlocal found
                self._folder.refresh()
                spec = self._folder.read_start(key)
                found = {} if spec is None else {key: spec}
                return spec is not None or self._folder.read_end() is not None

            if not self._node.wait_until(is_told):
                return None
            if not found:
                return self._folder.read_end()
            (spec,) = found.values()
            check_other_node(spec.master_addr, self._hosts[0])
            port = ReservedPort(spec.master_addr, spec.master_port, None)
            group = build_group_spec(spec, self._base, self._node.number)
            self._node.run_group(spec, group, Allocation((), port), Attempt())
            nth += 1

    def _give_back(self) -> None:
        """End the job on the cluster, which may take it for running as long as its time lasts."""
        self._node.leave()
        until = time.monotonic() + _LAST_WORD_S
        with self._node.listening():
            # The first node says why it ends.
            while self._folder.read_end() is None and time.monotonic() < until:
                self._node.pause()
        if self._environment.name() == "slurm":
            submitit_api.scancel(self._environment.job_id)

    def _leave(self) -> None:
        """Let submitit queue the job again if that is what the cluster wants; else wait for what it does.

        Raises:
            SystemExit: in the end.
        """
        # Some clusters say SIGTERM first, and then why.
        until = time.monotonic() + self._aftermath_s
        with self._node.listening():
            while not self._node.preempted and self._waits(until):
                self._node.pause()
        refused = ""
        if self._node.preempted:
            refused = self._requeue()
            if refused:
                until = time.monotonic() + _REFUSED_S
            with self._node.listening():
                while self._waits(until):
                    self._node.pause()
        if refused and self._folder.read_end() is None:
            advice = "Where the cluster does not requeue by default: +hydra.launcher.additional_parameters.requeue=true"
            self._folder.publish_end(JobEnd(False, f"it could not be queued again: {refused}. {advice}"))
        raise SystemExit(128 + (self._node.shutdown.stopped_by or self._preempted_by))

    def _waits(self, until: float) -> bool:
        return time.monotonic() < until and not self._node.orphaned and self._folder.read_end() is None

    def _requeue(self) -> str:
        """Have submitit queue the job again, and return why the cluster has refused that, if it has.

        Raises:
            Exception: what submitit says where it is not to be queued again, such as too many time limits.
            SystemExit: when it is queued again.
        """
        # Submitit's own, which it set before it called us. Only on the first node does it do more than write a line.
        handler = signal.getsignal(self._preempted_by)
        assert callable(handler)
        try:
            handler(self._preempted_by, None)
        except Exception as error:
            if not submitit_api.is_of_a_command(error):
                self._folder.publish_end(JobEnd(False, str(error)))
                raise
            # Its `scontrol requeue` is a process of the job, too, and what it has asked for may end it at once. Or the
            # cluster is about to queue the job again itself.
            _log.warning("%s", error)
            return "" if submitit_api.was_ended(error) else str(error)
        return ""


@dataclass(frozen=True)
class SubmittedJob:
    """A job on its way to a cluster: all that its nodes need. JOB_ID_TOKEN stands for its id there.

    Attributes:
        spec: Its start, but for what the first node decides.
        payload: What its ranks will read.
        config_yaml: Its own config, not resolved.
        folder: Where its nodes and the launching process meet, absolute.
        first_attempt: How often it was started before it was submitted.
        master_addr: That option.
        master_port: That option.
        omp_num_threads: That option.
        seed: PL_GLOBAL_SEED of the environment in which the launching process was started; None: there was none.
    """

    spec: LaunchSpec
    payload: Payload
    config_yaml: str
    folder: str
    first_attempt: int
    master_addr: str | None
    master_port: int | None
    omp_num_threads: int | None
    seed: str | None

    def with_job_id(self, job_id: str) -> SubmittedJob:
        """Return the job with its id on the cluster."""

        def put_id(text: str) -> str:
            return text.replace(JOB_ID_TOKEN, job_id)

        spec = replace(
            self.spec,
            run_dir=put_id(self.spec.run_dir),
            sweep_dir=put_id(self.spec.sweep_dir),
            argv=tuple(map(put_id, self.spec.argv)),
            env_set={name: put_id(value) for name, value in self.spec.env_set.items()},
        )
        payload = replace(self.payload, run_dir=put_id(self.payload.run_dir), job_id=job_id)
        return replace(self, spec=spec, payload=payload)
